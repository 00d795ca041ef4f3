"""Ranks that store a catalogue model as Megatron and vLLM do: fused, stacked and padded parameters."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod

import torch

from rlrefit.integration.layout import Fragment, box_of, local_slice
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.recipes.plan.catalog import Param

# Two of these in a row, or four, are a NaN of any float type.
POISON = 0xFF
# Weights of a version are those of the first one with this added to each byte: all bytes change.
_STEP = 41


def value_of(spec: TensorSpec, version: int) -> torch.Tensor:
    """The whole weight at a version."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
    raw = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return (raw + _STEP * version).view(spec.dtype).reshape(spec.shape)


def values_of(specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """The whole weights at version 0, by Hugging Face name."""
    return {spec.name: value_of(spec, 0) for spec in specs}


class StoredRank:
    """One rank's parameters in one flat buffer, and what they have to hold at any version.

    ``values`` are those of :func:`values_of`.
    """

    def __init__(self, params: Sequence[Param], values: Mapping[str, torch.Tensor]):
        self.device = torch.device("cpu")
        sizes = [prod(param.shape) * param.dtype.itemsize for param in params]
        # Eight bytes or more between them, so that not all parameters are aligned alike.
        starts = [0, *accumulate(-(-size // 8) * 8 + 8 for size in sizes)]
        self._flat = torch.full((starts[-1],), POISON, dtype=torch.uint8)
        self._first = torch.full_like(self._flat, POISON)
        self._held = torch.zeros_like(self._flat)
        self.refused: dict[str, str] = {}
        self._fragments: list[Fragment] = []
        for param, start, size in zip(params, starts[:-1], sizes, strict=True):
            live, first, held = (
                buffer[start : start + size].view(param.dtype).view(param.shape)
                for buffer in (self._flat, self._first, self._held)
            )
            self.refused |= dict.fromkeys(param.refused, param.reason)
            ones = torch.ones(param.dtype.itemsize, dtype=torch.uint8).view(param.dtype)
            for part in param.parts:
                first[part.index] = values[part.name][local_slice(box_of(part.full_shape), part.box)]
                held[part.index] = ones
                self._fragments.append(Fragment(part.name, part.full_shape, part.box, live[part.index]))
        self.poison()

    def hold(self, version: int) -> None:
        """Take the weights of a version, as an optimizer step leaves them; padding keeps the poison."""
        self._flat.copy_(self._at(version))

    def poison(self) -> None:
        """Overwrite everything with NaN."""
        self._flat.fill_(POISON)

    def wrong(self, version: int) -> list[str]:
        """How many bytes are not those of ``version``, padding that was written among them."""
        count = int((self._flat != self._at(version)).sum())
        return [f"{count} of {len(self._flat)} bytes"] if count else []

    def held_fragments(self) -> list[Fragment]:
        """Of all parts that a rule places and no rank refuses."""
        return [f for f in self._fragments if f.name not in self.refused]

    def _at(self, version: int) -> torch.Tensor:
        return torch.where(self._held.bool(), self._first + _STEP * version, POISON)


class StoredDestination(StoredRank):
    """A generation rank, whose own loader takes what the misc path brings."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for fragment in self._fragments:
                if fragment.name == name:
                    fragment.view.copy_(tensor[local_slice(box_of(tensor.shape), fragment.box)])
