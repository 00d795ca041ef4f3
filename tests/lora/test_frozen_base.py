"""A checkpoint of adapters is of the base weights that it leaves out."""

from __future__ import annotations

import torch
from torch import nn

from rlrefit.recipes.policy.state import frozen_digest


def test_a_digest_of_the_base_changes_with_its_values_and_not_with_those_of_the_adapter() -> None:
    model = nn.ModuleDict({"base": nn.Linear(8, 4, dtype=torch.bfloat16), "adapter": nn.Linear(8, 2)})
    model["base"].requires_grad_(False)
    before = frozen_digest([model])
    with torch.no_grad():
        model["adapter"].weight.add_(1)
    assert frozen_digest([model]) == before
    with torch.no_grad():
        model["base"].weight[0, 0] += 1
    assert frozen_digest([model]) != before
