"""A process group over shared host memory: any ranks of one host, on CPUs, and on GPUs without CUDA IPC."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ..errors import PeerLost, RefitError, RefitTimeout, end_all
from ..layout import flat_bytes
from .group import Event, Exchange, PeerBuffer
from .shared_memory import BUCKETS, Pair, SharedGroup, open_pairs
from .waiting import PAUSE_S, gpu_ends_within, leave_running, wait_until

logger = logging.getLogger(__name__)

# Larger ones would not overlap any better, and smaller ones stay in a core's caches.
MOST_BUCKET_BYTES = 4 << 20
_FILLED, _FREED = b"s", b"f"
# Seconds for which a group that gives up waits for a GPU's copies.
_DRAIN_WITHIN = 10.0
_MOST_SIGNALS = 64


class HostGroup(SharedGroup):
    """Ranks that exchange buffers through buckets in host memory that each pair of them shares.

    A buffer larger than a bucket goes in parts. Memory is taken when two ranks first have something to exchange,
    and given back with :meth:`close`; nothing of it has a name in the file system.
    """

    _carrier = "a copy to or from memory shared with other ranks"
    most_bucket_bytes = MOST_BUCKET_BYTES

    def _begin(self) -> None:
        self._links: dict[int, list[_HostLink]] = {}
        self._closed = False
        # Copies of a GPU that a failed exchange has left under way.
        self._left: list[Event] = []

    def prepare(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], lane: int = 0) -> Exchange:
        return _HostExchange(self, lane, sends, receives)

    def connect(self, peers: Iterable[int]) -> None:
        if self._closed:
            raise RefitError("the process group is closed", stage="process group", rank=self.rank)
        new = sorted({*peers} - self._links.keys() - {self.rank})
        if not new:
            return
        lane_bytes = 2 * BUCKETS * self._bucket_bytes
        limit = self.timeout_s
        opened = open_pairs(
            self._store, self._name, self.rank, new, self.lanes * lane_bytes, self.lanes, limit, self.watch
        )
        self._pairs |= opened
        for peer, pair in opened.items():
            if self.device.type == "cuda" and not pair.shared.pin():
                logger.warning(
                    "rank %d: memory shared with rank %d can't be pinned, so copies from and to the GPU are slow; raise "
                    "the limit of locked memory (ulimit -l)",
                    self.rank,
                    peer,
                )
            self._links[peer] = [self._make_link(pair, lane, lane_bytes) for lane in range(self.lanes)]

    def link(self, peer: int, lane: int) -> _HostLink:
        """The link to a connected peer."""
        return self._links[peer][lane]

    def leave(self, copies: Iterable[Event]) -> None:
        """Note copies between a GPU and buckets that go on, though their exchange has failed."""
        self._left += copies

    def abort(self) -> bool:
        # All else ended with the call that had begun it.
        return gpu_ends_within(lambda: all(copy.query() for copy in self._left), _DRAIN_WITHIN)

    def close(self, *, failed: bool = False) -> None:
        self._closed = True
        if not self.abort():
            leave_running(f"copies of group rank {self.rank}", self._links, self._pairs)
            # Their end tells the peers that this rank has given up.
            end_all(one.close for pair in self._pairs.values() for one in pair.connections)
            self._links, self._pairs, self._left = {}, {}, []
            return
        while self._links:
            for link in self._links.popitem()[1]:
                link.close()
        pairs, self._pairs = self._pairs, {}
        end_all(pair.close for pair in pairs.values())

    @property
    def staging_bytes(self) -> int:
        # Each end counts what it receives in.
        return len(self._links) * self.lanes * BUCKETS * self._bucket_bytes

    def _make_link(self, pair: Pair, lane: int, lane_bytes: int) -> _HostLink:
        memory = pair.shared.memory[lane * lane_bytes : (lane + 1) * lane_bytes]
        buckets = list(memory.split(self._bucket_bytes))
        upward, downward = buckets[:BUCKETS], buckets[BUCKETS:]
        outgoing, incoming = (upward, downward) if self.rank < pair.peer else (downward, upward)
        return _HostLink(pair.peer, pair.connections[lane], outgoing, incoming)


class _HostExchange(Exchange):
    """An exchange that is done when :meth:`start` returns, also for GPU tensors, whose buckets are copied on the current stream.

    All peers are served at once, in whichever order they come.
    """

    def __init__(
        self, group: HostGroup, lane: int, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]
    ):
        super().__init__(lane, sends, receives)
        self._group = group

    def start(self, stage: str) -> None:
        if not self.peers:
            return
        self._group.connect(self.peers)
        limit = self._group.timeout_s
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

        try:
            wait_until(done, limit, stage, self._group.check_peers, late, partial(_pause, flows))
        except BaseException:
            self._group.leave(flow.copied for flow in flows if flow.copied is not None)
            raise

    def _flows(self) -> list[_Flow]:
        found = []
        for all_buffers, outward in ((self._receives, False), (self._sends, True)):
            for peer in sorted({one.peer for one in all_buffers}):
                own = [one.buffer for one in all_buffers if one.peer == peer]
                found.append(_Flow(self._group.link(peer, self._lane), own, outward))
        return [flow for flow in found if flow.left]

    def _require_peers(self, flows: Sequence[_Flow], stage: str) -> None:
        gone = sorted({flow.link.peer for flow in flows if flow.link.ended and not flow.copying})
        if gone:
            raise PeerLost(
                f"group ranks {gone} closed their end of the shared memory in the middle of an exchange: their processes "
                "ended, or they gave up. What they were sending has not arrived whole; start them anew, and open a "
                "session with a new epoch",
                stage=stage,
                rank=self._group.rank,
            )


class _Flow:
    """The buffers that travel over one link in one direction, bucket by bucket.

    Attributes:
        link: the link.
        left: buckets that are still to go.
        copied: when a GPU has filled or emptied a bucket that it is about to; None if there is none.
    """

    def __init__(self, link: _HostLink, buffers: Sequence[torch.Tensor], outward: bool):
        """
        Args:
            link: to the peer.
            buffers: contiguous, in order.
            outward: whether they leave.
        """
        self.link = link
        self._outward = outward
        self._next: Callable[[], torch.Tensor | None] = link.free_bucket if outward else link.full_bucket
        self._done = link.filled if outward else link.emptied
        flat = [flat_bytes(buffer) for buffer in buffers if buffer.numel()]
        self._parts = [part for raw in flat for part in raw.split(link.bucket_bytes)]
        self._at = 0
        self.copied: torch.cuda.Event | None = None

    @property
    def left(self) -> int:
        return len(self._parts) - self._at

    @property
    def copying(self) -> bool:
        """Whether a GPU is about to fill or empty a bucket."""
        return self.copied is not None

    def step(self) -> bool:
        """Move one bucket on if that is possible without waiting; returns whether anything moved."""
        if not self.left:
            return False
        if self.copied is not None:
            if not self.copied.query():
                return False
            self.copied = None
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
            self.copied = torch.cuda.Event()
            # Not of the current device, which may be another one.
            self.copied.record(torch.cuda.current_stream(part.device))
        else:
            self._pass_on()
        return True

    def _pass_on(self) -> None:
        self._done()
        self._at += 1


def _pause(flows: Sequence[_Flow], limit_s: float) -> None:
    """Wait until a signal comes, for ``limit_s`` at most; while a GPU copies, only for a moment."""
    if any(flow.copying for flow in flows):
        time.sleep(PAUSE_S)
        return
    waiting = select.poll()
    for flow in flows:
        waiting.register(flow.link.connection, select.POLLIN)
    # In milliseconds, rounded up: 0 would not wait at all.
    waiting.poll(max(1.0, limit_s * 1e3))


class _HostLink:
    """This rank's end of one lane to a peer: two buckets for each direction, and signals that say which are full and free.

    Signals are bytes of a connection. The kernel orders them with what was written before, which plain counters in
    shared memory would not be on every processor, and a wait for them takes no time of a core.

    Attributes:
        peer: the other rank.
        connection: non-blocking; readable when there is a signal, or the peer is gone.
        ended: whether the peer has closed its end.
        bucket_bytes: of each bucket.
    """

    def __init__(
        self, peer: int, connection: socket.socket, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]
    ):
        """
        Args:
            peer: the other rank.
            connection: to it.
            outgoing: buckets that this rank fills and the peer empties, uint8.
            incoming: the other way.
        """
        self.peer = peer
        self.connection = connection
        self.ended = False
        self.bucket_bytes = outgoing[0].numel()
        self._outgoing, self._incoming = outgoing, incoming
        self._credit, self._arrived = len(outgoing), 0
        self._filled = self._emptied = 0

    def free_bucket(self) -> torch.Tensor | None:
        """The bucket to be filled next, or None as long as the peer has not emptied it."""
        if not self._credit:
            self._take_signals()
        return self._outgoing[self._filled % len(self._outgoing)] if self._credit else None

    def filled(self) -> None:
        """The bucket of :meth:`free_bucket` has been filled."""
        self._credit -= 1
        self._filled += 1
        self._signal(_FILLED)

    def full_bucket(self) -> torch.Tensor | None:
        """The bucket to be emptied next, or None as long as the peer has not filled it."""
        if not self._arrived:
            self._take_signals()
        return self._incoming[self._emptied % len(self._incoming)] if self._arrived else None

    def emptied(self) -> None:
        """The bucket of :meth:`full_bucket` has been emptied."""
        self._arrived -= 1
        self._emptied += 1
        self._signal(_FREED)

    def close(self) -> None:
        """Drop the buckets, since a traceback may keep the link; the connection belongs to its :class:`Pair`."""
        self._outgoing, self._incoming = [], []

    def _signal(self, signal: bytes) -> None:
        try:
            self.connection.send(signal)
        except (BrokenPipeError, ConnectionResetError):
            # No failure yet: a peer that has all it wants may leave before the last bucket is given back.
            self.ended = True

    def _take_signals(self) -> None:
        try:
            signals = self.connection.recv(_MOST_SIGNALS)
        except BlockingIOError:
            return
        except ConnectionResetError:
            signals = b""
        self.ended |= not signals
        self._arrived += signals.count(_FILLED)
        self._credit += signals.count(_FREED)
