"""Exchanges of a process group: parcels that are sent and received at once, over gloo or NCCL."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .errors import classifying

if TYPE_CHECKING:
    from .torch_group import Group

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
        """On a GPU, enqueue the exchange after, and hold up, what the current stream does; else begin it, or do it.

        Raises:
            PeerLost, RefitTimeout: as for :meth:`Group.exchange`.
        """
        if self.peers:
            with classifying(stage, self._group.rank, self._with_whom):
                self._start()

    def finish(self, stage: str) -> None:
        """Wait for an exchange over gloo that was started; any other needs no more than its start.

        Raises:
            PeerLost, RefitTimeout: as for :meth:`Group.exchange`; the time counts from this call on.
        """
        if self.peers:
            with classifying(stage, self._group.rank, self._with_whom):
                self._finish()

    def drop(self) -> None:  # noqa: B027 - most have nothing under way that they could forget
        """Let go of what is under way, after a failure."""

    @property
    def _with_whom(self) -> str:
        return f"with refit ranks {self.peers}"

    @abstractmethod
    def _start(self) -> None:
        """Exchange them, begin to, or enqueue it."""

    def _finish(self) -> None:  # noqa: B027 - most are done, or enqueued, when they have started
        """Wait until all that was begun is done."""


class GlooExchange(Exchange):
    """A thread of gloo's carries it out, from its start on.

    Looks its backend up at each use: whoever keeps the exchange, as a traceback does, must not keep gloo's
    connections open, for only their end tells the peers that this rank has given up. What is under way keeps them too,
    so one that fails is dropped.
    """

    def __init__(self, group: Group, lane: int, sends: Sequence[Parcel], receives: Sequence[Parcel]):
        super().__init__(group, lane, sends, receives)
        self._works: list[Any] = []

    def drop(self) -> None:
        self._works.clear()

    def _start(self) -> None:
        try:
            for parcel in self._receives:
                self._works.append(self._group.backend(self._lane).recv([parcel.buffer], parcel.peer, 0))
            for parcel in self._sends:
                self._works.append(self._group.backend(self._lane).send([parcel.buffer], parcel.peer, 0))
        except BaseException:
            self.drop()
            raise

    def _finish(self) -> None:
        deadline = time.monotonic() + self._group.timeout.total_seconds()
        try:
            for index in range(len(self._works)):
                # A timeout of 0 would mean none at all.
                self._works[index].wait(timedelta(seconds=max(deadline - time.monotonic(), _LEAST_WAIT)))
        finally:
            self.drop()


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
