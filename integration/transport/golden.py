"""The oracle: every held box is broadcast to everyone, and each engine rank takes what it wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..comm.group import Group
from ..layout import Fragment
from ..packing import Checksums, Copy, make_checksums, make_copy
from ..plan import CHECKSUM_BYTES, BroadcastPlan, Message
from ..records.clock import StageClock
from .base import GroupTransport, TransferResult, damaged
from .storage import HostMemory, LiveViews, in_memory


@dataclass(frozen=True)
class _Bound:
    """A broadcast on this rank: between live storage and the buffer, and the checksum of the buffer."""

    gather: Copy
    scatter: Copy
    checksums: Checksums


class GoldenTransport(GroupTransport):
    """Broadcasts; shares no assignment, cutting, pairing or staging with ``p2p``, so it can judge it."""

    name = "golden"

    def __init__(
        self, group: Group, rank: int, plan: BroadcastPlan, verify: str, turn: int = 0, *, is_source: bool
    ):
        super().__init__(group, rank, verify, turn)
        self._plan = plan
        self._is_source = is_source
        longest = max((m.nbytes for m in plan.messages), default=0)
        self._staging = torch.zeros(longest, dtype=torch.uint8, device=group.device)
        self._sum = torch.zeros(2, dtype=torch.int64, device=group.device)
        self._bound: list[_Bound | None] = []
        self._host: HostMemory | None = None

    @property
    def staging_bytes(self) -> int:
        return self._staging.numel()

    def bind(self, fragments: Sequence[Fragment]) -> None:
        views = LiveViews(fragments, self.group.device)
        if not self._is_source:
            views.require_on_device()
        self._host = HostMemory.of(fragments, self.group.device)
        # A trainer that does not own a box only takes one in its broadcast and writes nothing.
        self._bound = [
            self._bind(message, views) if not self._is_source or message.source == self.rank else None
            for message in self._plan.messages
        ]

    def moved(self) -> bool:
        return self._host is not None and self._host.moved()

    def run(self, clock: StageClock, meanwhile: Callable[[], None] | None = None) -> TransferResult:
        payload = verified = 0
        for ordinal, (message, bound) in enumerate(zip(self._plan.messages, self._bound, strict=True)):
            checked = self._checked(ordinal, self._plan.rounds)
            slot = self._staging[message.nbytes - CHECKSUM_BYTES : message.nbytes].view(torch.int64)
            if bound is not None and message.source == self.rank:
                with clock.stage("pack"):
                    # The gaps between segments count as 0.
                    self._staging[: message.nbytes].zero_()
                    bound.gather.launch()
                    if checked:
                        bound.checksums.compute(slot)
            with clock.stage("transfer"):
                self.group.broadcast(self._staging[: message.nbytes], message.source, "transfer")
            if bound is not None and message.source != self.rank:
                with clock.stage("unpack"):
                    bound.scatter.launch()
                if checked:
                    with clock.stage("verify"):
                        # What this rank does not want stays as it was received, so whole buffers compare.
                        bound.gather.launch()
                        bound.checksums.compute(self._sum)
                        if not torch.equal(self._sum, slot):
                            raise damaged(message, self.rank)
                    verified += message.payload_bytes
            payload += bound.gather.nbytes if bound is not None else 0
        if meanwhile is not None:
            meanwhile()
        self._refits += 1
        return TransferResult(payload, verified)

    def _bind(self, message: Message, views: LiveViews) -> _Bound:
        buffer = self._staging[: message.nbytes]
        overlaps = views.in_message(message, buffer)
        device = self.group.device
        return _Bound(
            make_copy([(one.live, one.packed) for one in overlaps], device),
            make_copy([(one.packed, in_memory(one.live)) for one in overlaps if not self._is_source], device),
            make_checksums([(buffer[:-CHECKSUM_BYTES], 0)], device),
        )
