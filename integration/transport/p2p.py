"""Shard to shard: each pair of ranks exchanges its packed messages, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from ..comm.group import Group
from ..layout import Fragment
from ..plan import Plan
from ..records.clock import StageClock
from .base import GroupTransport, TransferResult, damaged
from .bound_plan import BoundPlan
from .checksums import ChecksumRows
from .messages import LocalMessages
from .storage import DeviceMemory, HostMemory, LiveViews
from .streams import Event, Stream, drain, make_event, make_stream

# Rounds that are enqueued ahead of the wire: enough for it never to wait for the host, and few enough that
# CUDA's queues, where a launch would block without a limit of time, never fill up.
_AHEAD = 16
# The round before which all ranks call ``meanwhile``; the rounds before it keep the wire busy during the call.
_MEANWHILE_BEFORE = 8


class P2PTransport(GroupTransport):
    """Grouped sends and receives of packed messages over one process group (NCCL or gloo).

    Packing, sending and unpacking of different rounds overlap. On GPUs each has a stream of its own; on CPUs gloo's thread
    sends and receives. Each lane of the group has a few buckets for each direction, which take turns. A bare message is sent
    from the parameter itself, and received into it, where the parameter is contiguous there. A relay is sent from the bucket
    in which it arrived.
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
        self._messages = LocalMessages(plan)
        self._pace = plan.pace
        # A round's number decides its lane, since both ends know it; relays stay in their messages' lane.
        numbers = [
            next(iter(chain(*both))).round_index for both in zip(plan.sends, plan.receives, strict=True)
        ]
        self._lanes = [number // 2 % group.lanes for number in numbers]
        self._meanwhile_at = sum(number < _MEANWHILE_BEFORE for number in numbers)
        self._payload = sum(m.payload_bytes for messages in (*plan.sends, *plan.receives) for m in messages)
        group.connect(self._messages.peers)
        device = group.device
        # The rounds whose ends are the refit's: on a stream the last one's event comes after all others'.
        last = {lane: index for index, lane in enumerate(self._lanes)}
        self._last = sorted(last.values()) if device.type == "cuda" else range(len(numbers))
        self._pack, self._unpack = make_stream(device), make_stream(device)
        self._wires = [make_stream(device) for _ in range(group.lanes)]
        self._packed: list[Event] = [make_event(device) for _ in numbers]
        self._sent: list[Event] = [make_event(device) for _ in numbers]
        self._landed: list[Event] = [make_event(device) for _ in numbers]
        self._exchanged, self._compared = make_event(device), make_event(device)
        self._idle = make_event(device)
        self._bound: BoundPlan | None = None
        self._host: HostMemory | None = None

    @property
    def staging_bytes(self) -> int:
        return self.group.staging_bytes + (self._bound.staging_bytes if self._bound is not None else 0)

    def bind(self, fragments: Sequence[Fragment]) -> None:
        device = self.group.device
        # Before anything is looked up, so that memory that is freed meanwhile shows.
        if device.type == "cuda":
            self._memory = DeviceMemory(device, lambda: (place.range for place in places))
        self._views = LiveViews(fragments, device)
        places = self._views.places()
        if self._memory is not None and self._refits == 0:
            # Its first answer looks at every block of torch's allocator, which no refit shall wait for.
            self._memory.still_mapped()
        if self._messages.incoming:
            self._views.require_on_device()
        self._host = HostMemory.of(fragments, device)

    def describe(self) -> object:
        return self._messages.describe()

    def connect(self, described: Sequence[object]) -> None:
        self._messages.learn_turns(described)
        buckets = self._bound.buckets if self._bound is not None else {}
        self._bound = BoundPlan(
            self._messages, self._views, self._pace, self.group, self._lanes, self.verify, buckets
        )
        self._views = LiveViews([])
        if self.group.device.type == "cuda":
            # The tables must have reached the device: a refit may run on another stream than this one.
            torch.cuda.current_stream(self.group.device).synchronize()

    def unbind(self, *, failed: bool = False) -> None:
        """Forget the storage and free the buckets; bind and connect again before the next run. ``failed``: the run broke off."""
        self._free(failed)
        self._views, self._memory = LiveViews([]), None

    def moved(self) -> bool:
        return self._host is not None and self._host.moved()

    def close(self, *, failed: bool = False) -> None:
        try:
            super().close(failed=failed)
        finally:
            # Only now: until the communicators have been given up, a failed refit may still write the buckets. The
            # exchanges go with them, since a communicator that outlived this would end at the interpreter's exit.
            self._free(failed)

    @property
    def _streams(self) -> list[Stream]:
        """All that a run enqueues on."""
        return [self._pack, self._unpack, *self._wires]

    @property
    def _memory_used(self) -> list[object]:
        """All that the kernels of a run use, but for the exchanges; empty if nothing is bound."""
        return self._bound.memory if self._bound is not None else []

    def _free(self, failed: bool) -> None:
        """Free the buckets, once nothing that a failed run has enqueued uses them any more."""
        if failed and (used := self._memory_used):
            drain(self._streams, self.group.device, used)
        self._bound = self._host = None

    def run(self, clock: StageClock, meanwhile: Callable[[], None] | None = None) -> TransferResult:
        assert self._bound is not None, "connect comes before run"
        # Counted even if it fails: all ranks have to agree on the number.
        refit, self._refits = self._number, self._refits + 1
        try:
            return self._run(self._bound, refit, clock, meanwhile)
        except BaseException:
            self._bound.drop()
            raise

    def _run(
        self, bound: BoundPlan, refit: int, clock: StageClock, meanwhile: Callable[[], None] | None
    ) -> TransferResult:
        if self.group.device.type == "cuda":
            # Setting a stream sets its device as well; the caller's may be another one.
            with torch.cuda.device(self.group.device):
                caller = torch.cuda.current_stream()

                def on_callers_stream() -> None:
                    torch.cuda.set_stream(caller)
                    if meanwhile is not None:
                        meanwhile()

                try:
                    waited_for = self._enqueue(bound, refit, clock, on_callers_stream)
                finally:
                    torch.cuda.set_stream(caller)
        else:
            waited_for = self._enqueue(bound, refit, clock, meanwhile)
        void = self._check_moved()
        with clock.waiting():
            self.group.wait_for(waited_for, "transfer")
        for one in bound.checksums.damaged():
            raise damaged(one.message, self.rank)
        return TransferResult(self._payload, bound.verified_bytes(refit), void)

    def _enqueue(
        self, bound: BoundPlan, refit: int, clock: StageClock, meanwhile: Callable[[], None] | None
    ) -> list[Event]:
        """Enqueue the whole refit, at most ``_AHEAD`` rounds ahead of the wire; returns the events that end it."""
        for stream in (self._pack, self._unpack, *self._wires):
            stream.wait_caller()
        self._pack.enter()
        bound.checksums.begin_sent(refit)
        self._unpack.enter()
        bound.checksums.begin_landed(refit)
        # Unpacking follows as many rounds behind as there are lanes: if all streams share one hardware queue
        # (CUDA_DEVICE_MAX_CONNECTIONS=1), it must not hold up the next lane's wire. On CPUs it is this thread that
        # waits for what is unpacked, and further rounds are to be under way meanwhile.
        behind = self.group.lanes - 1 + self._pace.ahead
        count = len(self._lanes)
        unpacked = 0
        # One turn of the loop: enqueue the wire of round ``index``, pack the next round, and unpack the round that has been on
        # the wire for ``behind`` rounds. The first turn only packs; the last ones only unpack.
        for index in range(-1, count + behind):
            if 0 <= index < count:
                if index == self._meanwhile_at and meanwhile is not None:
                    # In the same place of every rank's order, or with one hardware queue two ranks could wait for
                    # each other: for a round that is behind this on one, and for this behind the round on the other.
                    meanwhile()
                # The round that used this one's bucket before has to be unpacked first: rounds of a lane can follow each
                # other more closely than the lanes are many.
                unpacked = self._unpack_until(
                    bound, refit, unpacked, bound.rounds[index].receive_after + 1, clock
                )
                if index >= _AHEAD and not self._sent[index - _AHEAD].query():
                    with clock.waiting():
                        self.group.wait_for([self._sent[index - _AHEAD]], "transfer")
                self._send_round(bound, index, clock)
            if index + 1 < count and bound.rounds[index + 1].packs:
                self._pack_round(bound, index + 1, refit, clock)
            unpacked = self._unpack_until(bound, refit, unpacked, index - behind + 1, clock)
        if self._meanwhile_at == count and meanwhile is not None:
            meanwhile()
        self._compare(bound.checksums, self._exchanged, self._compared, clock)
        return [*(self._sent[index] for index in self._last), self._exchanged, self._compared]

    def _pack_round(self, bound: BoundPlan, index: int, refit: int, clock: StageClock) -> None:
        stream, one = self._pack, bound.rounds[index]
        stream.enter()
        if one.pack_after >= 0:
            stream.wait_event(self._sent[one.pack_after])
        if one.pack_blocks:
            # The host copies memory that the GPU can't read. CUDA would block it until the stream is done, without a time
            # limit, and it would not see that other ranks give up. So it waits for the stream here.
            stream.record(self._idle)
            with clock.waiting():
                self.group.wait_for([self._idle], "transfer")
        with stream.timed(clock, "pack", self._packed[index]):
            bound.pack(index, refit)

    def _send_round(self, bound: BoundPlan, index: int, clock: StageClock) -> None:
        stream, one = self._wires[self._lanes[index]], bound.rounds[index]
        stream.enter()
        if one.packs:
            stream.wait_event(self._packed[index])
        if one.receive_after >= 0:
            # The bucket is free once it was unpacked, and once whoever passes on what lay there has sent it.
            stream.wait_event(self._landed[one.receive_after])
            for reader in bound.rounds[one.receive_after].readers:
                stream.wait_event(self._sent[reader])
        for arrived in one.relayed_from:
            stream.wait_event(self._sent[arrived])
        with stream.timed(clock, "transfer", self._sent[index], one.exchange.finish):
            one.exchange.start("transfer")

    def _unpack_until(self, bound: BoundPlan, refit: int, begin: int, end: int, clock: StageClock) -> int:
        """Unpack rounds from ``begin`` to before ``end``; returns where to go on."""
        for index in range(begin, end):
            if bound.rounds[index].unpacks:
                self._unpack_round(bound, index, refit, clock)
        return max(begin, end)

    def _unpack_round(self, bound: BoundPlan, index: int, refit: int, clock: StageClock) -> None:
        stream = self._unpack
        stream.enter()
        stream.wait_event(self._sent[index])
        with stream.timed(clock, "unpack", self._landed[index]):
            bound.unpack(index, refit)

    def _compare(self, rows: ChecksumRows, exchanged: Event, compared: Event, clock: StageClock) -> None:
        """After all messages: exchange the checksums that travel by themselves, and compare all."""
        wire = self._wires[0]
        wire.enter()
        # The sums of what goes without staging are made on this stream.
        wire.wait_stream(self._pack)
        with wire.timed(clock, "transfer", exchanged, rows.exchange.finish):
            rows.exchange.start("verify")
        stream = self._unpack
        stream.enter()
        stream.wait_event(exchanged)
        with stream.timed(clock, "verify", compared):
            rows.compare()
