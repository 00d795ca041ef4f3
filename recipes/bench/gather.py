"""Full tensors on trainer rank 0, gathered from all trainers one tensor at a time, as Megatron-Bridge's export does.

A tensor that tensor parallelism cut is all-gathered among the ranks that hold its parts; the experts of
different expert-parallel ranks are all-gathered together, one of each rank; a tensor of another pipeline
stage is broadcast by its holder. Only what rank 0 lacks is gathered, which is less than Bridge moves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...integration.layout import Box, volume
from ...integration.weights.manifest import TensorSpec
from .ranks import BenchRanks
from .storage import Storage

_EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
Held = Mapping[int, Mapping[str, Sequence[Box]]]
Cut = tuple[str, Box]


@dataclass(frozen=True)
class GatherUnit:
    """Tensors that one collective brings to rank 0.

    Attributes:
        specs: what it completes on rank 0.
        parts: owner → the boxes that it contributes, in the order in which they lie in its message.
        participants: the ranks of the collective; empty if rank 0 holds all.
    """

    specs: tuple[TensorSpec, ...]
    parts: dict[int, tuple[Cut, ...]]
    participants: tuple[int, ...]


def gather_units(specs: Sequence[TensorSpec], held: Held, *, pair_experts: bool) -> list[GatherUnit]:
    """How rank 0 comes by each of ``specs``.

    Args:
        specs: the weights.
        held: trainer rank → weight → boxes.
        pair_experts: gather the experts of different owners together; the units are then not in the order of
            ``specs``.
    """
    rows: dict[tuple[object, ...], list[tuple[TensorSpec, dict[int, tuple[Cut, ...]]]]] = defaultdict(list)
    for spec in specs:
        pattern = _EXPERT_NUMBER.sub(".experts.*.", spec.name) if pair_experts else spec.name
        rows[pattern, spec.shape, spec.dtype].append((spec, _owners(spec, held)))
    units: list[GatherUnit] = []
    for members in rows.values():
        by_owner: dict[tuple[int, ...], list[tuple[TensorSpec, dict[int, tuple[Cut, ...]]]]] = defaultdict(
            list
        )
        for member in members:
            by_owner[tuple(sorted(member[1]))].append(member)
        queues = list(by_owner.values())
        even = len({len(queue) for queue in queues}) == 1
        apart = len({rank for owners in by_owner for rank in owners}) == sum(map(len, by_owner))
        if len(queues) > 1 and even and apart:
            units += [_unit(batch) for batch in zip(*queues, strict=True)]
        else:
            units += [_unit([member]) for member in members]
    return units


def _owners(spec: TensorSpec, held: Held) -> dict[int, tuple[Cut, ...]]:
    taken: dict[int, list[Cut]] = defaultdict(list)
    seen: set[Box] = set()
    for rank in sorted(held):
        for box in held[rank].get(spec.name, ()):
            if box not in seen:
                seen.add(box)
                taken[rank].append((spec.name, box))
    return {rank: tuple(cuts) for rank, cuts in taken.items()}


def _unit(members: Sequence[tuple[TensorSpec, dict[int, tuple[Cut, ...]]]]) -> GatherUnit:
    parts: dict[int, tuple[Cut, ...]] = {}
    for _, owners in members:
        for rank, cuts in owners.items():
            parts[rank] = parts.get(rank, ()) + cuts
    participants = () if set(parts) == {0} else tuple(sorted({0, *parts}))
    return GatherUnit(tuple(spec for spec, _ in members), parts, participants)


class Gather:
    """Carries out units on the trainers."""

    def __init__(self, units: Sequence[GatherUnit], ranks: BenchRanks, storage: Storage):
        """Make the groups; all ranks of both sides do so at the same time.

        Args:
            units: what is gathered, the same on all ranks.
            ranks: of the run.
            storage: this trainer's; an engine's own is not read.
        """
        self.units = units
        self._ranks = ranks
        self._storage = storage
        self._groups: dict[tuple[int, ...], Any] = {
            members: ranks.group(members)
            for members in dict.fromkeys(u.participants for u in units)
            if members
        }

    def full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors, unit by unit, to be drawn by all trainers alike; on ranks other than 0 they are empty."""
        for unit in self.units:
            slots = {
                spec.name: torch.empty(
                    spec.shape if self._ranks.rank == 0 else 0, dtype=spec.dtype, device=self._ranks.device
                )
                for spec in unit.specs
            }
            self.into(unit, slots)
            yield from slots.items()

    def into(self, unit: GatherUnit, slots: Mapping[str, torch.Tensor]) -> None:
        """Complete a unit's tensors in ``slots`` on rank 0; the other trainers only contribute."""
        me = self._ranks.rank
        if not unit.participants:
            if me == 0:
                for name, box in unit.parts[0]:
                    _region(slots[name], box).copy_(self._view(name, box))
            return
        if me not in unit.participants:
            return
        group = self._groups[unit.participants]
        dtype = unit.specs[0].dtype
        sizes = {rank: sum(volume(box) for _, box in cuts) for rank, cuts in unit.parts.items()}
        mine = self._contribution(unit.parts.get(me, ()), dtype)
        if set(unit.parts) == set(unit.participants) and len(set(sizes.values())) == 1:
            out = torch.empty(len(unit.participants), mine.numel(), dtype=dtype, device=self._ranks.device)
            dist.all_gather_into_tensor(_bytes(out), _bytes(mine), group=group)
            received = dict(zip(unit.participants, out, strict=True))
        else:
            received = {}
            for owner, size in sizes.items():
                received[owner] = mine if owner == me else mine.new_empty(size)
                dist.broadcast(_bytes(received[owner]), src=owner, group=group)
        if me == 0:
            for owner, cuts in unit.parts.items():
                cursor = 0
                for name, box in cuts:
                    flat = received[owner][cursor : cursor + volume(box)]
                    target = _region(slots[name], box)
                    target.copy_(flat.view(target.shape))
                    cursor += flat.numel()

    def _contribution(self, cuts: Sequence[Cut], dtype: torch.dtype) -> torch.Tensor:
        views = [self._view(name, box).reshape(-1) for name, box in cuts]
        if len(views) == 1:
            return views[0]
        return torch.cat(views) if views else torch.empty(0, dtype=dtype, device=self._ranks.device)

    def _view(self, name: str, box: Box) -> torch.Tensor:
        return next(f.view for f in self._storage.by_name[name] if f.box == box)


def _region(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(start, stop) for start, stop in box)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a contiguous tensor: backends know fewer dtypes than weights have."""
    return tensor.reshape(-1).view(torch.uint8)
