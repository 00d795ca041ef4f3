"""Exchanges through buckets in GPU memory, which are only enqueued."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from ...gpu_memory.driver import DriverError, on_device
from ..errors import classified
from ..exchanges import Exchange, Parcel

if TYPE_CHECKING:
    from .device_group import DeviceGroup

# Calls of the driver for one bucket.
_CALLS = 3


class DeviceExchange(Exchange):
    """Every rank enqueues the first bucket of each parcel's way, then all second ones, and so on; in each step what
    leaves before what arrives.

    So nobody waits in a circle, however many streams share a hardware queue: what a step waits for are the peers'
    sends of the same step, which come before their arrivals, and emptied buckets of earlier ones.
    """

    _group: DeviceGroup

    def __init__(
        self,
        group: DeviceGroup,
        lane: int,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        bucket_bytes: int,
    ):
        super().__init__(group, lane, sends, receives)
        self._steps = list(
            zip_longest(_ways(sends, bucket_bytes), _ways(receives, bucket_bytes), fillvalue=())
        )
        self._calls = _CALLS * sum(len(out) + len(into) for out, into in self._steps)

    def start(self, stage: str) -> None:
        if not self.peers:
            return
        self._group.connect(self.peers)
        self._group.make_room(self._calls, stage)
        with on_device(self._group.device):
            stream = torch.cuda.current_stream()
            self._group.follow(self._lane, stream)
            try:
                self._start()
            except DriverError as error:
                raise classified(error, stage, self._group.rank, f"with group ranks {self.peers}") from error
            finally:
                # Even if it broke off: what was enqueued is waited for before any memory is given back.
                ended = torch.cuda.Event()
                ended.record(stream)
                self._group.began(self._lane, stream, ended, self._calls)

    def _start(self) -> None:
        self.enqueue(torch.cuda.current_stream(self._group.device).cuda_stream)

    def enqueue(self, stream: int) -> None:
        """Give a CUDA stream all that is to be done."""
        for out, into in self._steps:
            for peer, part in out:
                self._group.link(peer, self._lane).send(part, stream)
            for peer, part in into:
                self._group.link(peer, self._lane).receive(part, stream)


def _ways(parcels: Sequence[Parcel], bucket_bytes: int) -> list[list[tuple[int, torch.Tensor]]]:
    """For each step (peer, part) of every peer that still has a part."""
    by_peer: dict[int, list[torch.Tensor]] = {}
    for parcel in parcels:
        if parcel.buffer.numel():
            flat = parcel.buffer.view(-1).view(torch.uint8)
            by_peer.setdefault(parcel.peer, []).extend(flat.split(bucket_bytes))
    longest = max(map(len, by_peer.values()), default=0)
    return [
        [(peer, parts[step]) for peer, parts in sorted(by_peer.items()) if step < len(parts)]
        for step in range(longest)
    ]
