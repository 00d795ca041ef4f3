"""Checksums of a refit's messages, of one side, from its live views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...packing import ChecksumTable, Strided
from ...plan import Message

# A message and its live views, one for each of its segments.
Bound = tuple[Message, Sequence[Strided]]


class Proofs:
    """Computes the checksums of the messages that a refit checks: all, or one of each pair in turn.

    Attributes:
        sums: int64 ``[messages, 2]`` on the device, peers in ascending order; 0 for what is not checked.
    """

    def __init__(self, pairs: Mapping[int, Sequence[Bound]], verify: str, device: torch.device):
        """Prepare the tables.

        Args:
            pairs: the messages with each peer, in the order that both sides know.
            verify: ``off``, ``sampled`` or ``full``.
            device: of the views.
        """
        self.messages = [message for peer in sorted(pairs) for message, _ in pairs[peer]]
        self.sums = torch.zeros(len(self.messages), 2, dtype=torch.int64, device=device)
        # For each pair what its turns are: the table, and the payload bytes that it checks.
        self._turns: list[list[tuple[ChecksumTable, int]]] = []
        slot = 0
        for peer in sorted(pairs):
            bound = list(zip(range(slot, slot + len(pairs[peer])), pairs[peer], strict=True))
            slot += len(bound)
            groups = {"off": [], "sampled": [[one] for one in bound], "full": [bound]}[verify]
            self._turns.append([_table(group, device) for group in groups])

    def compute(self, refit: int) -> int:
        """Enqueue the checksums of a refit on the current stream; returns the bytes that they cover."""
        self.sums.zero_()
        covered = 0
        for turns in self._turns:
            if turns:
                table, nbytes = turns[refit % len(turns)]
                table.add_to(self.sums)
                covered += nbytes
        return covered


def _table(group: Sequence[tuple[int, Bound]], device: torch.device) -> tuple[ChecksumTable, int]:
    views: list[tuple[Strided, int]] = []
    slots: list[int] = []
    for slot, (message, live) in group:
        for segment, view in zip(message.segments, live, strict=True):
            views.append((view, segment.offset))
            slots.append(slot)
    return ChecksumTable.build(views, device, slots), sum(message.payload_bytes for _, (message, _) in group)
