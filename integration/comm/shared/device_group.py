"""A process group over buckets in GPU memory: ranks of one host, several of a GPU if need be."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from ...endings import end_all
from ...errors import PeerLost, RefitError
from ...gpu_memory.buckets import OwnBuckets, PeerBuckets
from ...gpu_memory.driver import DriverError, call, on_device
from ..exchanges import Exchange, Parcel
from ..waiting import ends_within
from .device_exchange import DeviceExchange
from .device_link import LANE_WORD_BYTES, DeviceLink
from .group import SharedGroup
from .host_link import BUCKETS
from .pairs import Pair, hear, open_pairs, tell

logger = logging.getLogger(__name__)

# Large enough to copy at the full rate between two GPUs.
MOST_BUCKET_BYTES = 32 << 20
# Two processes of one GPU take turns on it, and a change of turns for 32 MiB took ten times as long as their copies.
MOST_SHARED_BYTES = 128 << 20
# Driver calls under way: a stream's queue holds some thousand, and a call blocks without a limit where it is full.
_MOST_CALLS = 512
# Seconds for which an aborted group waits for its own streams.
_DRAIN_WITHIN = 10.0
# What the GPU may use for ever.
_KEPT: list[object] = []


class DeviceGroup(SharedGroup):
    """Ranks that copy parcels into each other's buckets on their GPUs, and from there to where they belong.

    An exchange is only enqueued, as over NCCL. The buckets come from the driver, so that any allocator may be in use.
    """

    wire = "an exchange through CUDA IPC"
    most_bucket_bytes = MOST_BUCKET_BYTES

    def _begin(self) -> None:
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._own: list[OwnBuckets] = []
        self._mapped: list[PeerBuckets] = []
        self._links: dict[int, list[DeviceLink]] = {}
        # Exchanges that may be under way: what tells their end, and their calls.
        self._under_way: deque[tuple[torch.cuda.Event, int]] = deque()
        self._last: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._given_up = False

    def prepare(self, sends: Sequence[Parcel], receives: Sequence[Parcel], lane: int = 0) -> Exchange:
        return DeviceExchange(self, lane, sends, receives, self._bucket_bytes)

    def connect(self, peers: Iterable[int]) -> None:
        if self._given_up:
            raise RefitError("the process group is closed", stage="process group", rank=self.rank)
        new = sorted({*peers} - self._links.keys() - {self.rank})
        if not new:
            return
        limit = self.timeout.total_seconds()
        nbytes = self.lanes * BUCKETS * self._bucket_bytes
        own: dict[int, OwnBuckets] = {}
        for peer in new:
            own[peer] = self._make_buckets(nbytes, limit)
            tell(self._store, f"{self._name}/{self.rank}>{peer}", own[peer].told)
        words = self.lanes * LANE_WORD_BYTES
        opened = open_pairs(self._store, self._name, self.rank, new, words, 1, limit, self._watch)
        self._pairs |= opened
        for peer, pair in opened.items():
            told = hear(self._store, f"{self._name}/{peer}>{self.rank}", peer, self.rank, limit)
            mapped = PeerBuckets(told, nbytes, peer, self.device, limit)
            self._mapped.append(mapped)
            self._links[peer] = self._make_links(pair, mapped.address, own[peer].address)

    def link(self, peer: int, lane: int) -> DeviceLink:
        """The link to a connected peer."""
        return self._links[peer][lane]

    def make_room(self, calls: int, stage: str) -> None:
        """Wait until few enough calls are under way for ``calls`` more; raises as :meth:`wait_for`."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        while self._under_way and calls + sum(n for _, n in self._under_way) > _MOST_CALLS:
            self.wait_for([self._under_way[0][0]], stage)
            self._under_way.popleft()

    def follow(self, lane: int, stream: torch.cuda.Stream) -> None:
        """Hold ``stream`` up until the lane's last exchange is over: its buckets are counted in one row."""
        last = self._last.get(lane)
        if last is not None and last[0] != stream:
            stream.wait_event(last[1])

    def began(self, lane: int, stream: torch.cuda.Stream, ended: torch.cuda.Event, calls: int) -> None:
        """An exchange has been enqueued, whose end ``ended`` tells."""
        self._last[lane] = (stream, ended)
        self._under_way.append((ended, calls))

    def abort(self) -> bool:
        self._given_up = True
        return self._drain(_DRAIN_WITHIN, release=True)

    def close(self, *, failed: bool = False) -> None:
        """Give the memory back; safe to call twice. As of :class:`Group`."""
        if not failed and not self._drain(self.timeout.total_seconds(), release=False):
            logger.warning("rank %d gives up an exchange as it closes its group", self.rank)
        if not self.abort():
            # Unmapping under what the GPU still does would break this process's context, and the trainer with it.
            logger.warning("rank %d keeps the buckets that it shares, until its process ends", self.rank)
            _KEPT.extend([self._mapped, self._own, self._links, self._pairs])
            self._mapped, self._own, self._links, self._pairs = [], [], {}, {}
            return
        self._links, self._last = {}, {}
        try:
            while self._mapped:
                self._mapped.pop().close()
            while self._own:
                self._own.pop().close()
        except DriverError as error:
            # The context is lost, and all memory with it; what lost it has been raised where it happened.
            logger.warning("buckets of GPU memory were not given back: %s", error)
        finally:
            pairs, self._pairs = self._pairs, {}
            end_all(pair.close for pair in pairs.values())

    @property
    def staging_bytes(self) -> int:
        return len(self._own) * self.lanes * BUCKETS * self._bucket_bytes

    def _drain(self, within_s: float, *, release: bool) -> bool:
        """Wait until all that was enqueued has ended; whether it has. ``release``: ends waits for peers."""

        def ended() -> bool:
            if all(event.query() for event, _ in self._under_way):
                return True
            # Again and again: counts of peers that have not given up yet can still come.
            for link in chain(*self._links.values()) if release else ():
                link.release()
            return False

        try:
            if not ends_within(ended, within_s):
                return False
        except torch.AcceleratorError as error:
            logger.warning("rank %d lost its GPU: %s", self.rank, error)
            return False
        self._under_way.clear()
        return True

    def _look_around(self, stage: str) -> None:
        gone = [peer for peer, pair in self._pairs.items() if any(map(_ended, pair.connections))]
        # Its own reason comes first, if it could tell one.
        super()._look_around(stage)
        if gone:
            self.abort()
            raise PeerLost(
                f"group ranks {gone} closed their end of the shared memory in the middle of an exchange: their processes "
                "ended, or they gave up. Start them anew, and open a session with a new epoch",
                stage=stage,
                rank=self.rank,
            )

    def _make_buckets(self, nbytes: int, limit: float) -> OwnBuckets:
        try:
            made = OwnBuckets(nbytes, self.device, limit)
        except DriverError as error:
            raise RefitError(
                f"no {nbytes >> 20} MiB of GPU memory for the buckets between two ranks ({error}); nothing was written. "
                "Lower policy.refit.bucket_mb or policy.refit.streams, or give memory back with torch.cuda.empty_cache()",
                stage="process group",
                rank=self.rank,
            ) from error
        self._own.append(made)
        return made

    def _make_links(self, pair: Pair, outgoing: int, incoming: int) -> list[DeviceLink]:
        memory = pair.segment.memory
        with on_device(self.device):
            if not pair.segment.pin():
                raise RefitError(
                    f"{memory.nbytes} bytes of host memory can't be pinned for the GPU's counters; nothing was written. "
                    "Raise the limit of locked memory (ulimit -l)",
                    stage="process group",
                    rank=self.rank,
                )
            words = int(call("cuMemHostGetDevicePointer", memory.data_ptr(), 0))
        found = []
        for lane in range(self.lanes):
            first, place = lane * LANE_WORD_BYTES, lane * BUCKETS * self._bucket_bytes
            found.append(
                DeviceLink(
                    memory[first : first + LANE_WORD_BYTES],
                    words + first,
                    self.rank < pair.peer,
                    outgoing + place,
                    incoming + place,
                    self._bucket_bytes,
                )
            )
        return found


def _ended(connection: socket.socket) -> bool:
    """Whether the peer has closed its end; it never says anything."""
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
