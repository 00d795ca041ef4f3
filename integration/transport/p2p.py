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
        self._sends = plan.sends
        self._receives = plan.receives
        self._pair_rounds = Counter(
            (m.source, m.destination)
            for side in (plan.sends, plan.receives)
            for messages in side
            for m in messages
        )
        longest = max(
            (sum(m.nbytes for m in messages) for messages in (*self._sends, *self._receives)), default=0
        )
        self._ordinal = _ordinals(plan)
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
                    if self._samples(message):
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
            checked = [m for m in receives if self._samples(m)]
            if checked:
                with clock.stage("verify"):
                    verified += sum(check_landed(message, self.rank) for message in checked)
            payload += sum(m.message.payload_bytes for m in (*sends, *receives))
        self._refits += 1
        return TransferResult(payload, verified)

    def _samples(self, message: PackedMessage) -> bool:
        key = (*_pair(message), message.message.round_index)
        return self._checked(self._ordinal[key], self._pair_rounds[_pair(message)])


def _ordinals(plan: Plan) -> dict[tuple[int, int, int], int]:
    """Place of each message among those of its pair."""
    count: Counter[tuple[int, int]] = Counter()
    found: dict[tuple[int, int, int], int] = {}
    for sends, receives in zip(plan.sends, plan.receives, strict=True):
        for m in (*sends, *receives):
            found[m.source, m.destination, m.round_index] = count[m.source, m.destination]
            count[m.source, m.destination] += 1
    return found


def _pair(message: PackedMessage) -> tuple[int, int]:
    return message.message.source, message.message.destination
