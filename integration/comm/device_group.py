"""A process group over buckets in GPU memory: ranks of one host, several of a GPU if need be.

A rank fills the peer's buckets and counts them; the peer's stream waits for the count, empties the bucket and
counts that. The counters are 64-bit words in host memory that both GPUs reach, each written by one rank alone. In
host memory, and not on the GPU, so that the host can end a wait without the GPU's help: with one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS=1``) a write on another stream would queue behind the wait that it is to end.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain, zip_longest
from typing import NamedTuple

import torch

from ..errors import PeerLost, RefitError, TransportUnavailable, end_all
from ..gpu_memory.buckets import OwnBuckets, PeerBuckets, ToldBuckets
from ..gpu_memory.driver import DriverError, call, on_device
from ..layout import flat_bytes
from .group import Exchange, PeerBuffer, classified
from .shared_memory import BUCKETS, Pair, SharedGroup, hear, open_pairs, tell
from .waiting import gpu_ends_within, leave_running

logger = logging.getLogger(__name__)

# Large enough to copy at the full rate between two GPUs.
MOST_BUCKET_BYTES = 32 << 20
# Two processes of one GPU take turns on it, and a change of turns for 32 MiB took ten times as long as their copies.
MOST_SHARED_BYTES = 128 << 20
# Driver calls under way: a stream's queue holds some thousand, and a call blocks without a limit where it is full.
_MOST_CALLS = 512
# Seconds for which an aborted group waits for its own streams.
_DRAIN_WITHIN = 10.0
# Calls of the driver for one bucket.
_CALLS = 3
# A word has a cache line of its own.
_LINE_BYTES = 64
# Of each lane: the counts of filled and of emptied buckets, for each direction.
LANE_WORD_BYTES = 4 * _LINE_BYTES
# CU_STREAM_WAIT_VALUE_GEQ, and CU_STREAM_WRITE_VALUE_DEFAULT: all earlier writes become visible first.
_AT_LEAST = 0
_AFTER_ALL = 0
# Beyond any count; what is at least this far behind counts as reached.
_RELEASED = 1 << 62


class DeviceGroup(SharedGroup):
    """Ranks that copy buffers into each other's buckets on their GPUs, and from there to where they belong.

    An exchange is only enqueued, as over NCCL. The buckets come from the driver, so that any allocator may be in use.
    """

    _carrier = "an exchange through CUDA IPC"
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

    def prepare(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], lane: int = 0) -> Exchange:
        return DeviceExchange(self, lane, sends, receives, self._bucket_bytes)

    def connect(self, peers: Iterable[int]) -> None:
        """As :meth:`Group.connect`. All peers come to its end, whichever rank can't share memory.

        Raises:
            TransportUnavailable: this rank or a peer has no memory for buckets, or this one can't map a peer's. The group is of no
                more use.
        """
        if self._given_up:
            raise RefitError("the process group is closed", stage="process group", rank=self.rank)
        new = sorted({*peers} - self._links.keys() - {self.rank})
        if not new:
            return
        limit = self.timeout_s
        nbytes = self.lanes * BUCKETS * self._bucket_bytes
        own: dict[int, OwnBuckets] = {}
        refused: TransportUnavailable | None = None
        try:
            own |= {peer: self._make_buckets(nbytes, limit) for peer in new}
        except TransportUnavailable as error:
            # The peers wait for what is told here.
            refused = error
        for peer in new:
            told = ToldBuckets(None, 0, str(refused)) if refused is not None else own[peer].told
            tell(self._store, f"{self._name}/{self.rank}>{peer}", asdict(told))
        words = self.lanes * LANE_WORD_BYTES
        opened = open_pairs(self._store, self._name, self.rank, new, words, 1, limit, self.watch)
        self._pairs |= opened
        if refused is not None:
            raise refused
        for peer, pair in opened.items():
            key = f"{self._name}/{peer}>{self.rank}"
            told = hear(ToldBuckets, self._store, key, peer, self.rank, limit)
            mapped = PeerBuckets(told, nbytes, peer, self.device, limit)
            self._mapped.append(mapped)
            self._links[peer] = self._make_links(pair, mapped.address, own[peer].address)

    def link(self, peer: int, lane: int) -> DeviceLink:
        """The link to a connected peer."""
        return self._links[peer][lane]

    def make_room(self, calls: int, stage: str) -> None:
        """Wait until the streams' queues have room for ``calls`` more calls; raises as :meth:`wait_for`."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        while self._under_way and calls + sum(n for _, n in self._under_way) > _MOST_CALLS:
            self.wait_for([self._under_way[0][0]], stage)
            self._under_way.popleft()

    def follow(self, lane: int, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` wait for the lane's last exchange: all exchanges of a lane share its counters."""
        last = self._last.get(lane)
        if last is not None and last[0] != stream:
            stream.wait_event(last[1])

    def began(self, lane: int, stream: torch.cuda.Stream, ended: torch.cuda.Event, calls: int) -> None:
        """Note an exchange that has been enqueued; ``ended`` is recorded after it."""
        self._last[lane] = (stream, ended)
        self._under_way.append((ended, calls))

    def abort(self) -> bool:
        self._given_up = True
        return self._drain(_DRAIN_WITHIN, release=True)

    def close(self, *, failed: bool = False) -> None:
        """As :meth:`Group.close`; gives the memory back."""
        if not failed and not self._drain(self.timeout_s, release=False):
            logger.warning("rank %d gives up an exchange as it closes its group", self.rank)
        if not self.abort():
            leave_running(
                f"exchanges of group rank {self.rank}", self._mapped, self._own, self._links, self._pairs
            )
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
        """Wait until all that was enqueued has ended; returns whether it has. ``release``: end waits for peers."""

        def ended() -> bool:
            if all(event.query() for event, _ in self._under_way):
                return True
            # Again and again: counts of peers that have not given up yet can still come.
            for link in chain(*self._links.values()) if release else ():
                link.release()
            return False

        if not gpu_ends_within(ended, within_s):
            return False
        self._under_way.clear()
        return True

    def check_peers(self, stage: str) -> None:
        gone = [peer for peer, pair in self._pairs.items() if any(map(_ended, pair.connections))]
        # The peer's own reason comes first, if it could give one.
        super().check_peers(stage)
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
            raise TransportUnavailable(
                f"no {nbytes >> 20} MiB of GPU memory for the buckets between two ranks ({error}); nothing was written. "
                "Lower policy.refit.bucket_mb or policy.refit.streams, or give memory back with torch.cuda.empty_cache()",
                stage="process group",
                rank=self.rank,
            ) from error
        self._own.append(made)
        return made

    def _make_links(self, pair: Pair, outgoing: int, incoming: int) -> list[DeviceLink]:
        memory = pair.shared.memory
        with on_device(self.device):
            if not pair.shared.pin():
                raise TransportUnavailable(
                    f"{memory.nbytes} bytes of host memory can't be pinned for the GPU's counters; nothing was written. "
                    "Raise the limit of locked memory (ulimit -l)",
                    stage="process group",
                    rank=self.rank,
                )
            try:
                words = int(call("cuMemHostGetDevicePointer", memory.data_ptr(), 0))
            except DriverError as error:
                raise TransportUnavailable(
                    f"the GPU can't reach host memory that two ranks share ({error}); nothing was written",
                    stage="process group",
                    rank=self.rank,
                ) from error
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


# What a rank enqueues for its peers, and then from them: (peer, part) each.
_Step = tuple[Sequence[tuple[int, torch.Tensor]], Sequence[tuple[int, torch.Tensor]]]


class Portion(NamedTuple):
    """Steps of an exchange that are enqueued together, and the driver's calls that they take."""

    steps: Sequence[_Step]
    calls: int


class DeviceExchange(Exchange):
    """An exchange that is only enqueued. In each step a rank enqueues the next bucket to each peer, then the one from each peer.

    So no ranks wait for each other in a circle, however many streams share a hardware queue: a step waits for the peers' sends
    of the same step, which come before their arrivals, and for emptied buckets of earlier steps.

    A large one is enqueued in portions, each once the queue has room for it: the driver would hold a call in a full queue up without
    a limit, and for ever where a peer has died. The rank that is behind all others waits for nothing but steps that all have enqueued.

    Attributes:
        portions: in the order in which they are enqueued.
    """

    def __init__(
        self,
        group: DeviceGroup,
        lane: int,
        sends: Sequence[PeerBuffer],
        receives: Sequence[PeerBuffer],
        bucket_bytes: int,
    ):
        super().__init__(lane, sends, receives)
        self._group = group
        steps = zip_longest(_steps(sends, bucket_bytes), _steps(receives, bucket_bytes), fillvalue=())
        self.portions = _portions(list(steps))

    def start(self, stage: str) -> None:
        if not self.peers:
            return
        self._group.connect(self.peers)
        with on_device(self._group.device):
            stream = torch.cuda.current_stream()
            self._group.follow(self._lane, stream)
            for portion in self.portions:
                self._group.make_room(portion.calls, stage)
                try:
                    self.enqueue(portion, stream.cuda_stream)
                except DriverError as error:
                    raise classified(
                        error, stage, self._group.rank, f"with group ranks {self.peers}"
                    ) from error
                finally:
                    # Even if it broke off: what was enqueued is waited for before any memory is given back.
                    ended = torch.cuda.Event()
                    ended.record(stream)
                    self._group.began(self._lane, stream, ended, portion.calls)

    def enqueue(self, portion: Portion, stream: int) -> None:
        """Give a CUDA stream what is to be done in a portion."""
        for out, into in portion.steps:
            for peer, part in out:
                self._group.link(peer, self._lane).send(part, stream)
            for peer, part in into:
                self._group.link(peer, self._lane).receive(part, stream)


class DeviceLink:
    """This rank's end of one lane to a peer: buckets in GPU memory, and counters that both ranks' streams write and wait for."""

    def __init__(
        self,
        words: torch.Tensor,
        words_on_device: int,
        lower: bool,
        outgoing: int,
        incoming: int,
        bucket_bytes: int,
    ):
        """
        Args:
            words: uint8 ``[LANE_WORD_BYTES]`` in host memory that both ranks have mapped and pinned.
            words_on_device: their address for this rank's GPU.
            lower: whether this rank is the lower one of the two.
            outgoing: address of the peer's buckets, which this rank fills.
            incoming: address of this rank's.
            bucket_bytes: of each bucket.
        """
        ours, theirs = (0, 2) if lower else (2, 0)
        self._counts = words.view(torch.int64)
        # Of what this rank sends: it counts the filled, and waits for the emptied; the other way round for the rest.
        self._filled_out, self._emptied_out = (words_on_device + _LINE_BYTES * (ours + i) for i in range(2))
        self._filled_in, self._emptied_in = (words_on_device + _LINE_BYTES * (theirs + i) for i in range(2))
        self._awaited = [_LINE_BYTES // 8 * (ours + 1), _LINE_BYTES // 8 * theirs]
        self._outgoing, self._incoming = outgoing, incoming
        self._bucket_bytes = bucket_bytes
        self._sent = self._received = 0

    def send(self, part: torch.Tensor, stream: int) -> None:
        """Enqueue one bucket for the peer: ``part`` is contiguous and no larger than a bucket."""
        if self._sent >= BUCKETS:
            call("cuStreamWaitValue64", stream, self._emptied_out, self._sent - BUCKETS + 1, _AT_LEAST)
        place = self._outgoing + self._sent % BUCKETS * self._bucket_bytes
        call("cuMemcpyAsync", place, part.data_ptr(), part.nbytes, stream)
        self._sent += 1
        call("cuStreamWriteValue64", stream, self._filled_out, self._sent, _AFTER_ALL)

    def receive(self, part: torch.Tensor, stream: int) -> None:
        """Enqueue the arrival of one bucket."""
        call("cuStreamWaitValue64", stream, self._filled_in, self._received + 1, _AT_LEAST)
        place = self._incoming + self._received % BUCKETS * self._bucket_bytes
        call("cuMemcpyAsync", part.data_ptr(), place, part.nbytes, stream)
        self._received += 1
        call("cuStreamWriteValue64", stream, self._emptied_in, self._received, _AFTER_ALL)

    def release(self) -> None:
        """End all waits of this rank's streams; what they go on with is worthless. A peer's late count undoes it."""
        for word in self._awaited:
            self._counts[word] = _RELEASED


def _steps(buffers: Sequence[PeerBuffer], bucket_bytes: int) -> list[list[tuple[int, torch.Tensor]]]:
    """For each step, (peer, part) of every peer that still has a part."""
    by_peer: dict[int, list[torch.Tensor]] = {}
    for one in buffers:
        if one.buffer.numel():
            by_peer.setdefault(one.peer, []).extend(flat_bytes(one.buffer).split(bucket_bytes))
    longest = max(map(len, by_peer.values()), default=0)
    return [
        [(peer, parts[step]) for peer, parts in sorted(by_peer.items()) if step < len(parts)]
        for step in range(longest)
    ]


def _portions(steps: Sequence[_Step]) -> list[Portion]:
    """Neighbouring steps of no more calls together than a queue has room for, unless a single step has more."""
    found: list[Portion] = []
    held: list[_Step] = []
    calls = 0
    for step in steps:
        more = _CALLS * (len(step[0]) + len(step[1]))
        if held and calls + more > _MOST_CALLS:
            found.append(Portion(held, calls))
            held, calls = [], 0
        held.append(step)
        calls += more
    return [*found, Portion(held, calls)] if held else found


def _ended(connection: socket.socket) -> bool:
    """Whether the peer has closed its end; it never says anything."""
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
