"""Projections of Mamba-2 mixers and gated delta nets: several blocks in one weight, each cut by TP on its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .storage import Param, Part, Weight
from .units import Division, Mesh, Place


@dataclass(frozen=True)
class Blocks:
    """A weight whose first dimension is a row of blocks; a rank stores its part of each, one after another.

    Attributes:
        hf: Hugging Face name.
        megatron: Megatron's name.
        vllm: vLLM's name.
        blocks: lengths of the blocks.
        tail: the other dimensions.
        groups: of heads that share a state, or a key; TP has to divide them.
    """

    hf: str
    megatron: str
    vllm: str
    blocks: tuple[int, ...]
    tail: tuple[int, ...]
    groups: int

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.hf, (sum(self.blocks), *self.tail))

    def train(self, place: Place) -> Iterator[Param]:
        yield self._param(self.megatron, place)

    def gen(self, place: Place) -> Iterator[Param]:
        yield self._param(self.vllm, place)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the groups of heads of {self.hf}", self.groups, "tp")

    gen_divisions = train_divisions

    def _param(self, name: str, place: Place) -> Param:
        (weight,) = self.weights()
        box = tuple((0, n) for n in self.tail)
        index = tuple(slice(0, n) for n in self.tail)
        parts: list[Part] = []
        first = row = 0
        for length in self.blocks:
            start, stop = place.tp.cut(length)
            rows = stop - start
            parts.append(
                Part(
                    self.hf,
                    weight.shape,
                    ((first + start, first + stop), *box),
                    (slice(row, row + rows), *index),
                )
            )
            first += length
            row += rows
        return Param(name, (row, *self.tail), place.dtype, tuple(parts))
