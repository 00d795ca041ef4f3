"""One refit of a live vLLM model from a checkpoint, in the process that holds the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlrefit.integration.layout import Fragment
from tests.fp8_refits import poison

if TYPE_CHECKING:
    from rlrefit.workers.engines.vllm.destination import VllmDestination


def write_fragments(fragments: list[Fragment], tensors: dict[str, torch.Tensor]) -> None:
    """Poison every byte that fragments claim, then write the checkpoint's values through them."""
    poison(fragment.view for fragment in fragments)
    for fragment in fragments:
        fragment.view.copy_(fragment.part_of(tensors[fragment.name]))


def refit(
    destination: VllmDestination,
    fragments: list[Fragment],
    misc: dict[str, str],
    tensors: dict[str, torch.Tensor],
    version: int,
) -> None:
    """A whole refit; misc tensors come through one staging buffer that is reused, as a broadcast would."""
    write_fragments(fragments, tensors)
    names = list(misc)
    for start in range(0, len(names), 3):
        staged = [(name, tensors[name].clone()) for name in names[start : start + 3]]
        destination.load_weights(iter(staged))
        poison(tensor for _, tensor in staged)
    destination.finish(version)
