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
        gated: each query head has an output gate of as many rows. In the checkpoint and in vLLM it follows its head, in
            Megatron the gates of a group follow its heads.
        joined: the checkpoint has one weight ``[queries; keys; values]`` of the name ``{prefix}{joined}.{kind}``; empty
            for one each.
        keys_as_values: the checkpoint has no values. Megatron fills their rows, and vLLM has the keys there once more.
    """

    prefix: str
    kind: str
    megatron: str
    vllm: str
    heads: int
    groups: int
    head_dim: int
    columns: int | None
    gated: bool = False
    joined: str = ""
    keys_as_values: bool = False

    def weights(self) -> Iterator[Weight]:
        own = self._places()[:2] if self.keys_as_values else self._places()
        yield from dict.fromkeys(weight for weight, _ in own)

    def train(self, place: Place) -> Iterator[Param]:
        tp = place.tp
        shape = (sum(self._rows()) // tp.size, *self._tail)
        if self.groups % tp.size:
            reason = f"QKV: {self.groups} query groups can't be split over TP {tp.size}"
            names = tuple(weight.name for weight in self.weights())
            yield Param(self.megatron, shape, place.dtype, (), names, reason)
            return
        parts: list[Part] = []
        row = 0
        for group in range(*tp.cut(self.groups)):
            *queries_and_keys, value = self._of_group(group)
            for (weight, first), start, rows in queries_and_keys:
                parts.append(self._part(weight, first + start, rows, row))
                row += rows
            (weight, first), start, rows = value
            if not self.keys_as_values:
                parts.append(self._part(weight, first + start, rows, row))
            row += rows
        yield Param(self.megatron, shape, place.dtype, tuple(parts))

    def gen(self, place: Place) -> Iterator[Param]:
        tp = place.tp
        shared = _among(tp, self.groups)
        parts: list[Part] = []
        row = 0
        queries, keys, values = self._places()
        cuts = zip(
            (queries, keys, keys if self.keys_as_values else values),
            self._rows(),
            (tp, shared, shared),
            strict=True,
        )
        for (weight, first), rows, shard in cuts:
            start, stop = shard.cut(rows)
            parts.append(self._part(weight, first + start, stop - start, row))
            row += stop - start
        travelling = 2 if self.keys_as_values else 3
        yield Param(
            self.vllm,
            (row, *self._tail),
            place.dtype,
            tuple(parts[:travelling]),
            copies=tuple(parts[travelling:]),
        )

    def train_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the query heads of {self._names()[0]}", self.heads, "tp")
        if self.groups > sizes["tp"] and self.groups % sizes["tp"]:
            yield Division(f"the query groups of {self._names()[1]}", self.groups, "tp")

    def gen_divisions(self, sizes: dict[Mesh, int]) -> Iterator[Division]:
        yield Division(f"the query heads of {self._names()[0]}", self.heads, "tp")
        key = self._names()[1]
        if sizes["tp"] < self.groups:
            yield Division(f"the key heads of {key}", self.groups, "tp")
        elif sizes["tp"] % self.groups:
            yield Division(f"the key heads of {key}, each replicated equally often,", self.groups, "tp")

    @property
    def _tail(self) -> tuple[int, ...]:
        return () if self.columns is None else (self.columns,)

    def _names(self) -> tuple[str, str, str]:
        """Of the weights of queries, keys and values, without their kind."""
        q, k, v = (f"{self.prefix}{self.joined or f'{letter}_proj'}" for letter in "qkv")
        return q, k, v

    def _rows(self) -> tuple[int, int, int]:
        """Of all queries, keys and values."""
        keys = self.groups * self.head_dim
        return self.heads * self.head_dim * (1 + self.gated), keys, keys

    def _places(self) -> list[tuple[Weight, int]]:
        """The weight of queries, of keys and of values, and their first row in it."""
        names, rows = self._names(), self._rows()
        if self.joined:
            whole = Weight(f"{names[0]}.{self.kind}", (sum(rows), *self._tail))
            return [(whole, sum(rows[:i])) for i in range(3)]
        return [
            (Weight(f"{name}.{self.kind}", (n, *self._tail)), 0) for name, n in zip(names, rows, strict=True)
        ]

    def _of_group(self, group: int) -> Iterator[tuple[tuple[Weight, int], int, int]]:
        """As Megatron has a group: a weight with its first row, where rows begin behind that one, and how many."""
        query, key, value = self._places()
        size, per_group = self.head_dim, self.heads // self.groups
        first = group * per_group
        if self.gated:
            for offset in (0, size):
                for head in range(first, first + per_group):
                    yield query, 2 * head * size + offset, size
        else:
            yield query, first * size, per_group * size
        yield key, group * size, size
        yield value, group * size, size

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
