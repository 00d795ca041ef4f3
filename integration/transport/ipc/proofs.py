"""Checksums of a refit's messages, of one side, from its live views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...packing import ChecksumTable, EncodedView, Encoder, Strided, make_encoders
from ...plan import Message

# A message and what this rank holds of it, one for each of its segments.
Bound = tuple[Message, Sequence[Strided | EncodedView]]
_View = tuple[Strided, int]


class _Step(NamedTuple):
    """What is computed into the scratch memory, and the checksums of what lies there or elsewhere after it."""

    encoders: list[Encoder]
    table: ChecksumTable


class Proofs:
    """Computes the checksums of the messages that a refit checks: all, or one of each pair in turn.

    What is computed while it is written is computed once more into scratch memory, one message at a time.

    Attributes:
        sums: int64 ``[messages, 2]`` on the device, peers in ascending order; 0 for what is not checked.
        scratch_bytes: of that memory.
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
        needs = [
            message.nbytes
            for bound in pairs.values()
            for message, held in bound
            if verify != "off" and any(isinstance(view, EncodedView) for view in held)
        ]
        self.scratch_bytes = max(needs, default=0)
        self._scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        # For each pair what its turns are: the steps, and the payload bytes that they check.
        self._turns: list[list[tuple[list[_Step], int]]] = []
        slot = 0
        for peer in sorted(pairs):
            bound = list(zip(range(slot, slot + len(pairs[peer])), pairs[peer], strict=True))
            slot += len(bound)
            groups = {"off": [], "sampled": [[one] for one in bound], "full": [bound]}[verify]
            self._turns.append([self._prepare(group, device) for group in groups])

    def compute(self, refit: int) -> int:
        """Enqueue the checksums of a refit on the current stream; returns the bytes that they cover."""
        self.sums.zero_()
        covered = 0
        for turns in self._turns:
            if turns:
                steps, nbytes = turns[refit % len(turns)]
                for encoders, table in steps:
                    for encoder in encoders:
                        encoder.launch()
                    table.add_to(self.sums)
                covered += nbytes
        return covered

    def _prepare(self, group: Sequence[tuple[int, Bound]], device: torch.device) -> tuple[list[_Step], int]:
        plain: list[_View] = []
        slots: list[int] = []
        steps: list[_Step] = []
        for slot, (message, held) in group:
            computed: list[tuple[EncodedView, Strided]] = []
            found: list[_View] = []
            for segment, view in zip(message.segments, held, strict=True):
                if isinstance(view, EncodedView):
                    place = Strided.packed(
                        self._scratch.data_ptr() + segment.offset, view.shape, view.dtype.itemsize
                    )
                    computed.append((view, place))
                    found.append((place, segment.offset))
                else:
                    plain.append((view, segment.offset))
                    slots.append(slot)
            if computed:
                table = ChecksumTable.build(found, device, [slot] * len(found))
                steps.append(_Step(make_encoders(computed, device), table))
        steps.append(_Step([], ChecksumTable.build(plain, device, slots)))
        return steps, sum(message.payload_bytes for _, (message, _) in group)
