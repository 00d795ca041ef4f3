"""Exact shard to shard, one tensor at a time, as NeMo-RL's ``xferdtensor_python_impl`` does it.

For each tensor (the experts of a layer stacked into one): source ranks stack and slice what each receiver
lacks, all sends and receives of the tensor go in one group, replicas of an engine share the receiving by
stripes and complete each other by an all-gather, and what could not land in place is copied in. NeMo-RL does
so for feed-forward weights and broadcasts the others; here all weights go this way. Tensors of different
pipeline stages go in pairs, as its streams let them overlap.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ....integration.layout import Box, intersect, local_slice
from ....integration.transport.whole_tensors import RegionStorage, WholeTensor, by_weight, whole_tensors
from ..scene import Scene
from .base import Peer, not_quantizing


@dataclass(frozen=True)
class _Transfer:
    source: int
    source_region: Box
    receiver: int
    receiver_region: Box
    common: Box


@dataclass(frozen=True)
class _FanOut:
    """Replicas that hold one region: each has received its stripe of it, or the first has received all."""

    members: tuple[int, ...]
    region: Box
    stripes: tuple[Box, ...]


@dataclass(frozen=True)
class _Move:
    """What this rank does for one tensor."""

    sends: tuple[_Transfer, ...]
    receives: tuple[_Transfer, ...]
    fan_outs: tuple[_FanOut, ...]
    storages: dict[Box, RegionStorage]


class PerTensorPeer(Peer):
    """Grouped sends and receives for each tensor."""

    name = "per-tensor"

    @staticmethod
    def unavailable(scene: Scene) -> str:
        return not_quantizing(scene)

    def __init__(self, scene: Scene):
        self._rank = scene.ranks.rank
        self._device = scene.ranks.device
        tensors = whole_tensors(scene.wanted_specs, by_weight(scene.held), by_weight(scene.wanted))
        replicas = {
            group.members for tensor in tensors for group in _destinations(tensor) if len(group.members) > 1
        }
        self._everyone: Any = scene.ranks.group(range(scene.ranks.size))
        self._groups: dict[tuple[int, ...], Any] = {m: scene.ranks.group(m) for m in sorted(replicas)}
        self._batches = [
            [move for tensor in batch if tensor is not None for move in [self._move(tensor, scene)]]
            for batch in _batches(tensors)
        ]

    def run(self) -> None:
        for batch in self._batches:
            operations: list[dist.P2POp] = []
            landing: list[tuple[torch.Tensor, torch.Tensor]] = []
            kept: list[torch.Tensor] = []
            received: list[dict[Box, torch.Tensor]] = []
            for move in batch:
                gathered: dict[Box, torch.Tensor] = {}
                for transfer in move.sends:
                    region = transfer.source_region
                    if region not in gathered:
                        gathered[region] = move.storages[region].gather()
                    part = gathered[region][local_slice(region, transfer.common)].contiguous()
                    kept.append(part)
                    operations.append(dist.P2POp(dist.isend, _bytes(part), transfer.receiver, self._everyone))
                buffers = {
                    fan_out.region: move.storages[fan_out.region].receiving() for fan_out in move.fan_outs
                }
                received.append(buffers)
                for transfer in move.receives:
                    region = transfer.receiver_region
                    target = buffers[region][local_slice(region, transfer.common)]
                    if not target.is_contiguous():
                        staging = torch.empty_like(target, memory_format=torch.contiguous_format)
                        landing.append((target, staging))
                        target = staging
                    operations.append(dist.P2POp(dist.irecv, _bytes(target), transfer.source, self._everyone))
            if operations:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            for target, staging in landing:
                target.copy_(staging)
            for move, buffers in zip(batch, received, strict=True):
                for fan_out in move.fan_outs:
                    self._complete(fan_out, buffers[fan_out.region])
                    move.storages[fan_out.region].scatter(buffers[fan_out.region])

    def close(self) -> None:
        self._batches.clear()

    def _complete(self, fan_out: _FanOut, buffer: torch.Tensor) -> None:
        if len(fan_out.members) == 1:
            return
        group = self._groups[fan_out.members]
        if fan_out.stripes:
            stripe = buffer[local_slice(fan_out.region, fan_out.stripes[fan_out.members.index(self._rank)])]
            # gloo does not take a part of the output as its input.
            mine = stripe if self._device.type == "cuda" else stripe.clone()
            dist.all_gather_into_tensor(_bytes(buffer), _bytes(mine), group=group)
        else:
            dist.broadcast(_bytes(buffer), src=fan_out.members[0], group=group)

    def _move(self, tensor: WholeTensor, scene: Scene) -> _Move:
        fan_outs = _destinations(tensor)
        transfers = _transfers(tensor, fan_outs)
        sends = tuple(t for t in transfers if t.source == self._rank)
        receives = tuple(t for t in transfers if t.receiver == self._rank)
        mine = tuple(fan_out for fan_out in fan_outs if self._rank in fan_out.members)
        regions = {t.source_region for t in sends} | {fan_out.region for fan_out in mine}
        storages = {region: RegionStorage(tensor, region, scene.storage.by_name) for region in regions}
        return _Move(sends, receives, mine, storages)


def _batches(tensors: list[WholeTensor]) -> list[tuple[WholeTensor | None, ...]]:
    """One tensor at a time; of tensors with different source ranks (pipeline stages) one each."""
    queues: dict[tuple[int, ...], list[WholeTensor]] = defaultdict(list)
    for tensor in tensors:
        queues[tuple(sorted(tensor.sources))].append(tensor)
    return list(zip_longest(*queues.values()))


def _destinations(tensor: WholeTensor) -> list[_FanOut]:
    members: dict[Box, list[int]] = defaultdict(list)
    for rank, regions in sorted(tensor.destinations.items()):
        for region in regions:
            members[region].append(rank)
    found = []
    for region, ranks in members.items():
        stripes: tuple[Box, ...] = ()
        start, stop = region[0] if region else (0, 1)
        if len(ranks) > 1 and region and (stop - start) % len(ranks) == 0:
            step = (stop - start) // len(ranks)
            stripes = tuple(
                ((start + i * step, start + (i + 1) * step), *region[1:]) for i in range(len(ranks))
            )
        found.append(_FanOut(tuple(ranks), region, stripes))
    return found


def _transfers(tensor: WholeTensor, fan_outs: list[_FanOut]) -> list[_Transfer]:
    holders: dict[Box, int] = {}
    for rank, regions in sorted(tensor.sources.items()):
        for region in regions:
            holders.setdefault(region, rank)
    found = []
    for fan_out in fan_outs:
        targets = zip(fan_out.members, fan_out.stripes or (fan_out.region,), strict=False)
        for receiver, target in targets:
            for region, source in holders.items():
                common = intersect(region, target)
                if common is not None:
                    found.append(_Transfer(source, region, receiver, fan_out.region, common))
    return sorted(found, key=lambda t: (t.source, t.receiver, t.common))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
