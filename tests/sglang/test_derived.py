"""What a model of SGLang's makes of new weights stays where CUDA graphs read it; without SGLang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.sglang.derived import made_in_place


class _Model(nn.Module):
    """Makes all of it anew each time, as Kimi-Linear, DeepSeek-V4 and Kimi-K3 do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(4, rows, bias=False) for rows in (3, 5))
        self.norm: Any = None
        self.segments: Any = None
        self.joined: Any = None
        self.late: Any = None
        self.named: dict[str, torch.Tensor] = {}
        self.register_buffer("copied", None, persistent=False)

    def post_load_weights(self, rows: int = 8) -> None:
        weight = torch.cat([self.gate.weight.data, self.up.weight.data])
        self.joined, self.norm = weight[:rows], weight[0].bfloat16()
        self.gate.weight.data, self.up.weight.data = weight[:3], weight[3:]
        self.segments = weight[:, :2].contiguous(), 1e-6, weight[:, 2:].contiguous()
        self.copied = weight.t().contiguous()
        self.named = {"gate": weight[:3].half(), "up": weight[3:].half()}

    def held(self) -> list[torch.Tensor]:
        return [
            self.gate.weight.data,
            self.up.weight.data,
            self.joined,
            self.norm,
            self.copied,
            *self.segments[::2],
            *self.named.values(),
        ]


def test_tensors_that_are_made_anew_have_their_new_values_where_they_were() -> None:
    model, expected = _Model(), _Model()
    model.post_load_weights()
    places = [tensor.data_ptr() for tensor in model.held()]
    for _ in range(2):
        for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
            nn.init.normal_(other)
            parameter.data.copy_(other)
        expected.post_load_weights()
        with made_in_place(model):
            model.post_load_weights()
            model.late = torch.ones(2)
        assert [tensor.data_ptr() for tensor in model.held()] == places
        assert all(map(torch.equal, model.held(), expected.held()))
    # Parameters are views of the joined weight as before.
    assert model.joined.data_ptr() == model.gate.weight.data_ptr()
    assert model.late.equal(torch.ones(2))


def test_a_tensor_of_another_shape_than_graphs_read_ends_the_refit() -> None:
    model = _Model()
    model.post_load_weights()
    with pytest.raises(RefitError) as error, made_in_place(model):
        model.post_load_weights(rows=7)
    assert (error.value.stage, error.value.parameter) == ("post_load", ".joined")
