"""What each rank keeps, sends and receives when one tensor goes from one mesh to another: pure arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ..errors import PlanError
from ..layout import Box, Mesh, Placement, boxes_of, intersect, local_slice, subtract
from ..plan import Analysis, BroadcastPlan, Message, Plan, analyse, plan_broadcast
from ..transport.m2n import Carried, ReshardPlan, carry
from ..weights.holdings import HoldingGroup, Holdings
from ..weights.manifest import TensorSpec

# The tensor's name in plans and errors: one plan serves all tensors of a layout, whatever they are called.
NAME = "the tensor"

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Side:
    """Where one side's ranks hold the tensor; ranks as the process group counts them."""

    mesh: Mesh
    placements: tuple[Placement, ...]


class LocalPart(NamedTuple):
    """A box of the full tensor, and where a rank's local tensor holds it."""

    box: Box
    place: Index


@dataclass(frozen=True)
class RankPart:
    """One rank's share of a transfer.

    Attributes:
        plan: what it sends and receives, in the process group's ranks; the broadcasts under ``golden``.
        sent: parts of its local source that messages are taken from.
        received: parts of its local destination that messages land in.
        copied: pairs of index into the local source and index into the local destination: what the rank
            has itself never travels.
    """

    plan: Plan | BroadcastPlan
    sent: tuple[LocalPart, ...]
    received: tuple[LocalPart, ...]
    copied: tuple[tuple[Index, Index], ...]


class Reshard:
    """The transfer of a tensor of ``shape`` and ``dtype`` from ``source`` to ``destination``.

    A rank may be on both sides. What it wants and holds is copied in place, and only the rest is planned.

    Raises:
        ValueError: placements that do not fit the mesh or the shape.
        PlanError: a bucket too small for one element from every peer.
    """

    def __init__(
        self, source: Side, destination: Side, shape: tuple[int, ...], dtype: torch.dtype, bucket_bytes: int
    ):
        self.source = source
        self.destination = destination
        self.shape = shape
        self._sources = sorted(source.mesh.ranks)
        self._destinations = sorted(destination.mesh.ranks)
        self._held = {rank: self._parts(source, rank) for rank in self._sources}
        self._wanted = {rank: self._parts(destination, rank) for rank in self._destinations}
        self._missing = {
            rank: [part for want in wanted for part in _without(want, self._held.get(rank, ()))]
            for rank, wanted in self._wanted.items()
        }
        spec = TensorSpec(NAME, shape, dtype)
        count = len(self._sources)
        self._bucket_bytes = bucket_bytes
        # Several hosts or one: unknown here. Receivers that want the same each get it from the sources.
        try:
            self.analysis: Analysis = analyse(
                [spec],
                [_holdings(i, self._held[rank], dtype) for i, rank in enumerate(self._sources)],
                [
                    _holdings(count + i, self._missing[rank], dtype)
                    for i, rank in enumerate(self._destinations)
                ],
                bucket_bytes=bucket_bytes,
                fan_out=False,
            )
        except PlanError as error:
            if error.parameter:
                raise
            # Of no tensor in particular, so of the bucket, which refits and this call name differently.
            raise PlanError(
                f"bucket_bytes={bucket_bytes} is too small for one element from every peer of a rank; give more, on "
                "all ranks alike",
                stage="plan",
            ) from error
        self._dtype = dtype
        # Refit-world ranks, where a rank on both sides counts twice, to ranks of the process group.
        self._physical = [*self._sources, *self._destinations]

    @property
    def digest(self) -> str:
        """Of all that every rank computes alike."""
        return self.analysis.digest

    @property
    def members(self) -> list[int]:
        """Ranks of either side, ascending."""
        return sorted({*self._sources, *self._destinations})

    def part(self, rank: int) -> RankPart:
        """What ``rank`` does, shard to shard."""
        return RankPart(
            self._own_plan(rank),
            tuple(self._held.get(rank, ())),
            tuple(self._missing.get(rank, ())),
            self._copied(rank),
        )

    def m2n_part(self, rank: int) -> RankPart:
        """What ``rank`` does where ``nccl.m2n`` moves the tensor, if its meshes express it."""
        part = self.part(rank)
        return replace(part, plan=ReshardPlan.of(self._own_plan(rank), self.carried))

    @property
    def carried(self) -> Carried:
        """The tensor, if ``nccl.m2n`` can carry it."""
        held, wanted = (
            {rank: [part.box for part in parts] for rank, parts in side.items() if parts}
            for side in (self._held, self._missing)
        )
        spec = TensorSpec(NAME, self.shape, self._dtype)
        return carry([spec], {NAME: held}, {NAME: wanted}, {}, self._bucket_bytes)

    def golden_part(self, rank: int) -> RankPart:
        """What ``rank`` does when every held box is broadcast to all ranks of the process group."""
        plan = plan_broadcast(
            self.analysis.manifest,
            [_holdings(rank, self._held[rank], self._dtype) for rank in self._sources],
            self._bucket_bytes,
        )
        # Only what it sends: a replica of another sender's box must not be written over.
        sending = [s.box for m in plan.messages if m.source == rank for s in m.segments]
        sent = [
            LocalPart(box, _inside(held, box))
            for box in sending
            for held in self._held.get(rank, ())
            if intersect(held.box, box) == box
        ]
        return RankPart(plan, tuple(sent), tuple(self._missing.get(rank, ())), self._copied(rank))

    def _parts(self, side: Side, rank: int) -> list[LocalPart]:
        return [LocalPart(*part) for part in boxes_of(self.shape, side.mesh, side.placements, rank)]

    def _copied(self, rank: int) -> tuple[tuple[Index, Index], ...]:
        copies: list[tuple[Index, Index]] = []
        for wanted in self._wanted.get(rank, ()):
            for held in self._held.get(rank, ()):
                common = intersect(wanted.box, held.box)
                if common is not None:
                    copies.append((_inside(held, common), _inside(wanted, common)))
        return tuple(copies)

    def _own_plan(self, rank: int) -> Plan:
        sends: dict[int, list[Message]] = defaultdict(list)
        receives: dict[int, list[Message]] = defaultdict(list)
        pair_digests: dict[tuple[int, int], str] = {}
        for virtual, physical in enumerate(self._physical):
            if physical != rank:
                continue
            plan = self.analysis.compile(virtual)
            for side, found in ((plan.sends, sends), (plan.receives, receives)):
                for message in (m for messages in side for m in messages):
                    found[message.round_index].append(self._translated(message))
            pair_digests |= {
                (self._physical[a], self._physical[b]): d for (a, b), d in plan.pair_digests.items()
            }
        rounds = sorted({*sends, *receives})
        return Plan(
            rank,
            tuple(tuple(sends[i]) for i in rounds),
            tuple(tuple(receives[i]) for i in rounds),
            self.digest,
            pair_digests,
        )

    def _translated(self, message: Message) -> Message:
        return replace(
            message,
            source=self._physical[message.source],
            destination=self._physical[message.destination],
            origin=self._physical[message.origin],
        )


def full_shape(side: Side, locals_: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the whole tensor from the local shapes of one side.

    A tensor dimension is as long as the local ones together along the mesh dimensions that cut it.

    Args:
        side: mesh and placements.
        locals_: local shape of every rank of the mesh.

    Raises:
        ValueError: the local shapes have different numbers of dimensions.
    """
    dims = {len(shape) for shape in locals_.values()}
    if len(dims) != 1:
        raise ValueError(f"local tensors of {sorted(dims)} dimensions are not parts of one tensor")
    (count,) = dims
    cutting: list[set[int]] = [set() for _ in range(count)]
    for axis, placement in enumerate(side.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            if not -count <= dim < count:
                raise ValueError(
                    f"{placement} cuts a dimension that a tensor of {count} dimensions does not have"
                )
            cutting[dim % count].add(axis)
    totals = [0] * count
    for rank, shape in locals_.items():
        place = side.mesh.coordinate(rank) or ()
        for dim in range(count):
            if all(position == 0 for axis, position in enumerate(place) if axis not in cutting[dim]):
                totals[dim] += shape[dim]
    return tuple(totals)


def _holdings(rank: int, parts: Sequence[LocalPart], dtype: torch.dtype) -> Holdings:
    if not parts:
        return Holdings(rank)
    only = np.zeros(1, dtype=np.int64)
    return Holdings(rank, (HoldingGroup(tuple(part.box for part in parts), dtype, only),))


def _without(wanted: LocalPart, held: Sequence[LocalPart]) -> list[LocalPart]:
    """What of a wanted part the rank does not hold itself."""
    left = [wanted.box]
    for part in held:
        left = [rest for box in left for rest in subtract(box, part.box)]
    return [LocalPart(box, _inside(wanted, box)) for box in left]


def _inside(part: LocalPart, box: Box) -> Index:
    """Where ``box``, a part of ``part``'s, lies in the local tensor."""
    relative = local_slice(part.box, box)
    return tuple(
        slice(place.start + own.start, place.start + own.stop)
        for place, own in zip(part.place, relative, strict=True)
    )
