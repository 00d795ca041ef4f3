"""Whole tensors by NVIDIA's ``nccl.m2n``, and by ``p2p`` what that can't express, in the same refit."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from math import prod

import torch

from ...comm.group import Group
from ...comm.waiting import PAUSE_S, gpu_ends_within, leave_running, note_stuck_gpu
from ...errors import end_all
from ...layout import Fragment
from ...plan import aligned
from ...records.clock import StageClock
from ..base import TransferResult, damaged
from ..checksums import add_due
from ..messages import LocalMessages
from ..p2p import P2PTransport
from ..streams import Event, Stream, make_event, make_stream, working_on
from .bound import BoundBatch, BoundReshards, Describer
from .carried import ReshardPlan
from .library import Communicators, lose
from .meshes import MeshTransfer, smallest_shapes

# Batches that are enqueued ahead of the GPU for each lane.
_AHEAD = 2
# Seconds that reshards have to end after their refit has failed.
_RESHARDS_END_WITHIN = 5.0


class M2nTransport(P2PTransport):
    """Reshards of whole tensors and of stacked experts, batch by batch, and then the rounds of ``p2p`` with the rest.

    Batches take turns over the lanes, each with a communicator and a stream of its own: what one copies into or out of its
    bucket overlaps with another one's reshards. No ``p2p`` round is enqueued before all reshards have ended, since a
    communicator whose kernels queue behind a reshard that does not end could not be given up.
    """

    name = "m2n"

    def __init__(
        self,
        group: Group,
        communicators: Communicators,
        rank: int,
        plan: ReshardPlan,
        verify: str,
        turn: int = 0,
    ):
        """Connect; all ranks at the same time.

        Args:
            group: of all ranks, for ``p2p`` and checksums.
            communicators: of all ranks, one for each lane.
            rank: of the refit world, of the group and of the communicators.
            plan: this rank's.
            verify: ``off``, ``sampled`` or ``full``.
            turn: at which message sampled checks begin, the same on all ranks.

        Raises:
            RefitTimeout, PeerLost: a peer did not connect.
            RefitError: the library refuses.
        """
        super().__init__(group, rank, plan.of_rest(), verify, turn)
        self._communicators = communicators
        self._carried = plan.carried
        self._of_carried = LocalMessages(plan.of_carried())
        self._describe = Describer(communicators.m2n)
        self._fragments: dict[str, list[Fragment]] = {}
        self._reshards: BoundReshards | None = None
        # Bytes are counted as the plan shares them out; which replica the library takes them from is its own matter.
        sides = (*self._of_carried.sends, *self._of_carried.receives)
        self._resharded = sum(one.message.payload_bytes for one in chain(*sides))
        group.connect(self._of_carried.peers)
        self._gate = torch.zeros(1, dtype=torch.int32, device=group.device)
        group.connect_maximum(self._gate)
        device = group.device
        self._lane_streams = [make_stream(device) for _ in range(communicators.lanes)]
        batches = self._carried.batches
        self._gathered: list[Event] = [make_event(device) for _ in batches]
        self._summed: list[Event] = [make_event(device) for _ in batches]
        self._arrived: list[Event] = [make_event(device) for _ in batches]
        self._landed_batches: list[Event] = [make_event(device) for _ in batches]
        self._read_back: list[Event] = [make_event(device) for _ in batches]
        self._sums_exchanged, self._sums_compared = make_event(device), make_event(device)
        communicators.in_time(self._warm_up, "connect")

    @property
    def remark(self) -> str:
        return self._carried.remark

    @property
    def staging_bytes(self) -> int:
        own = self._reshards.staging_bytes if self._reshards is not None else 0
        return super().staging_bytes + own + self._communicators.pack_bytes

    def bind(self, fragments: Sequence[Fragment]) -> None:
        super().bind(fragments)
        if self._of_carried.incoming:
            self._views.require_on_device()
        self._fragments = defaultdict(list)
        for fragment in fragments:
            if fragment.name in self._carried.names:
                self._fragments[fragment.name].append(fragment)

    def connect(self, described: Sequence[object]) -> None:
        fragments, self._fragments, self._reshards = self._fragments, {}, None
        self._reshards = BoundReshards(
            self._carried.batches,
            self._of_carried,
            fragments,
            self.group,
            self.verify,
            self._describe,
            self._communicators.lanes,
        )
        super().connect(described)

    def close(self, *, failed: bool = False) -> None:
        end_all([partial(super().close, failed=failed), partial(self._communicators.close, failed=failed)])

    @property
    def _streams(self) -> list[Stream]:
        return [*super()._streams, *self._lane_streams]

    @property
    def _memory_used(self) -> list[object]:
        return [*super()._memory_used, *(self._reshards.memory if self._reshards is not None else [])]

    def _free(self, failed: bool) -> None:
        super()._free(failed)
        self._reshards = None

    def _lose_wedged(self) -> None:
        """After a failure: wait for some seconds until all reshards have ended; the library is lost to this process if they don't."""
        if not gpu_ends_within(lambda: all(one.query() for one in self._arrived), _RESHARDS_END_WITHIN):
            note_stuck_gpu()
            leave_running("reshards of nccl.m2n", self._communicators, *self._memory_used)
            lose(
                "a reshard of nccl.m2n has not ended on this process's GPU, since a rank died or stopped in the middle of it"
            )

    def run(self, clock: StageClock, meanwhile: Callable[[], None] | None = None) -> TransferResult:
        assert self._reshards is not None, "connect comes before run"
        reshards, refit = self._reshards, self._number
        try:
            with working_on(self.group.device):
                void = self._reshard(reshards, refit, clock)
        except BaseException:
            # As a run of p2p, which this was to be as well.
            self._refits += 1
            # Now, before any communicator is given up: NCCL frees memory then, for which the driver waits until the whole GPU is idle.
            self._lose_wedged()
            raise
        result = super().run(clock, meanwhile)
        with clock.waiting():
            self.group.wait_for([self._sums_compared], "verify")
        for one in reshards.checksums.damaged():
            raise damaged(one.message, self.rank)
        return replace(
            result,
            payload_bytes=result.payload_bytes + self._resharded,
            verified_bytes=result.verified_bytes + reshards.checksums.verified_bytes(refit),
            void=result.void or void,
            resharded_bytes=self._resharded,
        )

    def _warm_up(self) -> None:
        """Reshard some bytes of scratch memory between each pair of meshes, over each lane: one tensor, and two together.

        The library makes what it needs for them in its first calls, in which all ranks wait for each other on the host.
        """
        alike: dict[tuple[object, ...], MeshTransfer] = {}
        for transfer in chain(*self._carried.batches):
            alike.setdefault(transfer.topology, transfer)
        for lane, transfer in product(range(self._communicators.lanes), alike.values()):
            shapes = smallest_shapes(transfer)
            nbytes = aligned(max(map(prod, shapes)) * transfer.tensor.dtype.itemsize)
            scratch = torch.zeros(2 * nbytes, dtype=torch.uint8, device=self.group.device)
            first = scratch.data_ptr()
            pairs = [
                self._describe.pair(
                    transfer,
                    address if self.rank in transfer.tensor.sources else 0,
                    address if self.rank in transfer.tensor.destinations else 0,
                    shapes,
                )
                for address in (first, first + nbytes)
            ]
            stream = torch.cuda.current_stream()
            self._communicators.reshard(lane, pairs[:1], stream.cuda_stream)
            self._communicators.reshard(lane, pairs, stream.cuda_stream)
            stream.synchronize()

    def _reshard(self, reshards: BoundReshards, refit: int, clock: StageClock) -> bool:
        """Run all batches, and enqueue the comparison of their checksums; returns whether weights have moved meanwhile."""
        group = self.group
        # A rank that is late or gone shows here, where it can be given up, and not in a reshard, where it can't.
        with clock.waiting():
            group.maximum(self._gate, "transfer")
        for stream in (self._pack, self._unpack, *self._lane_streams):
            stream.wait_caller()
        stop = threading.Event()
        self._communicators.in_time(partial(self._submit, reshards, refit, clock, stop), "transfer", stop)
        void = self._check_moved()
        # In the library's time, too: the group's own wait would give its communicators up while a reshard is still under way.
        with clock.waiting():
            self._communicators.in_time(partial(_wait_for, self._landed_batches, stop), "transfer", stop)
        caller = torch.cuda.current_stream()
        try:
            self._compare(reshards.checksums, self._sums_exchanged, self._sums_compared, clock)
        finally:
            torch.cuda.set_stream(caller)
        return void

    def _submit(self, reshards: BoundReshards, refit: int, clock: StageClock, stop: threading.Event) -> None:
        """Enqueue all batches, a few of them ahead of the GPU; in a thread of its own."""
        with clock.helping():
            self._pack.enter()
            reshards.checksums.begin_sent(refit)
            self._unpack.enter()
            reshards.checksums.begin_landed(refit)
            for index, batch in enumerate(reshards.batches):
                before = index - _AHEAD * len(self._lane_streams)
                if before >= 0:
                    with clock.waiting():
                        _wait_for([self._landed_batches[before]], stop)
                if stop.is_set():
                    return
                self._submit_batch(reshards, batch, index, refit, clock)

    def _submit_batch(
        self, reshards: BoundReshards, batch: BoundBatch, index: int, refit: int, clock: StageClock
    ) -> None:
        lane = index % len(self._lane_streams)
        stream = self._lane_streams[lane]
        stream.enter()
        if index >= len(self._lane_streams):
            # What the host copied is added up in the bucket.
            stream.wait_event(self._summed[index - len(self._lane_streams)])
        with stream.timed(clock, "pack", self._gathered[index]):
            batch.gathered.launch()
        with stream.timed(clock, "transfer", self._arrived[index]):
            self._communicators.reshard(lane, batch.pairs, torch.cuda.current_stream().cuda_stream)
        with stream.timed(clock, "unpack", self._landed_batches[index]):
            batch.scattered.launch()
        # The sums of a message come from batches of all lanes, so that one stream adds them up.
        for summing, after, event, checks, sums in (
            (self._pack, self._gathered, self._summed, batch.sent_checks, reshards.checksums.sent),
            (
                self._unpack,
                self._landed_batches,
                self._read_back,
                batch.landed_checks,
                reshards.checksums.landed,
            ),
        ):
            summing.enter()
            summing.wait_event(after[index])
            with summing.timed(clock, "verify", event[index]):
                add_due(checks, refit, sums)


def _wait_for(events: Sequence[Event], stop: threading.Event) -> None:
    """Until all have happened, or ``stop`` is set."""
    while not stop.is_set() and not all(event.query() for event in events):
        time.sleep(PAUSE_S)
