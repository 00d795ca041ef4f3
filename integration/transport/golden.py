"""The oracle: every held box is broadcast to everyone, and each engine rank takes what it wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout import Fragment
from ..packing import PackedMessage, bind
from ..plan import BroadcastPlan
from ..process_groups import Group
from ..records import StageClock
from .base import TransferResult, Transport, check_landed, seal


class GoldenTransport(Transport):
    """Broadcasts; shares no assignment, cutting or pairing with ``p2p``, so it can judge it."""

    name = "golden"

    def __init__(self, group: Group, rank: int, plan: BroadcastPlan, verify: str, *, is_source: bool):
        super().__init__(group, rank, verify)
        self._plan = plan
        self._is_source = is_source
        longest = max((m.nbytes for m in plan.messages), default=0)
        self._staging = torch.zeros(longest, dtype=torch.uint8, device=group.device)
        self._bound: list[PackedMessage | None] = []

    @property
    def staging_bytes(self) -> int:
        return self._staging.numel()

    def bind(self, fragments: Sequence[Fragment]) -> None:
        # A trainer that does not own a box only takes part in its broadcast and writes nothing.
        self._bound = [
            bind([message], fragments, self._staging)[0]
            if not self._is_source or message.source == self.rank
            else None
            for message in self._plan.messages
        ]

    def run(self, clock: StageClock) -> TransferResult:
        payload = verified = 0
        for message, bound in zip(self._plan.messages, self._bound, strict=True):
            checked = self._checked(message.round_index, self._plan.rounds)
            if bound is not None and message.source == self.rank:
                with clock.stage("pack"):
                    bound.gather()
                    if checked:
                        seal(bound)
            with clock.stage("transfer"):
                self.group.broadcast(self._staging[: message.nbytes], message.source, "transfer")
            if bound is not None and message.source != self.rank:
                with clock.stage("unpack"):
                    bound.scatter()
                if checked:
                    with clock.stage("verify"):
                        verified += check_landed(bound, self.rank)
            payload += sum(t.numel() * t.element_size() for t in bound.live) if bound is not None else 0
        self._refits += 1
        return TransferResult(payload, verified)
