"""The transport: one table of copies from live parameters to the peers' live parameters, a bell at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ...errors import TransportUnavailable
from ...gpu_memory.description import Description, Inbox
from ...gpu_memory.driver import on_device
from ...layout import Fragment
from ...packing import CopyTable, EncodedView, NotComputable, Strided, make_encoders
from ...packing.host import kernels_read
from ...records.record import StageClock
from ..base import TransferResult
from .bound import bound, checksums_at, memory_of, views_in
from .lease import Lease
from .mailbox import BELL_BYTES, landed, proven, ring, void
from .one_sided import OneSided
from .order import Computed, computed_in_turns, copies_in_turns
from .proofs import Bound


class IpcTransport(OneSided):
    """Senders write strided segments into the receivers' parameters, which are mapped into their address space.

    A receiver takes no part in the copies: it watches its mailbox, where each sender rings when all that it had for
    this receiver has landed, and again when its checksums have. A sender's parameters may be in host memory that the
    GPU can read.
    """

    name = "ipc"

    def bind(self, fragments: Sequence[Fragment]) -> None:
        if self._begin_binding(fragments):
            return
        self._require_reach(fragments)
        self._bound_receives = bound(self._receives, self._views)
        if self._receives:
            mailbox = self._open_mailbox(
                {sender: len(messages) for sender, messages in self._receives.items()}
            )
            self._export(memory_of(self._bound_receives), mailbox)
        self._landed_proofs = self._prove(self._bound_receives)

    def describe(self) -> object:
        exported, mailbox = self._exported, self._mailbox
        if exported is None or mailbox is None:
            return self._describe_nothing()
        inboxes = {
            sender: Inbox(
                views_in(exported, self._bound_receives[sender]),
                exported.place(mailbox.checksum_address(sender)),
                exported.place(mailbox.bell_address(sender)),
            )
            for sender in self._receives
        }
        return self._describe(exported, inboxes)

    def connect(self, described: Sequence[object]) -> None:
        peers = {receiver: Description.from_json(described[receiver], receiver) for receiver in self._sends}
        if not self._follows(peers):
            self._unmap()
            self._write_to(peers)
            self._connected(peers)
        # Peers meet again after this, and only then begin to wait.
        self._lease = Lease(min((self._timeout, *(peer.timeout_s for peer in peers.values()))))
        self._lease.renew()

    def _write_to(self, peers: Mapping[int, Description]) -> None:
        """Map the receivers' memory and make the tables of what is written there."""
        bound_sends = bound(self._sends, self._views)
        with self._reachable():
            self._sent_proofs = self._prove(bound_sends)
        copied: dict[int, list[tuple[Strided, Strided]]] = {}
        computed: dict[int, list[Computed]] = {}
        told: list[tuple[Sequence[Bound], int]] = []
        bells: list[int] = []
        for receiver, sent in bound_sends.items():
            peer = peers[receiver]
            mapped = self._import(receiver, peer)
            with self._reading(receiver):
                inbox = peer.inboxes[self.rank]
                targets = self._mapped(sent, peer, inbox, mapped.bases)
                told.append((sent, checksums_at(peer, inbox, len(sent), mapped.bases)))
                bells.append(peer.region(inbox.bell, BELL_BYTES, mapped.bases))
                sources = [view for _, views in sent for view in views]
                ends = list(zip(sources, targets, strict=True))
                copied[receiver] = [(a, b) for a, b in ends if isinstance(a, Strided)]
                computed[receiver] = [(a, b) for a, b in ends if isinstance(a, EncodedView)]
        self._bells = bells
        self._copies = CopyTable.of(copies_in_turns(copied, self.rank), self._device)
        with self._reachable():
            self._encoders = make_encoders(computed_in_turns(computed, self.rank), self._device)
        self._tell = self._telling(told)
        self._tables = (self._copies, self._encoders, self._tell)

    def run(self, clock: StageClock, aside: Callable[[], None] | None = None) -> TransferResult:
        self._refits += 1
        nothing = False
        with on_device(self._device):
            if self._sends:
                with self._classifying():
                    with clock.waiting():
                        # The endpoint may have enqueued more since (Megatron's gather); the writes would start
                        # after it, however long it takes, and the lease says until when they may.
                        self._catch_up("transfer")
                    self._lease.use(self.rank)
                    nothing = self._write(clock)
            if aside is not None:
                aside()
            with self._classifying():
                result = self._await_landing(clock)
                if self._on_loan:
                    with clock.stage("commit"):
                        self.rest()
        return replace(result, void=True) if nothing else result

    def _await_landing(self, clock: StageClock) -> TransferResult:
        """Wait until what this rank sends and receives has landed."""
        if self._sends:
            with clock.waiting():
                self._wait(self._ended.query, "transfer", lambda: "this rank's writes to its peers")
        if self._mailbox is None:
            return TransferResult(self._payload, 0)
        # While the senders write.
        self._landed_proofs.prepare(self._number)
        with clock.stage("transfer"), clock.waiting():
            self._await_bells(self._mailbox, landed(self._refits), "transfer")
        if self._mailbox.last_rung(void(self._refits)):
            return TransferResult(self._payload, 0, void=True)
        if self.verify == "off":
            return TransferResult(self._payload, 0)
        with clock.stage("verify"):
            return TransferResult(self._payload, self._verify(self._mailbox, clock))

    def _write(self, clock: StageClock) -> bool:
        """Enqueue the whole refit of a sender; whether it is void."""
        stream = self._stream
        assert stream is not None, "bind comes before run"
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream), clock.stage("transfer"):
                self._copies.launch()
                for encoder in self._encoders:
                    encoder.launch()
            if self._look():
                for bell in self._bells:
                    ring(bell, void(self._refits), stream)
                return True
            for bell in self._bells:
                ring(bell, landed(self._refits), stream)
            if self.verify != "off":
                # On the caller's stream, which is idle: on the other one it would wait for the copies, without a limit.
                self._sent_proofs.prepare(self._number)
                # After the copies: the receivers compute theirs at the same time.
                with torch.cuda.stream(stream), clock.stage("verify"):
                    self._sent_proofs.compute(self._number)
                    self._tell.launch()
                    for bell in self._bells:
                        ring(bell, proven(self._refits), stream)
        finally:
            # Whatever broke off in between: the peers' memory stays mapped until what was enqueued has ended.
            self._ended.record(stream)
        return False

    def _require_reach(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            on_device = fragment.view.device == self._device
            if not on_device and (fragment.view.is_cuda or not kernels_read(fragment.view)):
                raise TransportUnavailable(
                    f"{fragment.name} lies on {fragment.view.device}, where {self._device} can't read it; offload to "
                    "pinned memory",
                    stage="bind",
                    rank=self.rank,
                    parameter=fragment.name,
                )

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except NotComputable as error:
            raise TransportUnavailable(str(error), stage="bind", rank=self.rank) from error

    def _release(self, *, failed: bool) -> None:
        try:
            super()._release(failed=failed)
        finally:
            self._encoders = []
