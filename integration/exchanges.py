"""Exchanges of a process group: parcels that are sent and received at once, over gloo or NCCL."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .group_errors import classified

if TYPE_CHECKING:
    from .process_groups import Group

# Seconds that a wait on gloo has at least: it may have ended already when the time is up.
_LEAST_WAIT = 0.01


@dataclass(frozen=True)
class Parcel:
    """A contiguous buffer for, or from, one peer."""

    peer: int
    buffer: torch.Tensor


class Exchange(ABC):
    """Parcels that are exchanged at once; made by :meth:`Group.prepare`."""

    def __init__(self, group: Group, lane: int, sends: Sequence[Parcel], receives: Sequence[Parcel]):
        self._group = group
        self._lane = lane
        self._sends = list(sends)
        self._receives = list(receives)
        self.peers = sorted({p.peer for p in (*sends, *receives)})

    def start(self, stage: str) -> None:
        """On a GPU, enqueue the exchange after, and hold up, what the current stream does; else do it.

        Raises:
            PeerLost, RefitTimeout: as for :meth:`Group.exchange`.
        """
        if not self.peers:
            return
        try:
            self._start()
        except RuntimeError as error:
            raise classified(error, stage, self._group.rank, f"with refit ranks {self.peers}") from error

    @abstractmethod
    def _start(self) -> None:
        """Exchange them, or enqueue it."""


class GlooExchange(Exchange):
    """Looks its backend up at each use: whoever keeps the exchange, as a traceback does, must not keep gloo's
    connections open, for only their end tells the peers that this rank has given up.
    """

    def _start(self) -> None:
        deadline = time.monotonic() + self._group.timeout.total_seconds()
        works: list[Any] = []
        try:
            for parcel in self._receives:
                works.append(self._group.backend(self._lane).recv([parcel.buffer], parcel.peer, 0))
            for parcel in self._sends:
                works.append(self._group.backend(self._lane).send([parcel.buffer], parcel.peer, 0))
            for index in range(len(works)):
                # A timeout of 0 would mean none at all.
                works[index].wait(timedelta(seconds=max(deadline - time.monotonic(), _LEAST_WAIT)))
        finally:
            works.clear()


class NcclExchange(Exchange):
    """One NCCL group: separate calls could wait on each other in different orders.

    Not torch's all-to-all of lists, which would be fewer calls: it exchanges empty messages with all ranks, and
    so hangs where a rank has nothing to exchange and does not take part.
    """

    def __init__(self, group: Group, lane: int, sends: Sequence[Parcel], receives: Sequence[Parcel]):
        super().__init__(group, lane, sends, receives)
        backend = self._backend = group.backend(lane)
        self._calls = [(backend.send, [p.buffer], p.peer) for p in sends]
        self._calls += [(backend.recv, [p.buffer], p.peer) for p in receives]

    def _start(self) -> None:
        self._backend._start_coalescing()
        for call, buffers, peer in self._calls:
            call(buffers, peer, 0)
        self._backend._end_coalescing().wait()
