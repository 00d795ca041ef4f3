"""The transport for engines whose memory can't be shared: they map the trainer's parameters, and copy from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...errors import TransportUnavailable
from ...layout import Fragment
from ...packing import CopyTable, EncodedView, Strided
from ...records import StageClock
from ..base import TransferResult
from .description import Description, Inbox
from .mailbox import BELL_BYTES, landed, proven, ring
from .one_sided import OneSided, bound, checksums_at, memory_of, views_in
from .order import Write, interleave, pieces
from .proofs import Bound, Proofs


class PullTransport(OneSided):
    """Receivers copy strided segments from the senders' parameters, which are mapped into their address space.

    Memory that sleeps (vLLM's sleep mode, torch_memory_saver) can't be shared, while a trainer's can: so one copy
    suffices on a GPU that both have, where buckets take two. A sender rings at its receivers when its weights are
    ready, and waits until each has rung back. What is computed as it is packed can't be read: such epochs need
    another transport.

    A receiver has nothing mapped between refits, since the driver would keep the memory of parameters that the trainer
    offloads, just when the engine's caches need it: so every refit is bound anew.
    """

    name = "pull"
    _unmapped = False

    def bind(self, fragments: Sequence[Fragment]) -> None:
        views = self._begin_binding(fragments)
        self._unmapped = False
        self._bound_sends = bound(self._sends, views)
        self._bound_receives = bound(self._receives, views)
        self._require_memory(fragments)
        # A rank sends or receives; those who read from a sender leave no checksums with it.
        messages = dict.fromkeys(self._sends, 0) or {s: len(ms) for s, ms in self._receives.items()}
        if messages:
            self._export(memory_of(self._bound_sends), self._open_mailbox(messages))
        self._sent_proofs = Proofs(self._bound_sends, self.verify, self._device)
        self._landed_proofs = Proofs(self._bound_receives, self.verify, self._device)

    def describe(self) -> object:
        exported, mailbox = self._exported, self._mailbox
        if exported is None or mailbox is None:
            return self._describe_nothing()
        inboxes = {}
        for peer in mailbox.senders:
            bell = exported.place(mailbox.bell_address(peer))
            sums = exported.place(mailbox.checksum_address(peer)) if peer in self._receives else bell
            inboxes[peer] = Inbox(views_in(exported, self._bound_sends.get(peer, ())), sums, bell)
        return self._describe(exported, inboxes)

    def connect(self, described: Sequence[object]) -> None:
        reads: dict[int, list[Write]] = {}
        told: list[tuple[Sequence[Bound], int]] = []
        self._bells = []
        for peer, ours in sorted({**self._bound_sends, **self._bound_receives}.items()):
            description = Description.from_json(described[peer], peer)
            bases = self._import(description).bases
            with self._reading(peer):
                inbox = description.inboxes[self.rank]
                self._bells.append(description.region(inbox.bell, BELL_BYTES, bases))
                if peer in self._sends:
                    told.append((ours, checksums_at(description, inbox, len(ours), bases)))
                    continue
                theirs = self._mapped(ours, description, inbox, bases)
            live = [view for _, views in ours for view in views if isinstance(view, Strided)]
            cut = (pieces(Write(*ends)) for ends in zip(theirs, live, strict=True))
            reads[peer] = [piece for parts in cut for piece in parts]
        ordered = [
            (source, target) for source, target in interleave(reads, self.rank) if isinstance(source, Strided)
        ]
        self._copies = CopyTable.build(ordered, self._device)
        self._tell = self._telling(told)
        self._bound_sends = {}

    def moved(self) -> bool:
        return self._unmapped or super().moved()

    def run(self, clock: StageClock, aside: Callable[[], None] | None = None) -> TransferResult:
        self._refits += 1
        mailbox, verified = self._mailbox, 0
        with torch.cuda.device(self._device):
            if mailbox is not None:
                with self._classifying():
                    if self._receives:
                        with clock.stage("transfer"), clock.waiting():
                            self._await_bells(mailbox, landed(self._refits), "transfer")
                    self._enqueue(clock)
            if aside is not None:
                aside()
            if mailbox is not None:
                with self._classifying(), clock.stage("transfer"), clock.waiting():
                    self._wait(
                        self._ended.query, "transfer", lambda: "this rank's part of the refit on its GPU"
                    )
                    if self._sends:
                        self._await_bells(mailbox, landed(self._refits), "transfer")
                if self._receives:
                    self._unmap()
                if self._receives and self.verify != "off":
                    with self._classifying(), clock.stage("verify"):
                        verified = self._verify(mailbox, clock)
        return TransferResult(self._payload, verified)

    def _unmap(self) -> None:
        self._unmapped = True
        super()._unmap()

    def _enqueue(self, clock: StageClock) -> None:
        """A sender's bells, once all earlier work on its weights is done, and its checksums; a receiver's copies."""
        stream = self._stream
        assert stream is not None, "bind comes before run"
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                with clock.stage("transfer"):
                    self._copies.launch()
                    for bell in self._bells:
                        ring(bell, landed(self._refits), stream)
                if self._sends and self.verify != "off":
                    with clock.stage("verify"):
                        self._sent_proofs.compute(self._refits)
                        self._tell.launch()
                        for bell in self._bells:
                            ring(bell, proven(self._refits), stream)
        finally:
            # Whatever broke off in between: the peers' memory stays mapped until what was enqueued has ended.
            self._ended.record(stream)

    def _require_memory(self, fragments: Sequence[Fragment]) -> None:
        sent = self._bound_sends.values()
        computed = any(isinstance(v, EncodedView) for bound in sent for _, views in bound for v in views)
        away = next((f for f in fragments if f.view.numel() and f.view.device != self._device), None)
        if computed:
            reason = (
                "weights are cast or quantized as they are packed, and a reader finds them as they are kept"
            )
        elif away is not None:
            reason = f"{away.name} lies on {away.view.device}, and not in the memory of {self._device}"
        else:
            return
        raise TransportUnavailable(reason, stage="bind", rank=self.rank)
