"""The transport: one table of copies from live parameters to the peers' live parameters, a bell at its end."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ...errors import PeerLost, PlanError, RefitMismatch, RefitTimeout, TransportUnavailable
from ...layout import Fragment, volume
from ...packing import CopyTable, EncodedView, Encoder, NotComputable, Strided, make_encoders
from ...packing.host import kernels_read
from ...plan import Message, Plan, Segment
from ...records import StageClock
from ..base import TransferResult, Transport, damaged
from ..host_memory import HostMemory
from ..views import LiveViews, in_memory
from .description import Description, Inbox, View, extent
from .driver import DriverError, missing
from .lease import Lease
from .mailbox import BELL_BYTES, CHECKSUM_BYTES, Mailbox, landed, proven, ring
from .memory import ExportedMemory, ImportedMemory, device_uuid, process_name
from .order import Write, interleave, pieces
from .proofs import Bound, Proofs

logger = logging.getLogger(__name__)

# Seconds between looks at the device or the mailbox, and between looks at the other ranks meanwhile.
_PAUSE = 2e-5
_WATCH_EVERY = 0.5
# Seconds that a failed epoch waits for its own writes before it unmaps the peers' memory.
_DRAIN_WITHIN = 5.0


class IpcTransport(Transport):
    """Senders write strided segments into the receivers' parameters, which are mapped into their address space.

    No byte is staged. A receiver takes no part in the copies: it watches its mailbox, where each sender rings
    when all that it had for this receiver has landed, and again when its checksums have. Before each refit the
    caller lets all ranks :meth:`settle`, and then meet.

    No tensor of a GPU is kept: a trainer that offloads its parameters has their memory back at once. A sender's
    parameters may be in host memory that the GPU can read. As long as an epoch is open the driver keeps the
    receivers' memory, even if an engine frees it; the next ``bind`` lets go of it.
    """

    name = "ipc"

    def __init__(
        self,
        rank: int,
        plan: Plan,
        verify: str,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        describe_rank: Callable[[int], str],
    ):
        """Take the plan; nothing is opened yet.

        Args:
            rank: of the refit world.
            plan: this rank's, without relays; its rounds don't matter here.
            verify: ``off``, ``sampled`` or ``full``, the same on all ranks.
            device: of the parameters.
            timeout_s: limit of any wait, in seconds.
            watch: called with the stage now and then during a wait; raises if another rank has given up.
            describe_rank: what a user calls a rank.

        Raises:
            PlanError: the plan has relays.
        """
        super().__init__(rank, verify)
        indexed = device.type != "cuda" or device.index is not None
        self._device = device if indexed else torch.device("cuda", torch.cuda.current_device())
        self._stream: torch.cuda.Stream | None = None
        self._timeout = timeout_s
        self._lease = Lease(timeout_s)
        self._watch = watch
        self._who = describe_rank
        self._sends = _by_peer(plan.sends, lambda message: message.destination)
        self._receives = _by_peer(plan.receives, lambda message: message.source)
        if any(m.is_relay for rounds in (plan.sends, plan.receives) for messages in rounds for m in messages):
            raise PlanError(
                "ipc takes no relays, since every sender reaches every receiver; make the plan without fan-out",
                stage="bind",
                rank=rank,
            )
        self._payload = sum(
            m.payload_bytes for side in (self._sends, self._receives) for ms in side.values() for m in ms
        )
        self._host: HostMemory | None = None
        self._exported: ExportedMemory | None = None
        self._imported: list[ImportedMemory] = []
        self._mailbox: Mailbox | None = None
        self._encoders: list[Encoder] = []
        self._sent_proofs = self._landed_proofs = Proofs({}, "off", torch.device("cpu"))

    def bind(self, fragments: Sequence[Fragment]) -> None:
        reason = "the parameters are not on a GPU" if self._device.type != "cuda" else missing()
        if reason:
            raise TransportUnavailable(reason, stage="bind", rank=self.rank)
        views = LiveViews(fragments, self._device)
        if self._receives:
            views.require_home()
        self._release(failed=False)
        self._ended = torch.cuda.Event()
        # Of its own, so that what goes aside needs not wait for the writes.
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._host = HostMemory((fragment.view for fragment in fragments), self._device)
        self._require_reach(fragments)
        # From here on plain addresses: views would keep the memory of parameters that are offloaded meanwhile.
        self._bound_sends = _bound(self._sends, views)
        self._bound_receives = {
            sender: [(m, [Strided.of(in_memory(views.of(s))) for s in m.segments]) for m in messages]
            for sender, messages in self._receives.items()
        }
        if self._receives:
            if self._mailbox is None:
                counts = {sender: len(messages) for sender, messages in self._receives.items()}
                self._mailbox = Mailbox(counts, self._device)
                self._differ = torch.zeros_like(self._mailbox.checksums, dtype=torch.bool)
                self._damage = torch.zeros(self._differ.shape, dtype=torch.bool).pin_memory()
            live = [view for bound in self._bound_receives.values() for _, views in bound for view in views]
            memory = self._mailbox.memory
            ranges = [(view.address, extent(view)) for view in live]
            self._exported = ExportedMemory([*ranges, (memory.data_ptr(), memory.nbytes)], self._device)
        with self._reachable():
            self._sent_proofs = Proofs(self._bound_sends, self.verify, self._device)
        self._landed_proofs = Proofs(self._bound_receives, self.verify, self._device)

    def describe(self) -> object:
        description = Description(process_name(), device_uuid(self._device), self._timeout)
        if self._exported is not None and self._mailbox is not None:
            address, token = self._exported.serve(len(self._receives), self._timeout)
            description = Description(
                process_name(),
                device_uuid(self._device),
                self._timeout,
                self._exported.allocations,
                address,
                token,
                {sender: self._inbox(sender, self._exported, self._mailbox) for sender in self._receives},
            )
        return description.to_json()

    def connect(self, described: Sequence[object]) -> None:
        writes: dict[int, list[Write]] = {}
        told: list[tuple[Strided, Strided]] = []
        bells: list[int] = []
        rows = 0
        limit = self._timeout
        for receiver, bound in sorted(self._bound_sends.items()):
            peer = Description.from_json(described[receiver], receiver)
            mapped = ImportedMemory(peer, self._device, self._timeout)
            self._imported.append(mapped)
            limit = min(limit, peer.timeout_s)
            try:
                inbox = peer.inboxes[self.rank]
                targets = self._targets(bound, peer, inbox, mapped.bases)
                checksums = peer.region(inbox.checksums, CHECKSUM_BYTES * len(bound), mapped.bases)
                bells.append(peer.region(inbox.bell, BELL_BYTES, mapped.bases))
            except (ValueError, KeyError) as error:
                raise RefitMismatch(
                    f"{self._who(receiver)} describes other memory than the plan needs ({error}); nothing was written. "
                    "Do all ranks run the same rlrefit?",
                    stage="connect",
                    rank=self.rank,
                ) from error
            sources = [view for _, views in bound for view in views]
            cut = (pieces(Write(*ends)) for ends in zip(sources, targets, strict=True))
            writes[receiver] = [piece for parts in cut for piece in parts]
            proofs = self._sent_proofs.sums[rows : rows + len(bound)]
            rows += len(bound)
            told.append(
                (Strided.flat(proofs.data_ptr(), proofs.nbytes), Strided.flat(checksums, proofs.nbytes))
            )
        self._bells = bells
        # Peers meet again after this, and only then begin to wait.
        self._lease = Lease(limit)
        self._lease.renew()
        ordered = interleave(writes, self.rank)
        self._copies = CopyTable.build(
            [(source, target) for source, target in ordered if isinstance(source, Strided)], self._device
        )
        with self._reachable():
            self._encoders = make_encoders(
                [(source, target) for source, target in ordered if isinstance(source, EncodedView)],
                self._device,
            )
        # They would keep the memory of parameters that are offloaded meanwhile.
        self._bound_sends = {}
        self._tell = CopyTable.build(told if self.verify != "off" else (), self._device)

    def moved(self) -> bool:
        with self._classifying():
            return (self._exported is not None and self._exported.moved()) or (
                self._host is not None and self._host.moved()
            )

    def settle(self) -> None:
        # What was enqueued before still uses the parameters that peers are about to overwrite, or would keep
        # this rank's writes waiting until after its peers have given it up.
        with self._classifying():
            self._catch_up("handshake")
        self._lease.renew()

    def run(self, clock: StageClock, aside: Callable[[], None] | None = None) -> TransferResult:
        self._refits += 1
        with torch.cuda.device(self._device):
            if self._sends:
                with self._classifying():
                    with clock.waiting():
                        # The endpoint may have enqueued more since (Megatron's gather); the writes would start
                        # after it, however long it takes, and the lease says until when they may.
                        self._catch_up("transfer")
                    self._lease.use(self.rank)
                    self._write(clock)
            if aside is not None:
                aside()
            with self._classifying():
                verified = self._await_landing(clock)
        return TransferResult(self._payload, verified)

    def close(self, *, failed: bool = False) -> None:
        self._release(failed=failed)

    @property
    def staging_bytes(self) -> int:
        mailbox = self._mailbox.memory.nbytes if self._mailbox is not None else 0
        return mailbox + self._sent_proofs.scratch_bytes

    def _await_landing(self, clock: StageClock) -> int:
        """Wait until what this rank sends and receives has landed; returns the bytes that were verified."""
        if self._sends:
            with clock.waiting():
                self._wait(self._ended.query, "transfer", lambda: "this rank's writes to its peers")
        if self._mailbox is None:
            return 0
        with clock.stage("transfer"), clock.waiting():
            self._await_bells(self._mailbox, landed(self._refits), "transfer")
        if self.verify == "off":
            return 0
        with clock.stage("verify"):
            return self._verify(self._mailbox, clock)

    def _write(self, clock: StageClock) -> None:
        """Enqueue the whole refit of a sender."""
        stream = self._stream
        assert stream is not None, "bind comes before run"
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                with clock.stage("transfer"):
                    self._copies.launch()
                    for encoder in self._encoders:
                        encoder.launch()
                    for bell in self._bells:
                        ring(bell, landed(self._refits), stream)
                if self.verify != "off":
                    # After the copies: the receivers compute theirs at the same time.
                    with clock.stage("verify"):
                        self._sent_proofs.compute(self._refits)
                        self._tell.launch()
                        for bell in self._bells:
                            ring(bell, proven(self._refits), stream)
        finally:
            # Whatever broke off in between: the peers' memory stays mapped until what was enqueued has ended.
            self._ended.record(stream)

    def _await_bells(self, mailbox: Mailbox, number: int, stage: str) -> None:
        late = sorted(self._receives)

        def all_rang() -> bool:
            nonlocal late
            missing_now = mailbox.missing(number)
            late = late if missing_now is None else missing_now
            return missing_now == []

        self._wait(all_rang, stage, lambda: ", ".join(map(self._who, late)))

    def _verify(self, mailbox: Mailbox, clock: StageClock) -> int:
        covered = self._landed_proofs.compute(self._refits)
        with clock.waiting():
            self._await_bells(mailbox, proven(self._refits), "verify")
        torch.ne(self._landed_proofs.sums, mailbox.checksums, out=self._differ)
        self._damage.copy_(self._differ, non_blocking=True)
        self._ended.record(torch.cuda.current_stream(self._device))
        with clock.waiting():
            self._wait(self._ended.query, "verify", lambda: "this rank's checksums")
        for message, differs in zip(self._landed_proofs.messages, self._damage.any(1).tolist(), strict=True):
            if differs:
                raise damaged(message, self.rank)
        return covered

    def _require_reach(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            on_device = fragment.view.device == self._device
            if not on_device and (fragment.view.is_cuda or not kernels_read(fragment.view)):
                raise TransportUnavailable(
                    f"{fragment.name} lies on {fragment.view.device}, where {self._device} can't read it; offload to "
                    "pinned memory",
                    stage="bind",
                    rank=self.rank,
                )

    def _inbox(self, sender: int, exported: ExportedMemory, mailbox: Mailbox) -> Inbox:
        views = [view for _, live in self._bound_receives[sender] for view in live]
        return Inbox(
            tuple(View(exported.place(view.address), view.strides, view.itemsize) for view in views),
            exported.place(mailbox.checksum_address(sender)),
            exported.place(mailbox.bell_address(sender)),
        )

    def _targets(
        self, bound: Sequence[Bound], peer: Description, inbox: Inbox, bases: Sequence[int]
    ) -> list[Strided]:
        segments = [segment for message, _ in bound for segment in message.segments]
        found = []
        for segment, view in zip(segments, inbox.views, strict=True):
            if volume(segment.box) * view.itemsize != segment.nbytes:
                raise ValueError(f"items of {view.itemsize} bytes for {segment.name}")
            found.append(peer.target(view, [stop - start for start, stop in segment.box], bases))
        return found

    def _catch_up(self, stage: str) -> None:
        """Wait until this rank's GPU has done what was enqueued on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._wait(event.query, stage, lambda: "this rank's earlier work on its GPU")

    def _wait(self, done: Callable[[], bool], stage: str, late: Callable[[], str]) -> None:
        """Poll until ``done``; ``late`` says who or what is waited for."""
        start = time.monotonic()
        next_watch = start + _WATCH_EVERY
        while not done():
            now = time.monotonic()
            if now >= next_watch:
                self._watch(stage)
                next_watch = now + _WATCH_EVERY
            if now - start > self._timeout:
                raise RefitTimeout(
                    f"{late()} did not finish within {self._timeout:.0f} s; dead, stuck, or late. Raise "
                    "policy.refit.timeout_s if it is only slow",
                    stage=stage,
                    rank=self.rank,
                )
            time.sleep(_PAUSE)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except NotComputable as error:
            raise TransportUnavailable(str(error), stage="bind", rank=self.rank) from error

    @contextmanager
    def _classifying(self) -> Iterator[None]:
        try:
            yield
        except (torch.AcceleratorError, DriverError) as error:
            raise PeerLost(
                f"the GPU failed while it wrote to its peers' memory or read what they wrote: {error}. A peer may have "
                "freed its parameters during the refit. This process's CUDA context can't be used any more; restart it",
                stage="transfer",
                rank=self.rank,
            ) from error

    def _release(self, *, failed: bool) -> None:
        """Unmap the peers' memory, stop serving handles, and let go of host memory."""
        if self._exported is not None:
            self._exported.close()
            self._exported = None
        self._host = None
        # Before new ones are made beside them.
        self._encoders = []
        self._sent_proofs = self._landed_proofs = Proofs({}, "off", torch.device("cpu"))
        if self._imported and failed and not self._drained():
            # Unmapping under a running kernel would break this process's context, and the trainer with it.
            logger.warning("writes of a failed refit are still under way; their peers' memory stays mapped")
            self._imported = []
        while self._imported:
            self._imported.pop().close()

    def _drained(self) -> bool:
        deadline = time.monotonic() + _DRAIN_WITHIN
        try:
            while not self._ended.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_PAUSE)
        except torch.AcceleratorError as error:
            logger.warning("the GPU is lost: %s", error)
            return False
        return True


def _by_peer(
    rounds: Sequence[Sequence[Message]], peer: Callable[[Message], int]
) -> dict[int, tuple[Message, ...]]:
    """Each peer's messages in the order of rounds, peers ascending."""
    found: dict[int, list[Message]] = defaultdict(list)
    for messages in rounds:
        for message in messages:
            found[peer(message)].append(message)
    return {key: tuple(found[key]) for key in sorted(found)}


def _bound(peers: Mapping[int, Sequence[Message]], views: LiveViews) -> dict[int, list[Bound]]:
    def held(segment: Segment) -> Strided | EncodedView:
        found = views.of(segment)
        return Strided.of(found) if isinstance(found, torch.Tensor) else found

    return {peer: [(m, [held(s) for s in m.segments]) for m in messages] for peer, messages in peers.items()}
