"""Checksums of a refit's messages, of one side, from its live views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from ...layout import Box
from ...packing import ChecksumTable, EncodedView, Encoder, Strided, make_encoders
from ...plan import Message

# Elements that are computed once more at a time, if a row of blocks has not more.
_STRIP = 16 << 20

# A message and what this rank holds of it, one for each of its segments.
Bound = tuple[Message, Sequence[Strided | EncodedView]]
_View = tuple[Strided, int | Strided]


class _Step(NamedTuple):
    """What is computed into the scratch memory, and the checksums of what lies there or elsewhere after it."""

    encoders: list[Encoder]
    table: ChecksumTable


class Proofs:
    """Computes the checksums of the messages that a refit checks: all, or one of each pair in turn.

    What is computed while it is written is computed once more into scratch memory, strip by strip.

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
            prod(stop - start for start, stop in strip) * view.dtype.itemsize
            for bound in pairs.values()
            for _, held in bound
            for view in held
            if verify != "off" and isinstance(view, EncodedView)
            for strip in view.strips(_STRIP)
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
            for segment, view in zip(message.segments, held, strict=True):
                if isinstance(view, EncodedView):
                    steps += [self._strip(view, segment.offset, strip, slot) for strip in view.strips(_STRIP)]
                else:
                    plain.append((view, segment.offset))
                    slots.append(slot)
        steps.append(_Step([], ChecksumTable.build(plain, device, slots)))
        return steps, sum(message.payload_bytes for _, (message, _) in group)

    def _strip(self, view: EncodedView, offset: int, strip: Box, slot: int) -> _Step:
        part = view.slice(strip)
        place = Strided.packed(self._scratch.data_ptr(), part.shape, part.dtype.itemsize)
        packed = Strided.packed(offset, view.shape, view.dtype.itemsize).slice(strip)
        device = self._scratch.device
        return _Step(
            make_encoders([(part, place)], device), ChecksumTable.build([(place, packed)], device, [slot])
        )
