"""Fused query, key and value projections, which both sides store in layouts of their own, and norms over all heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .storage import Param, Part, Weight
from .units import Division, Mesh, Place, Shard


@dataclass(frozen=True)
class QueryKeyValue:
    """Query, key and value projections with grouped heads: a weight ``[heads * head_dim, columns]`` each, or a bias.

    Megatron stores each query group's heads, then its key head, then its value head; vLLM all query heads of a
    rank, then its key heads, then its value heads, which it replicates where there are fewer than TP ranks.

    Attributes:
        prefix: of the Hugging Face names ``{prefix}{q,k,v}_proj.{kind}``.
        kind: ``weight`` or ``bias``.
        megatron: Megatron's name of the fused parameter.
        vllm: vLLM's name of it.
        heads: query heads.
        groups: key heads, and value heads.
        head_dim: of each.
        columns: of the weights; None for biases.
    """

    prefix: str
    kind: str
    megatron: str
    vllm: str
    heads: int
    groups: int
    head_dim: int
    columns: int | None

    def weights(self) -> Iterator[Weight]:
        for letter, heads in zip("qkv", (self.heads, self.groups, self.groups), strict=True):
            yield Weight(f"{self.prefix}{letter}_proj.{self.kind}", (heads * self.head_dim, *self._tail))

    def train(self, place: Place) -> Iterator[Param]:
        tp = place.tp
        shape = ((self.heads + 2 * self.groups) * self.head_dim // tp.size, *self._tail)
        q, k, v = self.weights()
        if self.groups % tp.size:
            reason = f"QKV: {self.groups} query groups can't be split over TP {tp.size}"
            yield Param(self.megatron, shape, place.dtype, (), (q.name, k.name, v.name), reason)
            return
        per_group = self.heads // self.groups
        parts: list[Part] = []
        row = 0
        for group in range(*tp.cut(self.groups)):
            for weight, count in ((q, per_group), (k, 1), (v, 1)):
                rows = count * self.head_dim
                parts.append(self._part(weight, group * rows, rows, row))
                row += rows
        yield Param(self.megatron, shape, place.dtype, tuple(parts))

    def gen(self, place: Place) -> Iterator[Param]:
        tp = place.tp
        shared = _among(tp, self.groups)
        parts: list[Part] = []
        row = 0
        for weight, shard in zip(self.weights(), (tp, shared, shared), strict=True):
            start, stop = shard.cut(weight.shape[0])
            parts.append(self._part(weight, start, stop - start, row))
            row += stop - start
        yield Param(self.vllm, (row, *self._tail), place.dtype, tuple(parts))

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the query heads of {self.prefix}q_proj", self.heads, "tp")
        if self.groups > sizes["tp"] and self.groups % sizes["tp"]:
            yield Division(f"the query groups of {self.prefix}k_proj", self.groups, "tp")

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the query heads of {self.prefix}q_proj", self.heads, "tp")
        if sizes["tp"] < self.groups:
            yield Division(f"the key heads of {self.prefix}k_proj", self.groups, "tp")
        elif sizes["tp"] % self.groups:
            yield Division(
                f"the key heads of {self.prefix}k_proj, each replicated equally often,", self.groups, "tp"
            )

    @property
    def _tail(self) -> tuple[int, ...]:
        return () if self.columns is None else (self.columns,)

    def _part(self, weight: Weight, start: int, rows: int, row: int) -> Part:
        tail_box = tuple((0, n) for n in self._tail)
        tail_index = tuple(slice(0, n) for n in self._tail)
        return Part(
            weight.name,
            weight.shape,
            ((start, start + rows), *tail_box),
            (slice(row, row + rows), *tail_index),
        )


@dataclass(frozen=True)
class NormOverHeads:
    """A norm's scale of all query heads or all key heads, which both sides cut as the heads.

    Attributes:
        hf: Hugging Face name, and vLLM's.
        megatron: Megatron's name.
        heads: of queries or of keys.
        head_dim: of each.
    """

    hf: str
    megatron: str
    heads: int
    head_dim: int

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.hf, (self.heads * self.head_dim,))

    def train(self, place: Place) -> Iterator[Param]:
        yield self._param(self.megatron, place)

    def gen(self, place: Place) -> Iterator[Param]:
        yield self._param(self.hf, place)

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        if sizes["tp"] < self.heads:
            yield Division(f"the heads of {self.hf}", self.heads, "tp")
        elif sizes["tp"] % self.heads:
            yield Division(f"the heads of {self.hf}, each replicated equally often,", self.heads, "tp")

    gen_divisions = train_divisions

    def _param(self, name: str, place: Place) -> Param:
        total = self.heads * self.head_dim
        start, stop = _among(place.tp, self.heads).cut(total)
        shape = (stop - start,)
        part = Part(self.hf, (total,), ((start, stop),), (slice(0, stop - start),))
        return Param(name, shape, place.dtype, (part,))


def _among(tp: Shard, heads: int) -> Shard:
    """A rank's place among those that share ``heads``: where there are fewer of them than ranks, neighbours have the same one
    (``QKVParallelLinear.weight_loader`` of vLLM)."""
    return Shard(tp.rank * heads // tp.size, heads) if tp.size > heads else tp
