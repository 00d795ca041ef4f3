"""Shard to shard: each pair of ranks exchanges its packed messages, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from ..comm.group import Group
from ..layout import Fragment
from ..plan import Plan
from ..records.record import StageClock
from .base import GroupTransport, TransferResult, damaged
from .cargo import Cargo
from .host_memory import DeviceMemory, HostMemory
from .replay import Replay
from .streams import Span, make_line, make_span
from .views import LiveViews

# Rounds that are enqueued ahead of the wire: enough for it never to wait for the host, and few enough that
# CUDA's queues, where a launch would block without a limit of time, never fill up.
_AHEAD = 16
# Number of the round before which all ranks exchange what goes aside: the earlier ones keep the wire busy meanwhile.
_ASIDE_BEFORE = 8


class P2PTransport(GroupTransport):
    """Grouped sends and receives of packed messages over one process group (NCCL or gloo).

    Packing, wire and unpacking of different rounds overlap: on GPUs each has a stream of its own, and on CPUs gloo's
    thread has the wire. In each lane of the group a few buckets for each direction take turns. A bare message leaves
    from, and lands in, the parameter itself where that is contiguous. What a rank passes on leaves from the bucket in
    which it arrived.
    """

    name = "p2p"

    def __init__(self, group: Group, rank: int, plan: Plan, verify: str, turn: int = 0):
        """Connect to the plan's peers; all ranks at the same time.

        Args:
            group: of all ranks; rounds take turns over its lanes.
            rank: of the refit world and of the group.
            plan: this rank's.
            verify: ``off``, ``sampled`` or ``full``, the same on all ranks.
            turn: at which message sampled checks begin, the same on all ranks.

        Raises:
            PlanError: the plan passes on what did not arrive before.
            RefitTimeout, PeerLost: a peer did not connect.
        """
        super().__init__(group, rank, verify, turn)
        self._cargo = Cargo(plan)
        self._pace = plan.pace
        # A round's number decides its lane, since both ends know it; relays stay in their messages' lane.
        numbers = [
            next(iter(chain(*both))).round_index for both in zip(plan.sends, plan.receives, strict=True)
        ]
        self._lanes = [number // 2 % group.lanes for number in numbers]
        self._aside_at = sum(number < _ASIDE_BEFORE for number in numbers)
        self._payload = sum(m.payload_bytes for messages in (*plan.sends, *plan.receives) for m in messages)
        group.connect(self._cargo.peers)
        device = group.device
        # The rounds whose ends are the refit's: on a stream the last one's comes after all others'.
        last = {lane: index for index, lane in enumerate(self._lanes)}
        self._last = sorted(last.values()) if device.type == "cuda" else range(len(numbers))
        self._pack, self._unpack = make_line(device), make_line(device)
        self._wires = [make_line(device) for _ in range(group.lanes)]
        self._packed: list[Span] = [make_span(device) for _ in numbers]
        self._sent: list[Span] = [make_span(device) for _ in numbers]
        self._landed: list[Span] = [make_span(device) for _ in numbers]
        self._told, self._compared = make_span(device), make_span(device)
        self._idle = make_span(device)
        self._replay: Replay | None = None
        self._host: HostMemory | None = None

    @property
    def staging_bytes(self) -> int:
        return self.group.staging_bytes + (self._replay.staging_bytes if self._replay is not None else 0)

    def bind(self, fragments: Sequence[Fragment]) -> None:
        device = self.group.device
        # Before anything is looked up, so that what is given back meanwhile shows.
        if device.type == "cuda":
            self._memory = DeviceMemory(device, lambda: (place.range for place in places))
        self._views = LiveViews(fragments, device)
        places = self._views.places()
        if self._memory is not None and self._refits == 0:
            # Its first answer looks at every block of torch's allocator, which no refit shall wait for.
            self._memory.still_mapped()
        if self._cargo.incoming:
            self._views.require_home()
        self._host = HostMemory((fragment.view for fragment in fragments), device)

    def describe(self) -> object:
        return self._cargo.describe()

    def connect(self, described: Sequence[object]) -> None:
        self._cargo.learn_turns(described)
        buckets = self._replay.buckets if self._replay is not None else {}
        self._replay = Replay(
            self._cargo, self._views, self._pace, self.group, self._lanes, self.verify, buckets
        )
        self._views = LiveViews([])
        if self.group.device.type == "cuda":
            # The tables' way to the device: a refit may run on another stream than this one.
            torch.cuda.current_stream(self.group.device).synchronize()

    def release(self) -> None:
        """Let go of the storage and the buckets; bind and connect again before the next run."""
        self._views, self._replay, self._host, self._memory = LiveViews([]), None, None, None

    def moved(self) -> bool:
        return self._host is not None and self._host.moved()

    def close(self, *, failed: bool = False) -> None:
        try:
            super().close(failed=failed)
        finally:
            # Only now: until the communicators have been given up, a failed refit may still write the buckets. The
            # exchanges go with them, since a communicator that outlived this would end at the interpreter's exit.
            self._replay = self._host = None

    def run(self, clock: StageClock, aside: Callable[[], None] | None = None) -> TransferResult:
        assert self._replay is not None, "connect comes before run"
        # Counted even if it fails: all ranks have to agree on the number.
        refit, self._refits = self._number, self._refits + 1
        try:
            return self._run(self._replay, refit, clock, aside)
        except BaseException:
            self._replay.drop()
            raise

    def _run(
        self, replay: Replay, refit: int, clock: StageClock, aside: Callable[[], None] | None
    ) -> TransferResult:
        if self.group.device.type == "cuda":
            # Setting a stream sets its device as well; the caller's may be another one.
            with torch.cuda.device(self.group.device):
                caller = torch.cuda.current_stream()

                def on_callers_stream() -> None:
                    torch.cuda.set_stream(caller)
                    if aside is not None:
                        aside()

                try:
                    waited_for = self._enqueue(replay, refit, clock, on_callers_stream)
                finally:
                    torch.cuda.set_stream(caller)
        else:
            waited_for = self._enqueue(replay, refit, clock, aside)
        void = self._look()
        with clock.waiting():
            self.group.wait_for(waited_for, "transfer")
        for item in replay.ledger.damaged():
            raise damaged(item.message, self.rank)
        return TransferResult(self._payload, replay.verified_bytes(refit), void)

    def _enqueue(
        self, replay: Replay, refit: int, clock: StageClock, aside: Callable[[], None] | None
    ) -> list[Span]:
        """Enqueue the whole refit, at most ``_AHEAD`` rounds ahead of the wire; returns the spans that end it."""
        for line in (self._pack, self._unpack, *self._wires):
            line.begin()
        self._pack.enter()
        replay.ledger.begin_sent(refit)
        self._unpack.enter()
        replay.ledger.begin_landed(refit)
        # Unpacking follows as many rounds behind as there are lanes: if all streams share one hardware queue
        # (CUDA_DEVICE_MAX_CONNECTIONS=1), it must not hold up the next lane's wire. On CPUs it is this thread that
        # waits for what is unpacked, and further rounds are to be under way meanwhile.
        behind = self.group.lanes - 1 + self._pace.ahead
        count = len(self._lanes)
        unpacked = 0
        for index in range(-1, count + behind):
            if 0 <= index < count:
                if index == self._aside_at and aside is not None:
                    # In the same place of every rank's order, or with one hardware queue two ranks could wait for
                    # each other: for a round that is behind this on one, and for this behind the round on the other.
                    aside()
                # Whatever arrives in a bucket comes after its last tenant was unpacked: rounds of a lane can
                # follow each other more closely than the lanes are many.
                unpacked = self._unpack_until(
                    replay, refit, unpacked, replay.incoming.before[index] + 1, clock
                )
                if index >= _AHEAD and not self._sent[index - _AHEAD].query():
                    with clock.waiting():
                        self.group.wait_for([self._sent[index - _AHEAD]], "transfer")
                self._send_round(replay, index, clock)
            if index + 1 < count and replay.packs[index + 1]:
                self._pack_round(replay, index + 1, refit, clock)
            unpacked = self._unpack_until(replay, refit, unpacked, index - behind + 1, clock)
        if self._aside_at == count and aside is not None:
            aside()
        self._compare(replay, clock)
        return [*(self._sent[index] for index in self._last), self._told, self._compared]

    def _pack_round(self, replay: Replay, index: int, refit: int, clock: StageClock) -> None:
        line, before = self._pack, replay.outgoing.before[index]
        line.enter()
        if before >= 0:
            line.after(self._sent[before])
        if replay.blocks[index]:
            # The host brings memory that the GPU can't read. CUDA would keep it waiting for the line without a limit
            # of time, and blind to other ranks that give up.
            line.mark(self._idle)
            with clock.waiting():
                self.group.wait_for([self._idle], "transfer")
        with line.timed(clock, "pack", self._packed[index]):
            replay.pack(index, refit)

    def _send_round(self, replay: Replay, index: int, clock: StageClock) -> None:
        line = self._wires[self._lanes[index]]
        line.enter()
        if replay.packs[index]:
            line.after(self._packed[index])
        before = replay.incoming.before[index]
        if before >= 0:
            line.after(self._landed[before])
            for reader in self._cargo.readers[before]:
                line.after(self._sent[reader])
        for arrived in replay.relayed_rounds[index]:
            line.after(self._sent[arrived])
        exchange = replay.exchanges[index]
        with line.timed(clock, "transfer", self._sent[index], exchange.finish):
            exchange.start("transfer")

    def _unpack_until(self, replay: Replay, refit: int, begin: int, end: int, clock: StageClock) -> int:
        """Unpack rounds from ``begin`` to before ``end``; returns where to go on."""
        for index in range(begin, end):
            if replay.unpacks[index]:
                self._unpack_round(replay, index, refit, clock)
        return max(begin, end)

    def _unpack_round(self, replay: Replay, index: int, refit: int, clock: StageClock) -> None:
        line = self._unpack
        line.enter()
        line.after(self._sent[index])
        with line.timed(clock, "unpack", self._landed[index]):
            replay.unpack(index, refit)

    def _compare(self, replay: Replay, clock: StageClock) -> None:
        """After all rounds: the checksums of what went without staging, and the comparison of all."""
        wire = self._wires[0]
        wire.enter()
        # The sums of what goes without staging are made on this line.
        wire.after_line(self._pack)
        tell = replay.ledger.tell
        with wire.timed(clock, "transfer", self._told, tell.finish):
            tell.start("verify")
        line = self._unpack
        line.enter()
        line.after(self._told)
        with line.timed(clock, "verify", self._compared):
            replay.ledger.compare()
