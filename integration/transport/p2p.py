"""Shard to shard: each pair of ranks exchanges its packed messages, round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ..layout import Fragment
from ..packing import PackedMessage, bind
from ..plan import Plan
from ..process_groups import Group, Parcel
from ..records import StageClock
from .base import TransferResult, Transport, check_landed, seal


class P2PTransport(Transport):
    """Grouped sends and receives of packed messages over one process group (NCCL or gloo)."""

    name = "p2p"

    def __init__(self, group: Group, rank: int, plan: Plan, verify: str):
        super().__init__(group, rank, verify)
        self._sends = plan.sent_by(rank)
        self._receives = plan.received_by(rank)
        self._pair_rounds = Counter((m.source, m.destination) for m in plan.messages)
        longest = max(
            (sum(m.nbytes for m in messages) for messages in (*self._sends, *self._receives)), default=0
        )
        self._staging = torch.zeros(longest, dtype=torch.uint8, device=group.device)
        self._bound_sends: list[list[PackedMessage]] = []
        self._bound_receives: list[list[PackedMessage]] = []

    @property
    def staging_bytes(self) -> int:
        return self._staging.numel()

    def bind(self, fragments: Sequence[Fragment]) -> None:
        self._bound_sends = [bind(messages, fragments, self._staging) for messages in self._sends]
        self._bound_receives = [bind(messages, fragments, self._staging) for messages in self._receives]

    def run(self, clock: StageClock) -> TransferResult:
        payload = verified = 0
        for sends, receives in zip(self._bound_sends, self._bound_receives, strict=True):
            with clock.stage("pack"):
                for message in sends:
                    message.gather()
                    if self._checked(message.message, self._pair_rounds[_pair(message)]):
                        seal(message)
            with clock.stage("transfer"):
                self.group.exchange(
                    [Parcel(m.message.destination, m.buffer) for m in sends],
                    [Parcel(m.message.source, m.buffer) for m in receives],
                    "transfer",
                )
            with clock.stage("unpack"):
                for message in receives:
                    message.scatter()
            checked = [m for m in receives if self._checked(m.message, self._pair_rounds[_pair(m)])]
            if checked:
                with clock.stage("verify"):
                    verified += sum(check_landed(message, self.rank) for message in checked)
            payload += sum(m.message.payload_bytes for m in (*sends, *receives))
        self._refits += 1
        return TransferResult(payload, verified)


def _pair(message: PackedMessage) -> tuple[int, int]:
    return message.message.source, message.message.destination
