"""The conventional refit: gather each tensor, broadcast full tensors in large buckets, keep a part.

As verl and NeMo-RL do it: the trainers complete each tensor by collectives, trainer rank 0 packs full tensors
into buckets and broadcasts them to every engine rank, and each of those copies out what it keeps; where engines hold
blocks of FP8, each quantizes the full tensors that have arrived. Two buckets on two streams, so that one is gathered
while the other is on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....integration.weights.manifest import TensorSpec
from ..gather import Gather, GatherUnit, gather_units
from ..scene import Scene
from ..storage import BenchDestination
from .base import Peer

_BUCKET_BYTES = 1 << 30
_BUCKETS = 2
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Bucket:
    units: tuple[GatherUnit, ...]
    slots: tuple[tuple[TensorSpec, int], ...]
    nbytes: int


class PackedBroadcastPeer(Peer):
    """Gather, packed broadcast, load."""

    name = "broadcast"

    @staticmethod
    def unavailable(scene: Scene) -> str:
        return ""

    def __init__(self, scene: Scene):
        self._scene = scene
        units = gather_units(scene.wanted_specs, scene.held, pair_experts=True)
        self._gather = Gather(units, scene.ranks, scene.storage)
        self._buckets = _lay_out(units)
        self._group: Any = scene.ranks.group([0, *scene.ranks.engines])
        self._takes_part = scene.ranks.rank in (0, *scene.ranks.engines)
        largest = max((bucket.nbytes for bucket in self._buckets), default=0)
        device = scene.ranks.device
        self._buffers = [
            torch.empty(largest if self._takes_part else 0, dtype=torch.uint8, device=device)
            for _ in range(_BUCKETS)
        ]
        self._streams = [
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(_BUCKETS)
        ]

    def run(self) -> None:
        for index, bucket in enumerate(self._buckets):
            stream = self._streams[index % _BUCKETS]
            if stream is not None:
                stream.synchronize()
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self._move(bucket, self._buffers[index % _BUCKETS][: bucket.nbytes])

    def close(self) -> None:
        self._buffers.clear()

    def _move(self, bucket: _Bucket, buffer: torch.Tensor) -> None:
        ranks = self._scene.ranks
        slots = (
            {spec.name: _slot(buffer, spec, offset) for spec, offset in bucket.slots}
            if self._takes_part
            else {}
        )
        if ranks.is_source:
            for unit in bucket.units:
                self._gather.into(unit, slots)
        if self._takes_part:
            dist.broadcast(buffer, src=0, group=self._group)
        if isinstance(self._scene.endpoint, BenchDestination):
            self._scene.endpoint.quantize_and_load(slots.items())


def _lay_out(units: Sequence[GatherUnit]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    taken: list[GatherUnit] = []
    slots: list[tuple[TensorSpec, int]] = []
    cursor = 0
    for unit in units:
        nbytes = sum(_aligned(spec.nbytes) for spec in unit.specs)
        if taken and cursor + nbytes > _BUCKET_BYTES:
            buckets.append(_Bucket(tuple(taken), tuple(slots), cursor))
            taken, slots, cursor = [], [], 0
        taken.append(unit)
        for spec in unit.specs:
            slots.append((spec, cursor))
            cursor += _aligned(spec.nbytes)
    if taken:
        buckets.append(_Bucket(tuple(taken), tuple(slots), cursor))
    return buckets


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _slot(buffer: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    return buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
