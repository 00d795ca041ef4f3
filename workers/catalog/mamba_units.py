"""Projections of a Mamba-2 mixer: several blocks in one weight, each cut by TP on its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .storage import Param, Part, Weight
from .units import Division, Mesh, Place


@dataclass(frozen=True)
class Blocks:
    """A weight whose first dimension is a row of blocks; a rank stores its part of each, one after another.

    Megatron and vLLM agree on it, but Bridge exports it through a mapping that no rule of the trainer knows.

    Attributes:
        hf: Hugging Face name.
        megatron: Megatron's name.
        vllm: vLLM's name.
        blocks: lengths of the blocks.
        tail: the other dimensions.
        groups: of the state space model; TP has to divide them.
        train_refused: why Megatron's side does not place it.
    """

    hf: str
    megatron: str
    vllm: str
    blocks: tuple[int, ...]
    tail: tuple[int, ...]
    groups: int
    train_refused: str

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.hf, (sum(self.blocks), *self.tail))

    def train(self, place: Place) -> Iterator[Param]:
        shape = (sum(self.blocks) // place.tp.size, *self.tail)
        yield Param(self.megatron, shape, place.dtype, (), (self.hf,), self.train_refused)

    def gen(self, place: Place) -> Iterator[Param]:
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
        yield Param(self.vllm, (row, *self.tail), place.dtype, tuple(parts))

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the state space groups of {self.hf}", self.groups, "tp")

    gen_divisions = train_divisions
