"""Units: groups of weights that a trainer or an engine stores together, with both sides' storage side by side.

The training side is Megatron-core 0.19 with Transformer Engine as Megatron-Bridge 0.6 builds it, and what
``workers.trainers.megatron.rules`` places or refuses; the generation side is vLLM 0.21 without quantization. Names are
relative to a layer's prefix, so all layers of one kind share their units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch

from ....integration.layout import Box, box_of
from .storage import Index, Param, Part, Weight

# vLLM pads the rows of embeddings to a multiple of this (DEFAULT_VOCAB_PADDING_SIZE).
_VLLM_VOCABULARY_MULTIPLE = 64

ROUTER = "MoE router: engines keep it in a dtype or layout of their own"

Mesh = Literal["tp", "etp", "ep"]
# To what a trainer pads the rows of a vocabulary: a multiple of each rank's, one of all ranks', or not at all.
Padding = Literal["ranks", "all", "none"]


class Shard(NamedTuple):
    """A rank's place along one mesh dimension."""

    rank: int = 0
    size: int = 1

    def cut(self, length: int) -> tuple[int, int]:
        """This rank's range of ``length``, which the size divides."""
        part = length // self.size
        return self.rank * part, (self.rank + 1) * part


ALONE = Shard()


@dataclass(frozen=True)
class Place:
    """What of a layer one rank stores.

    Attributes:
        tp: tensor parallelism of all but the experts.
        etp: tensor parallelism of the experts.
        ep: expert parallelism.
        dtype: the model's.
        vocabulary_multiple: to which a trainer pads the vocabulary, times TP.
        fsdp: a trainer rank's place among those that FSDP shards over.
    """

    tp: Shard = ALONE
    etp: Shard = ALONE
    ep: Shard = ALONE
    dtype: torch.dtype = torch.bfloat16
    vocabulary_multiple: int = 1
    fsdp: Shard = ALONE


class Division(NamedTuple):
    """A length that the size of a mesh dimension has to divide."""

    what: str
    length: int
    mesh: Mesh


class Unit(Protocol):
    """Weights that are stored together."""

    def weights(self) -> Iterator[Weight]:
        """Of the checkpoint, with full shapes."""

    def train(self, place: Place) -> Iterator[Param]:
        """Megatron's parameters of one rank."""

    def gen(self, place: Place) -> Iterator[Param]:
        """vLLM's parameters of one rank."""

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        """What Megatron has to divide evenly."""

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        """What vLLM has to divide evenly."""


@dataclass(frozen=True)
class Matrix:
    """One weight in a parameter of its own: whole, or cut along one dimension, alike on both sides.

    Attributes:
        hf: Hugging Face name.
        megatron: Megatron's name.
        vllm: vLLM's name.
        shape: of the whole weight.
        dim: along which TP cuts it; None for a whole copy on every rank.
        dtype: where it is not the model's.
        gen_dtype: of vLLM's parameter, where it is another one.
        train_refused: why Megatron's side does not place it; empty if it does.
        gen_refused: why vLLM's side does not.
    """

    hf: str
    megatron: str
    vllm: str
    shape: tuple[int, ...]
    dim: int | None = None
    dtype: torch.dtype | None = None
    gen_dtype: torch.dtype | None = None
    train_refused: str = ""
    gen_refused: str = ""

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.hf, self.shape, self.dtype)

    def train(self, place: Place) -> Iterator[Param]:
        yield self._param(self.megatron, place, self.dtype, self.train_refused)

    def gen(self, place: Place) -> Iterator[Param]:
        yield self._param(self.vllm, place, self.gen_dtype or self.dtype, self.gen_refused)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        if self.dim is not None:
            yield Division(f"dimension {self.dim} of {self.hf}", self.shape[self.dim], "tp")

    gen_divisions = train_divisions

    def _param(self, name: str, place: Place, dtype: torch.dtype | None, refused: str) -> Param:
        box = cut_box(self.shape, self.dim, place.tp)
        shape = tuple(stop - start for start, stop in box)
        dtype = dtype or place.dtype
        if refused:
            return Param(name, shape, dtype, (), (self.hf,), refused)
        return Param(name, shape, dtype, (Part(self.hf, self.shape, box, everything(shape)),))


@dataclass(frozen=True)
class Vocabulary:
    """An embedding or an output layer: rows cut by TP, padded to a multiple that each side chooses for itself.

    Attributes:
        hf: Hugging Face name; empty for Megatron's second copy of a tied embedding, which Bridge does not export.
        copies: names under which Bridge exports it once more, which is nothing that a rule places.
        copied: why.
        padding: of the rows in Megatron.
    """

    hf: str
    megatron: str
    vllm: str
    rows: int
    columns: int
    copies: tuple[str, ...] = ()
    copied: str = ""
    padding: Padding = "ranks"

    def weights(self) -> Iterator[Weight]:
        for name in (self.hf, *self.copies):
            if name:
                yield Weight(name, (self.rows, self.columns))

    def train(self, place: Place) -> Iterator[Param]:
        multiples = {
            "ranks": place.vocabulary_multiple * place.tp.size,
            "all": place.vocabulary_multiple,
            "none": 1,
        }
        param = self._param(self.megatron, place, multiples[self.padding])
        yield replace(param, refused=self.copies, reason=self.copied)

    def gen(self, place: Place) -> Iterator[Param]:
        yield self._param(self.vllm, place, _VLLM_VOCABULARY_MULTIPLE)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        if self.padding != "ranks" and self.hf:
            # Of the rows as they are: padding to a multiple of all ranks' need not make them divisible.
            yield Division(
                f"the vocabulary of {self.hf}, which is not padded for each rank,", self.rows, "tp"
            )

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        if self.hf:  # a copy is cut as the embedding is
            rows = padded(self.rows, _VLLM_VOCABULARY_MULTIPLE)
            yield Division(f"the padded vocabulary of {self.hf}", rows, "tp")

    def _param(self, name: str, place: Place, multiple: int) -> Param:
        start, stop = place.tp.cut(padded(self.rows, multiple))
        shape = (stop - start, self.columns)
        kept = min(stop, self.rows) - start
        if kept <= 0 or not self.hf:
            return Param(name, shape, place.dtype)
        box = ((start, start + kept), (0, self.columns))
        index = (slice(0, kept), slice(0, self.columns))
        return Param(name, shape, place.dtype, (Part(self.hf, (self.rows, self.columns), box, index),))


@dataclass(frozen=True)
class Stacked:
    """Weights of equal shapes but the first dimension, each cut by TP along it and put one after another.

    Gate and up matrices on both sides; with ``megatron`` naming several parameters, stacked by vLLM alone.

    Attributes:
        hf: Hugging Face names, in storage order.
        megatron: one name for all, or one for each.
        vllm: one name for all.
        rows: of each whole weight.
        columns: of all; None for biases.
        replicated: neither side cuts them.
    """

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    vllm: str
    rows: tuple[int, ...]
    columns: int | None
    replicated: bool = False

    def weights(self) -> Iterator[Weight]:
        for name, rows in zip(self.hf, self.rows, strict=True):
            yield Weight(name, (rows,) if self.columns is None else (rows, self.columns))

    def train(self, place: Place) -> Iterator[Param]:
        if len(self.megatron) == 1:
            yield stack(self.megatron[0], tuple(self.weights()), self._shard(place), place.dtype)
            return
        for name, weight in zip(self.megatron, self.weights(), strict=True):
            yield stack(name, (weight,), self._shard(place), place.dtype)

    def gen(self, place: Place) -> Iterator[Param]:
        yield stack(self.vllm, tuple(self.weights()), self._shard(place), place.dtype)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        if not self.replicated:
            for name, rows in zip(self.hf, self.rows, strict=True):
                yield Division(f"dimension 0 of {name}", rows, "tp")

    gen_divisions = train_divisions

    def _shard(self, place: Place) -> Shard:
        return ALONE if self.replicated else place.tp


@dataclass(frozen=True)
class Uncut:
    """A unit of transformers' own module inside of Megatron's model: every rank has its weights whole, under their names."""

    unit: Unit

    def weights(self) -> Iterator[Weight]:
        return self.unit.weights()

    def train(self, place: Place) -> Iterator[Param]:
        for weight in self.unit.weights():
            dtype, box = weight.dtype or place.dtype, box_of(weight.shape)
            part = Part(weight.name, weight.shape, box, everything(weight.shape))
            yield Param(weight.name, weight.shape, dtype, (part,))

    def gen(self, place: Place) -> Iterator[Param]:
        return self.unit.gen(place)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        return iter(())

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        return self.unit.gen_divisions(sizes)


def stack(name: str, weights: Sequence[Weight], shard: Shard, dtype: torch.dtype) -> Param:
    """One parameter of the weights' shards, cut along dimension 0 and put one after another."""
    parts: list[Part] = []
    row = 0
    for weight in weights:
        box = cut_box(weight.shape, 0, shard)
        height = box[0][1] - box[0][0]
        index = (slice(row, row + height), *(slice(0, n) for n in weight.shape[1:]))
        parts.append(Part(weight.name, weight.shape, box, index))
        row += height
    return Param(name, (row, *weights[0].shape[1:]), dtype, tuple(parts))


def cut_box(shape: Sequence[int], dim: int | None, shard: Shard) -> Box:
    """The box of a shard along ``dim``; the whole box if that is None."""
    return tuple(shard.cut(n) if d == dim else (0, n) for d, n in enumerate(shape))


def everything(shape: Sequence[int]) -> Index:
    """The index of a whole parameter of ``shape``."""
    return tuple(slice(0, n) for n in shape)


def padded(rows: int, multiple: int) -> int:
    """``rows`` rounded up to a multiple."""
    return -(-rows // multiple) * multiple
