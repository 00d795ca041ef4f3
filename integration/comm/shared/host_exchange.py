"""Exchanges through buckets in shared host memory."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...errors import PeerLost, RefitTimeout
from ..exchanges import Exchange, Parcel
from ..waiting import PAUSE_S, wait_until
from .host_link import HostLink

if TYPE_CHECKING:
    from .host_group import HostGroup


class HostExchange(Exchange):
    """Is done when :meth:`start` returns, for tensors of a GPU too: their buckets are copied on the current stream.

    All that can go on does, in whichever order the peers come.
    """

    _group: HostGroup

    def start(self, stage: str) -> None:
        if not self.peers:
            return
        self._group.connect(self.peers)
        limit = self._group.timeout.total_seconds()
        flows = self._flows()

        def done() -> bool:
            while sum([flow.step() for flow in flows]):
                flows[:] = [flow for flow in flows if flow.left]
            self._require_peers(flows, stage)
            return not flows

        def late() -> RefitTimeout:
            peers = sorted({flow.link.peer for flow in flows})
            return RefitTimeout(
                f"the exchange with group ranks {peers} did not end within {limit:.0f} s; they are late, stuck, or were not "
                "called. Raise policy.refit.timeout_s if they are only slow",
                stage=stage,
                rank=self._group.rank,
            )

        wait_until(done, limit, stage, self._group.look_around, late, partial(_pause, flows))

    def _start(self) -> None:
        self.start("transfer")

    def _flows(self) -> list[Flow]:
        found = []
        for parcels, outward in ((self._receives, False), (self._sends, True)):
            for peer in sorted({parcel.peer for parcel in parcels}):
                own = [parcel for parcel in parcels if parcel.peer == peer]
                found.append(Flow(self._group.link(peer, self._lane), own, outward))
        return [flow for flow in found if flow.left]

    def _require_peers(self, flows: Sequence[Flow], stage: str) -> None:
        gone = sorted({flow.link.peer for flow in flows if flow.link.ended and not flow.copying})
        if gone:
            raise PeerLost(
                f"group ranks {gone} closed their end of the shared memory in the middle of an exchange: their processes "
                "ended, or they gave up. What they were sending has not arrived whole; start them anew, and open a "
                "session with a new epoch",
                stage=stage,
                rank=self._group.rank,
            )


class Flow:
    """All that goes over one link in one direction, bucket by bucket.

    Attributes:
        link: the link.
        left: buckets that are still to go.
    """

    def __init__(self, link: HostLink, parcels: Sequence[Parcel], outward: bool):
        """
        Args:
            link: to the peer.
            parcels: in order.
            outward: whether they leave.
        """
        self.link = link
        self._outward = outward
        self._next: Callable[[], torch.Tensor | None] = link.free_bucket if outward else link.full_bucket
        self._done = link.filled if outward else link.emptied
        flat = [parcel.buffer.view(-1).view(torch.uint8) for parcel in parcels if parcel.buffer.numel()]
        self._parts = [part for buffer in flat for part in buffer.split(link.bucket_bytes)]
        self._at = 0
        self._copied: torch.cuda.Event | None = None

    @property
    def left(self) -> int:
        return len(self._parts) - self._at

    @property
    def copying(self) -> bool:
        """Whether a GPU is about to fill or empty a bucket."""
        return self._copied is not None

    def step(self) -> bool:
        """Go on as far as is possible at once; whether that was any further."""
        if not self.left:
            return False
        if self._copied is not None:
            if not self._copied.query():
                return False
            self._copied = None
            self._pass_on()
            return True
        bucket = self._next()
        if bucket is None:
            return False
        part = self._parts[self._at]
        place = bucket[: part.numel()]
        target, source = (place, part) if self._outward else (part, place)
        target.copy_(source, non_blocking=True)
        if part.device.type == "cuda":
            self._copied = torch.cuda.Event()
            # Not of the current device, which may be another one.
            self._copied.record(torch.cuda.current_stream(part.device))
        else:
            self._pass_on()
        return True

    def _pass_on(self) -> None:
        self._done()
        self._at += 1


def _pause(flows: Sequence[Flow], limit_s: float) -> None:
    """Until a signal comes, but for ``limit_s`` at most; or for a moment, while a GPU copies."""
    if any(flow.copying for flow in flows):
        time.sleep(PAUSE_S)
        return
    waiting = select.poll()
    for flow in flows:
        waiting.register(flow.link.connection, select.POLLIN)
    # In milliseconds, rounded up: 0 would not wait at all.
    waiting.poll(max(1.0, limit_s * 1e3))
