"""Checksums of a refit's messages, of one side, from its live views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from math import prod
from typing import NamedTuple

import torch

from ...layout import Box
from ...packing import ChecksumTable, EncodedView, Encoder, Strided, make_encoders
from ...packing.encoded import CHECKED_AT_ONCE, PackedEncoding
from ...packing.host import WeakView
from ...plan import Message

# A message and what this rank holds of it, one for each of its segments.
Bound = tuple[Message, Sequence[Strided | EncodedView]]
_View = tuple[Strided, int | Strided]


class _Step(NamedTuple):
    """What is computed into the scratch memory, and the checksums of what lies there or elsewhere after it."""

    encoders: list[Encoder]
    table: ChecksumTable


class _WeakEncoded(NamedTuple):
    """A part of what is computed of a tensor that is not kept: its owner may offload it meanwhile."""

    held: WeakView
    encoding: PackedEncoding
    window: Box

    def view(self) -> EncodedView:
        return EncodedView(self.held.view(), self.encoding, self.window)


class _Turn:
    """The messages that a refit checks of one pair; prepared once."""

    def __init__(self, group: Sequence[tuple[int, Bound]]):
        self.nbytes = sum(message.payload_bytes for _, (message, _) in group)
        self._held = [
            (slot, segment.offset, view if isinstance(view, Strided) else _weak(view))
            for slot, (message, held) in group
            for segment, view in zip(message.segments, held, strict=True)
        ]
        self._steps: list[_Step] | None = None

    def expired(self) -> bool:
        """Whether a weight is gone that is to be prepared yet."""
        return any(isinstance(held, _WeakEncoded) and held.held.expired() for _, _, held in self._held)

    def steps(self, scratch: torch.Tensor) -> list[_Step]:
        """All that is to be done, in this order."""
        if self._steps is None:
            plain: list[_View] = []
            slots: list[int] = []
            steps: list[_Step] = []
            for slot, offset, held in self._held:
                if isinstance(held, Strided):
                    plain.append((held, offset))
                    slots.append(slot)
                    continue
                view = held.view()
                steps += [
                    _strip(view, offset, strip, slot, scratch) for strip in view.strips(CHECKED_AT_ONCE)
                ]
            steps.append(_Step([], ChecksumTable.build(plain, scratch.device, slots)))
            # Only now: what broke off must not be taken for whole.
            self._steps, self._held = steps, []
        return self._steps


class Proofs:
    """Computes the checksums of the messages that a refit checks: all, or one of each pair in turn.

    What is computed while it is written is computed once more into scratch memory, strip by strip.

    Attributes:
        sums: int64 ``[messages, 2]`` on the device, peers in ascending order; 0 for what is not checked.
        scratch_bytes: of that memory.
    """

    def __init__(
        self, pairs: Mapping[int, Sequence[Bound]], verify: str, device: torch.device, *, ahead: bool
    ):
        """
        Args:
            pairs: the messages with each peer, in the order that both sides know.
            verify: ``off``, ``sampled`` or ``full``.
            device: of the views.
            ahead: whether everything is prepared now, and no refit will wait for a compiler, or for each refit what it
                checks: where weights move before every refit, the rest would be for nothing.
        """
        self.messages = [message for peer in sorted(pairs) for message, _ in pairs[peer]]
        self.sums = torch.zeros(len(self.messages), 2, dtype=torch.int64, device=device)
        needs = [
            prod(stop - start for start, stop in strip) * view.dtype.itemsize
            for bound in pairs.values()
            for _, held in bound
            for view in held
            if verify != "off" and isinstance(view, EncodedView)
            # The first may be cut short; later ones are no larger than the second.
            for strip in islice(view.strips(CHECKED_AT_ONCE), 2)
        ]
        self.scratch_bytes = max(needs, default=0)
        self._scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        # For each pair what its turns are.
        self._turns: list[list[_Turn]] = []
        slot = 0
        for peer in sorted(pairs):
            bound = list(zip(range(slot, slot + len(pairs[peer])), pairs[peer], strict=True))
            slot += len(bound)
            groups = {"off": [], "sampled": [[one] for one in bound], "full": [bound]}[verify]
            self._turns.append([_Turn(group) for group in groups])
        if ahead:
            for turn in chain.from_iterable(self._turns):
                turn.steps(self._scratch)

    def expired(self) -> bool:
        """Whether a weight is gone whose sum is to be prepared yet, so that all of this has to be made anew."""
        return any(turn.expired() for turn in chain.from_iterable(self._turns))

    def prepare(self, refit: int) -> None:
        """Prepare what a refit checks, if it is not.

        Raises:
            RefitError: the memory of a weight was freed.
        """
        for turns in self._turns:
            if turns:
                turns[refit % len(turns)].steps(self._scratch)

    def compute(self, refit: int) -> int:
        """Enqueue the checksums of a refit on the current stream; returns the bytes that they cover.

        Raises:
            RefitError: as :meth:`prepare`.
        """
        self.sums.zero_()
        covered = 0
        for turns in self._turns:
            if turns:
                turn = turns[refit % len(turns)]
                for encoders, table in turn.steps(self._scratch):
                    for encoder in encoders:
                        encoder.launch()
                    table.add_to(self.sums)
                covered += turn.nbytes
        return covered


def _weak(view: EncodedView) -> _WeakEncoded:
    return _WeakEncoded(WeakView(view.held), view.encoding, view.window)


def _strip(view: EncodedView, offset: int, strip: Box, slot: int, scratch: torch.Tensor) -> _Step:
    part = view.slice(strip)
    place = Strided.packed(scratch.data_ptr(), part.shape, part.dtype.itemsize)
    packed = Strided.packed(offset, view.shape, view.dtype.itemsize).slice(strip)
    device = scratch.device
    return _Step(
        make_encoders([(part, place)], device), ChecksumTable.build([(place, packed)], device, [slot])
    )
