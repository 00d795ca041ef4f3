"""How a trainer and an engine spread a model over their ranks: parallel sizes, and each rank's coordinates.

FSDP2's mesh has its copies outside (``replicate, shard``). Megatron-core orders ranks ``tp-cp-ep-dp-pp``, where the experts' mesh (``etp-ep-edp-pp``) is laid over the same
ranks (``RankGenerator`` in ``megatron.core.parallel_state``). vLLM orders them ``dp-pp-tp`` with ``tp`` innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import gcd
from typing import ClassVar, NamedTuple

from .units import Shard


class LayoutError(ValueError):
    """A layout that can't be read, or that the model or the ranks don't allow."""


class TrainCoordinates(NamedTuple):
    """A trainer rank's place."""

    tp: Shard
    etp: Shard
    ep: Shard
    stage: int
    fsdp: Shard = Shard()


class GenCoordinates(NamedTuple):
    """An engine rank's place."""

    tp: Shard
    etp: Shard
    ep: Shard
    stage: int


@dataclass(frozen=True)
class TrainLayout:
    """A Megatron trainer's parallel sizes.

    Attributes:
        tp: tensor parallelism of all but the experts.
        pp: pipeline parallelism.
        ep: expert parallelism, within the ranks of one pipeline stage.
        etp: tensor parallelism of the experts; 1 unless given, where Megatron itself would take ``tp``.
        cp: context parallelism.
        dp: data parallelism of all but the experts; None for the smallest that fits.
        vpp: model chunks of each pipeline stage (interleaved schedule).
        first: layers of the first pipeline stage, where they are not as many as the others'.
        last: layers of the last one.
        vocabulary_multiple: the vocabulary is padded to a multiple of this and TP
            (``make_vocab_size_divisible_by``).
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int | None = None
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    vocabulary_multiple: int = 128

    @property
    def data_parallel(self) -> int:
        """``dp``, or the smallest that the experts' mesh allows."""
        if self.dp is not None:
            return self.dp
        experts, others = self.etp * self.ep, self.tp * self.cp
        return experts // gcd(experts, others)

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tp * self.cp * self.data_parallel * self.pp

    def coordinates(self, rank: int) -> TrainCoordinates:
        """Where ``rank`` stands."""
        stage, inside = divmod(rank, self.world_size // self.pp)
        return TrainCoordinates(
            Shard(inside % self.tp, self.tp),
            Shard(inside % self.etp, self.etp),
            Shard(inside // self.etp % self.ep, self.ep),
            stage,
        )

    def violations(self) -> list[str]:
        """What no model could be trained with, one sentence each."""
        found = _below_one(self)
        if found:
            return found
        stage = self.tp * self.cp * self.data_parallel
        if stage % (self.etp * self.ep):
            found.append(
                f"train: a pipeline stage has tp x cp x dp = {stage} ranks, no multiple of etp x ep = "
                f"{self.etp * self.ep}; leave dp out, or give one that fits"
            )
        if self.vpp > 1 and self.pp == 1:
            found.append("train: vpp needs pp above 1")
        if self.pp == 1 and (self.first is not None or self.last is not None):
            found.append(
                "train: first and last are layers of pipeline stages; leave them out, or give pp above 1"
            )
        return found

    def stage_layers(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """Numbers of the layers of each pipeline stage, in order.

        Where they don't divide evenly and neither ``first`` nor ``last`` is given, the last stage gets
        fewer or more (``num_layers_in_last_pipeline_stage``), or else the first.

        Raises:
            LayoutError: Megatron can't split them so.
        """
        counts = self._stage_counts(layers)
        if any(count % self.vpp for count in counts):
            raise LayoutError(
                f"train: stages of {list(counts)} layers can't be cut into vpp = {self.vpp} equal chunks; "
                "give another vpp, or first and last"
            )
        chunks = [count // self.vpp for count in counts]
        stages: list[tuple[int, ...]] = []
        for stage, size in enumerate(chunks):
            starts = [chunk * sum(chunks) + sum(chunks[:stage]) for chunk in range(self.vpp)]
            stages.append(tuple(i for start in starts for i in range(start, start + size)))
        return tuple(stages)

    def uneven_stages(self, layers: int) -> str:
        """Pipeline stages of unequal length and how to tell Megatron of them; empty where all are equal.

        Raises:
            LayoutError: Megatron can't split them so.
        """
        counts = self._stage_counts(layers)
        if len(set(counts)) == 1:
            return ""
        first, last = self.first, self.last
        if first is None and last is None:
            last = counts[-1]
        settings = [
            f"num_layers_in_{end}_pipeline_stage={count}"
            for end, count in (("first", first), ("last", last))
            if count is not None
        ]
        return f"stages of {','.join(map(str, counts))} layers; in Megatron set {' and '.join(settings)}"

    def _stage_counts(self, layers: int) -> tuple[int, ...]:
        if self.first is None and self.last is None and layers % self.pp:
            last = self._uneven_last(layers)
            return self._counts(layers, None, last)
        return self._counts(layers, self.first, self.last)

    def _uneven_last(self, layers: int) -> int:
        """The last stage's layers that leave an equal number to the others, nearest to theirs."""
        fits = [
            last
            for last in range(1, layers - self.pp + 2)
            if (layers - last) % (self.pp - 1) == 0 and last % self.vpp == 0
        ]
        if not fits:
            raise LayoutError(
                f"train: {layers} layers can't be split over pp = {self.pp} stages"
                f"{f' of vpp = {self.vpp} chunks' if self.vpp > 1 else ''}, nor with another number in the last; "
                "give first and last, or another pp"
            )
        return min(fits, key=lambda last: (abs((layers - last) // (self.pp - 1) - last), last))

    def _counts(self, layers: int, first: int | None, last: int | None) -> tuple[int, ...]:
        if self.pp == 1:
            return (layers,)
        ends = (first is not None) + (last is not None)
        rest = layers - (first or 0) - (last or 0)
        middle = self.pp - ends
        if rest < middle or (middle and rest % middle) or (not middle and rest):
            raise LayoutError(
                f"train: {layers} layers with first = {first} and last = {last} leave {rest} for "
                f"{middle} equal pipeline stages; give numbers that divide"
            )
        counts = [rest // middle if middle else 0] * self.pp
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return tuple(counts)


@dataclass(frozen=True)
class FsdpLayout:
    """A trainer under FSDP2, which shards every parameter of a transformers model.

    Attributes:
        fsdp: ranks that share the parameters.
        replicate: copies of the sharded model (HSDP), each on ``fsdp`` ranks.
    """

    pp: ClassVar[int] = 1

    fsdp: int = 1
    replicate: int = 1

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.fsdp * self.replicate

    def coordinates(self, rank: int) -> TrainCoordinates:
        """Where ``rank`` stands."""
        return TrainCoordinates(Shard(), Shard(), Shard(), 0, Shard(rank % self.fsdp, self.fsdp))

    def violations(self) -> list[str]:
        """What no model could be trained with, one sentence each."""
        return _below_one(self)

    def stage_layers(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """Numbers of the layers, all in one stage."""
        return (tuple(range(layers)),)

    def uneven_stages(self, layers: int) -> str:
        """Nothing to tell: there is one stage."""
        return ""


@dataclass(frozen=True)
class GenLayout:
    """A vLLM engine's parallel sizes, or those of several equal engines.

    Attributes:
        tp: tensor parallelism.
        dp: engines that each hold all weights; with ``ep = tp * dp`` the data-parallel ranks of one engine.
        pp: pipeline parallelism.
        ep: 1, or with ``enable_expert_parallel`` the ranks that share the experts: ``tp``, or ``tp * dp``.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of engine ranks."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> GenCoordinates:
        """Where ``rank`` stands."""
        engine, inside = divmod(rank, self.tp * self.pp)
        stage, tp = divmod(inside, self.tp)
        if self.ep == 1:
            experts, cut = Shard(), Shard(tp, self.tp)
        else:
            experts, cut = Shard((engine * self.tp + tp) % self.ep, self.ep), Shard()
        return GenCoordinates(Shard(tp, self.tp), cut, experts, stage)

    def violations(self) -> list[str]:
        """What no model could be served with, one sentence each."""
        found = _below_one(self)
        if not found and self.ep not in (1, self.tp, self.tp * self.dp):
            found.append(
                f"gen: ep is {self.ep}; vLLM shares the experts among all ranks of an engine or cuts each, so give "
                f"ep = 1, tp = {self.tp} or tp x dp = {self.tp * self.dp}"
            )
        return found

    def stage_layers(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """Numbers of the layers of each pipeline stage (vLLM's ``get_pp_indices``).

        Raises:
            LayoutError: more stages than layers.
        """
        if layers < self.pp:
            raise LayoutError(f"gen: {layers} layers can't be split over pp = {self.pp} stages")
        base, more = divmod(layers, self.pp)
        counts = [base] * self.pp
        for i in range(2, more + 2):
            counts[-i] += 1
        starts = [sum(counts[:stage]) for stage in range(self.pp)]
        return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


# What a layout looks like, for those who gave another text.
_EXAMPLES = {
    "train": "tp=4,pp=2 for Megatron, or fsdp=4,replicate=2 for FSDP2",
    "gen": "tp=4,pp=2",
}


def parse_train(text: str) -> TrainLayout | FsdpLayout:
    """A trainer's layout from text such as ``tp=4,ep=8,pp=2``, or ``fsdp=4,replicate=2``.

    Raises:
        LayoutError: names every part that can't be read.
    """
    keys = {piece.partition("=")[0].strip() for piece in text.split(",")}
    return _parse(text, FsdpLayout if "fsdp" in keys else TrainLayout, "train")


def parse_gen(text: str) -> GenLayout:
    """An engine's layout from text such as ``tp=8,dp=2``.

    Raises:
        LayoutError: names every part that can't be read.
    """
    return _parse(text, GenLayout, "gen")


def _parse[L: (TrainLayout, FsdpLayout, GenLayout)](text: str, kind: type[L], who: str) -> L:
    known = [field.name for field in fields(kind)]
    sizes: dict[str, int] = {}
    wrong: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            wrong.append(f"{key!r} is none of {', '.join(known)}")
        elif key in sizes:
            wrong.append(f"{key} stands twice")
        elif not value.isdecimal():
            wrong.append(f"{key} is {value!r}; give a whole number of at least 1")
        else:
            sizes[key] = int(value)
    if wrong:
        raise LayoutError(f"{who}: {text!r} can't be read: {'; '.join(wrong)}. An example: {_EXAMPLES[who]}")
    return kind(**sizes)


def _below_one(layout: TrainLayout | FsdpLayout | GenLayout) -> list[str]:
    who = "gen" if isinstance(layout, GenLayout) else "train"
    sizes: Sequence[tuple[str, int | None]] = [
        (field.name, getattr(layout, field.name)) for field in fields(layout)
    ]
    return [
        f"{who}: {name} is {size}; give at least 1" for name, size in sizes if size is not None and size < 1
    ]
