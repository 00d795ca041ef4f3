"""What transports share whose ranks map each other's GPU memory: mailboxes, waits with a limit, and what they let go of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ...endings import end_all
from ...errors import PeerLost, PlanError, RefitMismatch, RefitTimeout, TransportUnavailable
from ...gpu_memory.description import Description, Inbox
from ...gpu_memory.driver import DriverError, missing
from ...gpu_memory.mapping import ImportedMemory
from ...gpu_memory.memory import ExportedMemory, device_uuid, process_name
from ...layout import Fragment, volume
from ...packing import CopyTable, Strided
from ...plan import Plan
from ...records.record import StageClock
from ..base import Transport, damaged
from ..host_memory import DeviceMemory, HostMemory
from ..views import LiveViews, Place
from .bound import by_peer
from .lease import Lease
from .mailbox import Mailbox, proven
from .proofs import Bound, Proofs

logger = logging.getLogger(__name__)

# Seconds between looks at the device or the mailbox, and between looks at the other ranks meanwhile.
_PAUSE = 2e-5
_WATCH_EVERY = 0.5
# Seconds that a failed epoch waits for its own copies before it unmaps the peers' memory.
_DRAIN_WITHIN = 5.0
# What kernels may still use that did not end within that time; nobody can tell when it is free.
_left_running: list[object] = []


class OneSided(Transport):
    """Copies between live parameters of two processes by one of them, which has the other's mapped.

    No byte is staged, and no tensor of a GPU is kept: a trainer that offloads its parameters has their memory back at
    once. Before each refit the caller lets all ranks :meth:`settle`, and then meet. As long as an epoch is open the
    driver keeps the memory that peers have mapped, even if its owner frees it; the next ``bind`` lets go of it. Memory
    that is lent, because its owner gives it back between refits, is let go of at the end of each, and bound anew for
    the next one: if it comes back at the same addresses, as engines' sleep modes bring it, peers map it where they had
    it, and all that was worked out from addresses stays (:meth:`_follows`).
    """

    def __init__(
        self,
        rank: int,
        plan: Plan,
        verify: str,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        describe_rank: Callable[[int], str],
        *,
        turn: int = 0,
        lends: bool = False,
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
            turn: at which message sampled checks begin, the same on all ranks.
            lends: whether the memory that peers write into is this rank's to give back between refits.

        Raises:
            PlanError: the plan has relays.
        """
        super().__init__(rank, verify, turn)
        indexed = device.type != "cuda" or device.index is not None
        self._device = device if indexed else torch.device("cuda", torch.cuda.current_device())
        self._stream: torch.cuda.Stream | None = None
        self._timeout = timeout_s
        self._lease = Lease(timeout_s)
        self._watch = watch
        self._who = describe_rank
        self._sends = by_peer(plan.sends, lambda message: message.destination)
        self._receives = by_peer(plan.receives, lambda message: message.source)
        if any(m.is_relay for rounds in (plan.sends, plan.receives) for messages in rounds for m in messages):
            raise PlanError(
                f"{self.name} takes no relays, since every sender reaches every receiver; make the plan without fan-out",
                stage="bind",
                rank=rank,
            )
        self._payload = sum(
            m.payload_bytes for side in (self._sends, self._receives) for ms in side.values() for m in ms
        )
        self._host: HostMemory | None = None
        self._exported: ExportedMemory | None = None
        # By the peer.
        self._imported: dict[int, ImportedMemory] = {}
        self._lends = lends
        # Whether some memory of the binding is lent, and whether it has been let go of since.
        self._on_loan = self._returned = False
        # Of the last binding that came up: what lay where on this rank, and what the peers told.
        self._places: tuple[Place, ...] | None = None
        self._told: dict[int, Description] = {}
        # Of the binding that is coming up: this rank's views, where they lie, and whether they lay there before.
        self._views, self._stays = LiveViews([]), False
        self._placing: tuple[Place, ...] = ()
        # What kernels read that are enqueued.
        self._tables: tuple[object, ...] = ()
        self._mailbox: Mailbox | None = None
        self._sent_proofs = self._landed_proofs = _no_proofs()

    def moved(self) -> bool:
        with self._classifying():
            return (
                self._returned
                or self._exported_elsewhere()
                or (self._host is not None and self._host.moved())
                # A sum that is still to be prepared would find its weight gone in the middle of a refit.
                or self._sent_proofs.expired()
            )

    def settle(self) -> None:
        # What was enqueued before still uses the parameters that peers are about to overwrite, or would keep
        # this rank's copies waiting until after its peers have given it up.
        with self._classifying():
            self._catch_up("handshake")
        self._lease.renew()

    def close(self, *, failed: bool = False) -> None:
        self._release(failed=failed)

    @property
    def staging_bytes(self) -> int:
        mailbox = self._mailbox.memory.nbytes if self._mailbox is not None else 0
        return mailbox + self._sent_proofs.scratch_bytes

    def _begin_binding(self, fragments: Sequence[Fragment]) -> bool:
        """Look at the fragments; whether they lie where they lay, and what this rank lent as well. Otherwise let go of
        what was bound before."""
        reason = "the parameters are not on a GPU" if self._device.type != "cuda" else missing()
        if reason:
            raise TransportUnavailable(reason, stage="bind", rank=self.rank)
        # Before anything is looked up, so that what is given back meanwhile shows.
        self._memory = DeviceMemory(self._device, lambda: (place.range for place in self._places or ()))
        self._views = LiveViews(fragments, self._device)
        if self._receives:
            self._views.require_home()
        self._placing, before, self._places = self._views.places(), self._places, None
        self._stays = self._returned and self._placing == before and self._renew()
        if self._stays:
            self._returned = False
            return True
        self._release(failed=False)
        self._on_loan, self._returned = self._lends and bool(self._receives), False
        self._ended = torch.cuda.Event()
        # Of its own, so that what goes aside needs not wait for the copies.
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._host = HostMemory((fragment.view for fragment in fragments), self._device)
        return False

    def _exported_elsewhere(self) -> bool:
        """Whether other memory has come to lie where peers have this rank's mapped."""
        # Of what is lent, others than torch's allocator may have given the memory back.
        if self._exported is None:
            return False
        if self._memory is not None and not self._lends and self._memory.still_mapped():
            return False
        moved = self._exported.moved()
        if not moved:
            self.found_again()
        return moved

    def _renew(self) -> bool:
        if self._host is not None and self._host.moved():
            return False
        return self._exported is None or self._exported.renew()

    def _follows(self, peers: Mapping[int, Description]) -> bool:
        """Map again what peers lent, if they and this rank have everything where they had it; whether that was all to do."""
        if not self._stays or not all(self._told[rank].same_places(peer) for rank, peer in peers.items()):
            return False
        for rank, peer in peers.items():
            self._imported[rank].renew(peer)
        self._connected(peers)
        return True

    def _connected(self, peers: Mapping[int, Description]) -> None:
        self._places, self._told = self._placing, dict(peers)
        if self._memory is not None and self._refits == 0:
            # Its first answer looks at every block of torch's allocator, which no refit shall wait for.
            self._memory.still_mapped()
        # They would keep the memory of parameters that are offloaded meanwhile.
        self._views = LiveViews([])

    def _prove(self, pairs: Mapping[int, Sequence[Bound]]) -> Proofs:
        # The first binding compiles; the next ones come right before a refit.
        return Proofs(pairs, self.verify, self._device, ahead=self._refits == 0)

    def _open_mailbox(self, messages: Mapping[int, int]) -> Mailbox:
        """This rank's mailbox, with a bell for each peer and sums for each of its ``messages``; made once."""
        if self._mailbox is None:
            self._mailbox = Mailbox(messages, self._device)
            if any(messages.values()):
                self._differ = torch.zeros_like(self._mailbox.checksums, dtype=torch.bool)
                self._damage = torch.zeros(self._differ.shape, dtype=torch.bool).pin_memory()
        return self._mailbox

    def _export(self, views: Iterable[Strided], mailbox: Mailbox) -> ExportedMemory:
        """Look up the allocations of views and of the mailbox."""
        bells = [(mailbox.memory.data_ptr(), mailbox.memory.nbytes)]
        ranges = [(view.address, view.extent) for view in views]
        if self._lends:
            self._exported = ExportedMemory(bells, self._device, lent=ranges)
        else:
            self._exported = ExportedMemory([*ranges, *bells], self._device)
        return self._exported

    def _describe(self, exported: ExportedMemory, inboxes: Mapping[int, Inbox]) -> object:
        address, token = exported.serve(len(inboxes), self._timeout)
        return Description(
            process_name(),
            device_uuid(self._device),
            self._timeout,
            exported.allocations,
            address,
            token,
            inboxes,
        ).to_json()

    def _describe_nothing(self) -> object:
        """Of a rank whose memory nobody maps."""
        return Description(process_name(), device_uuid(self._device), self._timeout).to_json()

    def _import(self, rank: int, peer: Description) -> ImportedMemory:
        """Map a peer's memory, until it is let go of."""
        mapped = self._imported[rank] = ImportedMemory(peer, self._device, self._timeout)
        self._on_loan |= peer.lent
        return mapped

    @contextmanager
    def _reading(self, peer: int) -> Iterator[None]:
        """What a peer describes may not be what the plan needs."""
        try:
            yield
        except (ValueError, KeyError) as error:
            raise RefitMismatch(
                f"{self._who(peer)} describes other memory than the plan needs ({error}); nothing was written. "
                "Do all ranks run the same rlrefit?",
                stage="connect",
                rank=self.rank,
            ) from error

    def _mapped(
        self, bound: Sequence[Bound], peer: Description, inbox: Inbox, bases: Sequence[int]
    ) -> list[Strided]:
        """The peer's memory of each segment, as it is mapped here; raises ValueError if it isn't of the segments' sizes."""
        segments = [segment for message, _ in bound for segment in message.segments]
        found = []
        for segment, view in zip(segments, inbox.views, strict=True):
            if volume(segment.box) * view.itemsize != segment.nbytes:
                raise ValueError(f"items of {view.itemsize} bytes for {segment.name}")
            found.append(peer.target(view, [stop - start for start, stop in segment.box], bases))
        return found

    def _telling(self, places: Sequence[tuple[Sequence[Bound], int]]) -> CopyTable:
        """Copies of this sender's checksums to where each receiver, in ascending order, has them."""
        told: list[tuple[Strided, Strided]] = []
        rows = 0
        for bound, place in places:
            proofs = self._sent_proofs.sums[rows : rows + len(bound)]
            rows += len(bound)
            told.append((Strided.flat(proofs.data_ptr(), proofs.nbytes), Strided.flat(place, proofs.nbytes)))
        return CopyTable.build(told if self.verify != "off" else (), self._device)

    def _await_bells(self, mailbox: Mailbox, number: int, stage: str) -> None:
        late = mailbox.senders

        def all_rang() -> bool:
            nonlocal late
            missing_now = mailbox.missing(number)
            late = late if missing_now is None else missing_now
            return missing_now == []

        self._wait(all_rang, stage, lambda: ", ".join(map(self._who, late)))

    def _verify(self, mailbox: Mailbox, clock: StageClock) -> int:
        covered = self._landed_proofs.compute(self._number)
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

    def rest(self) -> None:
        """Let go of the memory that is lent, if there is some; nothing may be under way."""
        if not self._on_loan or self._returned:
            return
        held: list[ImportedMemory | ExportedMemory] = list(self._imported.values())
        if self._exported is not None:
            held.append(self._exported)
        if all(memory.can_rest for memory in held):
            for memory in held:
                memory.rest()
        else:
            self._release(failed=False)
            self._places = None
        self._returned = True

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
        exported, self._exported = self._exported, None
        self._host = None
        steps: list[Callable[[], object]] = [] if exported is None else [exported.close]
        end_all([*steps, partial(self._let_go, failed=failed)])

    def _let_go(self, *, failed: bool) -> None:
        if self._imported and failed and not self._drained():
            # Unmapping under a running kernel would break this process's context, and the trainer with it; and what
            # lies where its tables lay would be taken for addresses.
            logger.warning("copies of a failed refit are still under way; their peers' memory stays mapped")
            _left_running.append((self._imported, self._tables, self._sent_proofs))
            self._imported = {}
        # Before new ones are made beside them.
        self._tables = ()
        self._sent_proofs = self._landed_proofs = _no_proofs()
        self._unmap()

    def _unmap(self) -> None:
        """Let go of the peers' memory, which nothing on this GPU uses any more."""
        imported, self._imported = self._imported, {}
        end_all(one.close for one in imported.values())

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


def _no_proofs() -> Proofs:
    return Proofs({}, "off", torch.device("cpu"), ahead=False)
