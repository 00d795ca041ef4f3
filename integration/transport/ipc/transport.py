"""The ``ipc`` transport: one copy from the senders' parameters into the receivers' parameters of the same host.

Once per epoch each receiver describes the memory that its senders write to (:meth:`IpcTransport.describe`), and each sender
maps it and makes one table of copies (:meth:`IpcTransport.connect`). A refit launches that table, signals the receivers, and
lets both sides compare checksums (:meth:`IpcTransport.run`).

What each direction moves, as addresses, is told in :mod:`.moves`, what peers are told of this rank's memory in :mod:`.views`,
and how they tell each other that bytes are there in :mod:`.signals`.

A receiver whose memory no other process can map pulls: its senders describe theirs, it maps that, and its own table copies
from there. Which receivers do so is known once they have described their memory for the first time
(:meth:`IpcTransport.asks_again`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from ...comm.waiting import gpu_ends_within, leave_running
from ...errors import PlanError, RefitMismatch, TransportUnavailable, end_all
from ...gpu_memory.description import Description, Shared
from ...gpu_memory.driver import missing, on_device
from ...gpu_memory.mapping import ImportedMemory
from ...gpu_memory.memory import ExportedMemory, device_uuid, process_name
from ...layout import Fragment
from ...packing import Copy, CopyTable, Encoder, NotComputable, Strided, make_encoders, repeats
from ...packing.host import kernels_read
from ...plan import Message, Plan
from ...records.clock import StageClock
from ..base import TransferResult, Transport
from ..storage import DeviceMemory, HostMemory, LiveViews, Place
from .checksums import BoundMessage, MessageChecksums, no_checksums
from .copy_order import EncodedWrite, encoded_in_turns, rows_in_turns
from .landing import Landing
from .moves import Incoming, Move, Outgoing, PeerPlaces, by_kind, by_portion
from .portions import PORTIONS, last_portions
from .signals import (
    SignalBuffer,
    checksums_landed,
    data_landed,
    portion_landed,
    readable,
    signal,
    void,
)
from .views import OpenViews, bind_messages, by_peer
from .waits import Lease, Waits, gpu_errors

# Seconds that a failed epoch waits for its own copies before it unmaps the peers' memory.
_DRAIN_WITHIN = 5.0


class IpcTransport(Transport):
    """Senders write strided segments into the receivers' parameters, which are mapped into their address space; or receivers
    read them from the senders' parameters, which are mapped into theirs.

    A receiver that is written takes no part in the copies. It waits for two signals from each sender: all bytes have landed,
    and the checksums have landed; where it works on portions, for one of each portion (:mod:`.portions`). A sender's parameters may be
    in host memory that the GPU can read.

    A receiver that pulls waits for two signals, too: the weights may be read, and they lay there until then, with their
    checksums. It exports nothing, not even its signals. Senders hear from it when the ranks meet to commit, which it does once
    its copies are done: until :meth:`..session.RefitSession.refit` has returned a trainer has to leave its weights as they are.

    Nothing is staged, and no tensor of a GPU is kept: a trainer that offloads its parameters has their memory back at once.
    While an epoch is open the driver keeps the memory that peers have mapped, even if its owner frees it; the next ``bind``
    unmaps it. Memory that its owner gives back between refits (of engines that sleep, of trainers that leave a shared GPU) is
    unmapped at the end of each refit and mapped again for the next one. If it comes back at the same addresses, as sleep modes
    bring it back, peers map it where they had it, and the tables stay as they are (:meth:`_map_again`). What is opened by a handle
    (memory of ``cudaMalloc``) the driver maps where it chooses; the tables stay only if that is where it was.

    Attributes:
        remark: which receivers pull, and why; empty if none does.
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
        sleeps: bool | None = None,
        pulls: str = "",
        may_pull: bool = True,
        landed: Callable[[int], None] | None = None,
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
            sleeps: whether this rank frees its weights' memory between refits, as engines with a sleep mode do, and trainers
                that leave a shared GPU. None if that is not known: then a receiver does not, and a sender does if it shares
                its GPU with a receiver that pulls, from whomever.
            pulls: why a receiver does, whether its memory can be mapped or not; empty if it does only where it can't.
            may_pull: whether a receiver does there.
            landed: called by a receiver that is written, in each refit, with each portion once that has landed, in their order; None
                if it does nothing before all has.

        Raises:
            PlanError: the plan has relays.
        """
        super().__init__(rank, verify, turn)
        # Each receiver that pulls, of all ranks, as they have described themselves when that was last found out.
        self._pulling: dict[int, Description] = {}
        indexed = device.type != "cuda" or device.index is not None
        self._device = device if indexed else torch.device("cuda", torch.cuda.current_device())
        self._stream: torch.cuda.Stream | None = None
        self._timeout = timeout_s
        self._lease = Lease(timeout_s)
        self._who = describe_rank
        self._waits = Waits(rank, self._device, timeout_s, watch, describe_rank)
        self._sends = by_peer(plan.sends, lambda message: message.destination)
        self._receives = by_peer(plan.receives, lambda message: message.source)
        self._landing = Landing(
            rank, self._receives, verify, self._device, self._waits, in_portions=landed is not None
        )
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
        self._handles_opened = 0
        self._sleeps = sleeps
        self._pulls = pulls
        self._may_pull = may_pull
        self._landed = landed
        self._portions: dict[str, int] = {}
        # Whether this rank or a peer frees some memory of the binding between refits, whether this one does, and whether it was
        # released since.
        self._some_sleep = self._gives_back = self._released = False
        # Of the last binding that succeeded: where this rank's fragments lay, and what the peers described.
        self._places: tuple[Place, ...] | None = None
        self._peers: dict[int, Description] = {}
        # Of the binding under way: this rank's views, where they lie, and whether they lay there before.
        self._views, self._unmoved = LiveViews([]), False
        self._new_places: tuple[Place, ...] = ()
        # By portion; all in one where no peer works on portions.
        self._launches: list[list[Copy | Encoder]] = []
        # What kernels read that are enqueued.
        self._tables: tuple[object, ...] = ()
        self._signals: SignalBuffer | None = None
        self._open_views = OpenViews({})
        # Where signals go: those of a sender's peers, and its own that receivers read.
        self._signal_addresses: list[int] = []
        self._lent_addresses: list[int] = []
        self._sent_checksums = no_checksums()

    @property
    def staging_bytes(self) -> int:
        signals = self._signals.memory.nbytes if self._signals is not None else 0
        return signals + self._sent_checksums.scratch_bytes

    def bind(self, fragments: Sequence[Fragment]) -> None:
        reason = "the parameters are not on a GPU" if self._device.type != "cuda" else missing()
        if reason:
            raise TransportUnavailable(reason, stage="bind", rank=self.rank)
        # Before anything is looked up, so that what is freed meanwhile shows.
        self._memory = DeviceMemory(self._device, lambda: (place.range for place in self._places or ()))
        self._views = LiveViews(fragments, self._device)
        if self._receives:
            self._views.require_on_device()
        self._new_places, before, self._places = self._views.places(), self._places, None
        # After a sleep everything usually lies where it lay: then addresses, tables and mappings stay as they are.
        self._unmoved = self._released and self._new_places == before and self._export_again()
        if self._unmoved:
            self._released = False
            return
        self._unbind(failed=False)
        self._some_sleep, self._released = False, False
        self._ended = torch.cuda.Event()
        # A stream of its own, so that what runs meanwhile on the caller's need not wait for the copies.
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._host = HostMemory((fragment.view for fragment in fragments), self._device)
        self._require_readable(fragments)
        if self._receives:
            self._landing.bind(self._views, self._new_places, ahead=self._refits == 0)
            self._open_signals(self._receives)
            self._open_to_senders()
        elif self._lends:
            self._open_signals(self._lends)
            self._export(OpenViews.of(bind_messages(self._lends, self._views)))

    def describe(self) -> object:
        ours = Description(
            process_name(),
            device_uuid(self._device),
            self._timeout,
            pulls=self._pulls,
            works_on_portions=self._works_on_portions,
        )
        exported, signals, views = self._exported, self._signals, self._open_views
        if exported is None or signals is None:
            # Nobody maps this rank's memory.
            return ours.to_json()
        shared = {
            peer: Shared(
                views.described(peer, exported),
                exported.place(signals.checksum_address(peer)),
                exported.place(signals.signal_address(peer)),
            )
            for peer in views.by_peer
        }
        address, token = exported.serve(len(shared), self._timeout)
        return replace(
            ours,
            allocations=exported.allocations,
            address=address,
            token=token,
            shared=shared,
            encodings=views.encodings,
        ).to_json()

    def asks_again(self, described: Sequence[object]) -> bool:
        told = [Description.from_json(data, rank) for rank, data in enumerate(described)]
        before, self._pulling = self._pulling, {rank: one for rank, one in enumerate(told) if one.pulls}
        if before.keys() == self._pulling.keys():
            return False
        if not self._receives:
            # For other receivers than before.
            self._signals = None
        self._places = None
        return True

    @property
    def name(self) -> str:
        """``pull`` if some receiver does."""
        return "pull" if self._pulling else "ipc"

    @property
    def portions(self) -> Mapping[str, int]:
        if not self._works_on_portions:
            return {}
        self._portions = self._portions or last_portions(self._receives)
        return self._portions

    @property
    def remark(self) -> str:
        if not self._pulling:
            return ""
        rank, first = next(iter(self._pulling.items()))
        who = ", ".join(map(self._who, self._pulling))
        return f"{who} pull{'s' if len(self._pulling) == 1 else ''}: {self._who(rank)} says {first.pulls}"

    def connect(self, described: Sequence[object]) -> None:
        mapped = self._receives if self._pulls else self._pushes
        peers = {peer: Description.from_json(described[peer], peer) for peer in mapped}
        if not self._map_again(peers):
            self._unmap()
            self._map(peers)
            self._connected(peers)
        # Peers meet again after this, and only then begin to wait.
        self._lease = Lease(min((self._timeout, *(peer.timeout_s for peer in peers.values()))))
        self._lease.renew()

    def moved(self) -> bool:
        with gpu_errors(self.rank):
            return (
                self._released
                or self._exported_moved()
                or (self._host is not None and self._host.moved())
                # A checksum that is still to be prepared would find its weight gone in the middle of a refit.
                or self._sent_checksums.expired()
            )

    def synchronize(self) -> None:
        # What was enqueued before still uses the parameters that peers are about to overwrite, or would keep
        # this rank's copies waiting until after its peers have given it up.
        with gpu_errors(self.rank):
            self._waits.for_earlier_work("handshake")
        self._lease.renew()

    def handles_opened(self) -> int:
        found, self._handles_opened = self._handles_opened, 0
        return found

    def run(self, clock: StageClock, meanwhile: Callable[[], None] | None = None) -> TransferResult:
        self._refits += 1
        is_void = False
        with on_device(self._device):
            if self._sends:
                with gpu_errors(self.rank):
                    with clock.waiting():
                        # The endpoint may have enqueued more since (Megatron's gather). The writes would start after
                        # it, however long it takes, and the lease says until when they may.
                        self._waits.for_earlier_work("transfer")
                    self._lease.use(self.rank)
                    is_void = self._write(clock)
            elif self._receives and self._pulls:
                with gpu_errors(self.rank):
                    self._read(clock)
            if meanwhile is not None:
                meanwhile()
            with gpu_errors(self.rank):
                result = self._await_landing(clock)
                if self._some_sleep:
                    with clock.stage("commit"):
                        self.release()
        return replace(result, void=True) if is_void else result

    def release(self) -> None:
        """Unmap the memory that its owners free between refits, and release this rank's own; nothing may be under way."""
        if not self._some_sleep or self._released:
            return
        held: list[ImportedMemory | ExportedMemory] = list(self._imported.values())
        if self._exported is not None:
            held.append(self._exported)
        for memory in held:
            memory.release()
        self._released = True

    def close(self, *, failed: bool = False) -> None:
        self._unbind(failed=failed)

    @property
    def _lends(self) -> dict[int, tuple[Message, ...]]:
        """Messages of a sender that its receivers read."""
        return {receiver: ms for receiver, ms in self._sends.items() if receiver in self._pulling}

    @property
    def _works_on_portions(self) -> bool:
        """Whether this receiver is to hear of portions: one that pulls has nothing before its copies are done."""
        return self._landed is not None and bool(self._receives) and not self._pulls

    @property
    def _pushes(self) -> dict[int, tuple[Message, ...]]:
        """Messages of a sender that it writes."""
        return {receiver: ms for receiver, ms in self._sends.items() if receiver not in self._pulling}

    # The binding of who lets others map its memory: of a receiver that is written, of a sender that is read.

    def _open_signals(self, peers: Mapping[int, Sequence[Message]]) -> None:
        """This rank's signals and the checksums of its messages; made once."""
        if self._signals is None:
            messages = {peer: len(held) for peer, held in peers.items()}
            self._signals = SignalBuffer(messages, self._device)

    def _open_to_senders(self) -> None:
        """Let senders write this rank's memory, if it can be mapped; otherwise it pulls from here on.

        Raises:
            TransportUnavailable: it can't be mapped, and is not to pull, or could be before.
        """
        if self._pulls:
            return
        try:
            self._export(OpenViews.of(self._landing.bound))
        except TransportUnavailable as error:
            if not self._may_pull:
                raise
            self._pulls = str(error)

    def _export(self, views: OpenViews) -> None:
        """Look up the allocations of what peers write or read."""
        assert self._signals is not None, "signals are made before"
        own = [(self._signals.memory.data_ptr(), self._signals.memory.nbytes)]
        gives_back = self._sleeps
        if gives_back is None:
            ours = device_uuid(self._device)
            gives_back = any(receiver.device == ours for receiver in self._pulling.values())
        if gives_back:
            self._exported = ExportedMemory(own, self._device, sleeps=views.ranges)
        else:
            self._exported = ExportedMemory([*views.ranges, *own], self._device)
        self._open_views = views
        self._some_sleep = self._gives_back = gives_back

    def _export_again(self) -> bool:
        """After a sleep: whether this rank's memory lies where peers had it mapped."""
        if self._host is not None and self._host.moved():
            return False
        return self._exported is None or self._exported.find_again()

    def _exported_moved(self) -> bool:
        """Whether other memory has come to lie where peers have this rank's mapped."""
        if self._exported is None:
            return False
        # A sleep mode frees memory behind the back of torch's allocator, whose count then tells nothing.
        if self._memory is not None and not self._gives_back and self._memory.still_mapped():
            return False
        moved = self._exported.moved()
        if not moved:
            self.confirm_unmoved()
        return moved

    # The binding of who maps its peers' memory, and the tables of what is written or read there.

    def _map(self, peers: Mapping[int, Description]) -> None:
        if self._pulls:
            self._map_senders(peers)
        else:
            self._map_receivers(peers)

    def _map_receivers(self, peers: Mapping[int, Description]) -> None:
        bound = bind_messages(self._sends, self._views)
        with self._unavailable_if_not_computable():
            # The first binding compiles; the next ones come right before a refit.
            ahead = self._refits == 0
            self._sent_checksums = MessageChecksums(bound, self.verify, self._device, ahead=ahead)
        mapped = {rank: self._map_peer(rank, peers[rank], bound[rank]) for rank in bound if rank in peers}
        outgoing = Outgoing.of(bound, mapped, self._signals)
        self._signal_addresses, self._lent_addresses = outgoing.signals, outgoing.lent
        in_portions = any(peer.works_on_portions for peer in peers.values())
        self._make_tables(by_portion(outgoing.moves, bound) if in_portions else [outgoing.moves])
        sums = outgoing.checksum_copies(self._sent_checksums.sums) if self.verify != "off" else ()
        self._checksum_copies = CopyTable.build(sums, self._device)
        self._tables = (self._launches, self._checksum_copies)

    def _map_senders(self, peers: Mapping[int, Description]) -> None:
        assert self._signals is not None, "a receiver has signals"
        bound = self._landing.bound
        incoming = Incoming.of(
            bound, {rank: self._map_peer(rank, peers[rank], bound[rank]) for rank in bound}, self._signals
        )
        self._make_tables([incoming.moves])
        fetch = CopyTable.build(incoming.fetched, self._device)
        self._signals.fetched_by(fetch)
        self._tables = (self._launches, fetch)

    def _map_peer(self, rank: int, peer: Description, messages: Sequence[BoundMessage]) -> PeerPlaces:
        """Map a peer's memory."""
        mapped = self._imported[rank] = ImportedMemory(peer, self._device, self._timeout)
        self._handles_opened += mapped.opened
        self._some_sleep |= peer.sleeps
        with self._checking(rank):
            return PeerPlaces.of(messages, peer, self.rank, mapped.bases, self._device)

    def _make_tables(self, portions: Sequence[Mapping[int, Sequence[Move]]]) -> None:
        """The copies and encodings of what is exchanged with each peer."""
        self._launches = []
        for moves in portions:
            copied: dict[int, list[tuple[Strided, Strided]]] = {}
            encoded: dict[int, list[EncodedWrite]] = {}
            for peer, pairs in moves.items():
                with self._checking(peer):
                    copied[peer], encoded[peer] = by_kind(pairs)
            copies = CopyTable.of(rows_in_turns(copied, self.rank), self._device)
            with self._unavailable_if_not_computable():
                encoders = make_encoders(encoded_in_turns(encoded, self.rank), self._device)
            self._launches.append([copies, *encoders])

    def _map_again(self, peers: Mapping[int, Description]) -> bool:
        """Map peers' memory where it was mapped before they slept, if they and this rank have everything where they had it;
        whether that was all to do."""
        if not self._unmoved or not all(self._peers[rank].same_places(peer) for rank, peer in peers.items()):
            return False
        for rank, peer in peers.items():
            mapped = self._imported[rank]
            before = mapped.opened
            lies_there = mapped.map_again(peer)
            self._handles_opened += mapped.opened - before
            if not lies_there:
                return False
        self._connected(peers)
        return True

    def _connected(self, peers: Mapping[int, Description]) -> None:
        self._places, self._peers = self._new_places, dict(peers)
        # What has been written once is tried again if it fails for a moment.
        self._may_pull = False
        if self._memory is not None and self._refits == 0:
            # Its first answer looks at every block of torch's allocator, which no refit shall wait for.
            self._memory.still_mapped()
        # Views would keep the memory of parameters that are offloaded meanwhile.
        self._views = LiveViews([])

    def _require_readable(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            if self._lends and not self._views.on_device(fragment.view):
                raise TransportUnavailable(
                    f"{fragment.name} lies on {fragment.view.device}, where no engine rank reads it by itself; bring the weights to the "
                    "GPU before the refit",
                    stage="bind",
                    rank=self.rank,
                    parameter=fragment.name,
                )
            if self._lends and repeats(fragment.view.shape, fragment.view.stride()):
                raise TransportUnavailable(
                    f"{fragment.name} is expanded, and engine ranks don't read by themselves where several elements share one place; "
                    "give it memory of its own (clone())",
                    stage="bind",
                    rank=self.rank,
                    parameter=fragment.name,
                )
            resident = fragment.view.device == self._device
            if not resident and (fragment.view.is_cuda or not kernels_read(fragment.view)):
                raise TransportUnavailable(
                    f"{fragment.name} lies on {fragment.view.device}, where {self._device} can't read it; offload to "
                    "pinned memory",
                    stage="bind",
                    rank=self.rank,
                    parameter=fragment.name,
                )

    @contextmanager
    def _checking(self, peer: int) -> Iterator[None]:
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

    @contextmanager
    def _unavailable_if_not_computable(self) -> Iterator[None]:
        try:
            yield
        except NotComputable as error:
            raise TransportUnavailable(str(error), stage="bind", rank=self.rank) from error

    # A refit.

    def _write(self, clock: StageClock) -> bool:
        """Enqueue the whole refit of a sender; whether it is void."""
        stream = self._stream
        assert stream is not None, "bind comes before run"
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream), clock.stage("transfer"):
                self._tell(self._lent_addresses, readable(self._refits))
                for portion, launches in enumerate(self._launches):
                    if portion:
                        self._tell(self._signal_addresses, portion_landed(self._refits, portion - 1))
                    for one in launches:
                        one.launch()
            everywhere = [*self._signal_addresses, *self._lent_addresses]
            # While the copies run: whether the weights still lay where they were read.
            if self._check_moved():
                self._tell(everywhere, void(self._refits))
                return True
            self._tell(self._signal_addresses, data_landed(self._refits))
            if self.verify == "off":
                self._tell(self._lent_addresses, checksums_landed(self._refits))
            else:
                # On the caller's stream, which is idle: on the other one it would wait for the copies, without a limit.
                self._sent_checksums.prepare(self._number)
                # After the copies: the receivers compute theirs at the same time.
                with torch.cuda.stream(stream), clock.stage("verify"):
                    self._sent_checksums.compute(self._number)
                    self._checksum_copies.launch()
                    self._tell(everywhere, checksums_landed(self._refits))
        finally:
            # Whatever failed in between: the peers' memory stays mapped until what was enqueued has ended.
            self._ended.record(stream)
        return False

    def _tell(self, addresses: Sequence[int], number: int) -> None:
        assert self._stream is not None, "bind comes before run"
        for address in addresses:
            signal(address, number, self._stream)

    def _read(self, clock: StageClock) -> None:
        """Enqueue the copies of a receiver that pulls, once its senders say that they may be made."""
        stream, signals = self._stream, self._signals
        assert stream is not None, "bind comes before run"
        assert signals is not None, "a receiver has signals"
        with clock.stage("transfer"):
            with clock.waiting():
                self._waits.for_signals(signals, readable(self._refits), "transfer")
            stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(stream):
                    for one in chain.from_iterable(self._launches):
                        one.launch()
            finally:
                # As in `_write`.
                self._ended.record(stream)

    def _await_landing(self, clock: StageClock) -> TransferResult:
        """Wait until what this rank sends and receives has landed."""
        if self._sends:
            with clock.waiting():
                self._waits.until(self._ended.query, "transfer", lambda: "this rank's writes to its peers")
        if not self._receives or self._signals is None:
            return TransferResult(self._payload, 0)
        # While bytes are on their way.
        self._landing.prepare(self._number)
        landed = self._landed if self._works_on_portions else None
        all_at_once = range(PORTIONS)
        for portions in [all_at_once] if landed is None else [range(n, n + 1) for n in all_at_once]:
            with clock.stage("transfer"), clock.waiting():
                number = portion_landed(self._refits, portions[-1])
                if self._pulls:
                    self._waits.until(
                        self._ended.query, "transfer", lambda: "this rank's copies from its peers"
                    )
                    number = checksums_landed(self._refits)
                self._waits.for_signals(self._signals, number, "transfer")
            if self._signals.was_signalled(void(self._refits)):
                return TransferResult(self._payload, 0, void=True)
            if self.verify != "off":
                with clock.stage("verify"):
                    self._landing.add_up(self._number, portions)
            if landed is not None:
                with clock.stage("post_load"):
                    landed(portions[-1])
        if self.verify == "off":
            return TransferResult(self._payload, 0)
        with clock.stage("verify"):
            compared = self._landing.compare(self._refits, self._signals, self._ended, clock)
            return TransferResult(self._payload, compared)

    # The end.

    def _unbind(self, *, failed: bool) -> None:
        """Unmap the peers' memory, stop serving handles, and forget host memory."""
        exported, self._exported = self._exported, None
        self._host = None
        steps: list[Callable[[], object]] = [] if exported is None else [exported.close]
        try:
            end_all([*steps, partial(self._drop_mappings, failed=failed)])
        finally:
            self._launches = []

    def _drop_mappings(self, *, failed: bool) -> None:
        # A sender whose receivers read has nothing mapped, and yet adds up its weights on a stream of its own.
        if failed and self._stream is not None and not self._drained():
            leave_running(
                "kernels of a failed refit",
                self._imported,
                self._tables,
                self._sent_checksums,
                self._signals,
            )
            self._imported = {}
        # Before new ones are made beside them.
        self._tables = ()
        self._sent_checksums = no_checksums()
        self._unmap()

    def _unmap(self) -> None:
        """Unmap the peers' memory, which nothing on this GPU uses any more."""
        imported, self._imported = self._imported, {}
        if self._signals is not None:
            self._signals.fetched_by(None)
        end_all(one.close for one in imported.values())

    def _drained(self) -> bool:
        signals = self._signals

        def ended() -> bool:
            return self._ended.query() and (signals is None or signals.idle())

        return gpu_ends_within(ended, _DRAIN_WITHIN)
