"""One side's checksums of a refit's messages, computed from its live views."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice, repeat
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch

from ...layout import Box
from ...packing import ChecksumTable, EncodedView, Encoder, Strided, make_encoders
from ...packing.encoded import CHECKED_AT_ONCE, PackedEncoding, padded
from ...packing.host import WeakView
from ...plan import Message
from .portions import PORTIONS, portions_of

# A message and what this rank holds of it, one for each of its segments.
BoundMessage = tuple[Message, Sequence[Strided | EncodedView]]
_View = tuple[Strided, int | Strided]


class _Step(NamedTuple):
    """What is computed into the scratch memory, and the checksums of what lies there or elsewhere after it."""

    encoders: list[Encoder]
    table: ChecksumTable


class _WeakEncoded(NamedTuple):
    """A window of an encoded tensor that is not kept: its owner may offload it meanwhile."""

    held: WeakView
    encoding: PackedEncoding
    window: Box


class _Group:
    """Messages of one portion that a refit checks of one pair; prepared once."""

    def __init__(self, portion: int, group: Sequence[tuple[int, BoundMessage]]):
        self.portion = portion
        self.nbytes = sum(message.payload_bytes for _, (message, _) in group)
        # Codes and scales of one tensor are computed together, if they are known to be of the same one.
        weak: dict[int, WeakView] = {}

        def held_weakly(view: Strided | EncodedView) -> Strided | _WeakEncoded:
            if isinstance(view, Strided):
                return view
            held = weak.setdefault(id(view.held), WeakView(view.held))
            return _WeakEncoded(held, view.encoding, view.window)

        self._held = [
            (slot, segment.offset, held_weakly(view))
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
            builder = _StepBuilder(scratch)
            tensors: dict[WeakView, torch.Tensor] = {}
            for slot, offset, held in self._held:
                if isinstance(held, Strided):
                    plain.append((held, offset))
                    slots.append(slot)
                    continue
                tensor = tensors.get(held.held)
                if tensor is None:
                    tensor = tensors[held.held] = held.held.view()
                builder.add(EncodedView(tensor, held.encoding, held.window), offset, slot)
            steps = builder.steps()
            steps.append(_Step([], ChecksumTable.build(plain, scratch.device, slots)))
            # Only now: if something above failed, the next call must begin anew.
            self._steps, self._held = steps, []
        return self._steps


class _StepBuilder:
    """Gathers what is encoded once more into as few steps as the scratch memory allows: each step costs the host some
    launches, however little it encodes."""

    def __init__(self, scratch: torch.Tensor):
        self._scratch = scratch
        self._steps: list[_Step] = []
        self._begin()

    def add(self, view: EncodedView, offset: int, slot: int) -> None:
        """A part whose packed bytes begin at byte ``offset`` of the message, whose sum is in row ``slot``."""
        whole = Strided.packed(offset, view.shape, view.dtype.itemsize)
        for strip in view.strips(CHECKED_AT_ONCE):
            part = view.slice(strip)
            if self._end + part.nbytes > self._scratch.numel():
                self._close()
            place = Strided.packed(self._scratch.data_ptr() + self._end, part.shape, part.dtype.itemsize)
            self._end += padded(part.nbytes)
            self._computed.append((part, place))
            self._summed.append((place, whole.slice(strip)))
            self._slots.append(slot)

    def steps(self) -> list[_Step]:
        """All of them."""
        self._close()
        return self._steps

    def _begin(self) -> None:
        self._computed: list[tuple[EncodedView, Strided]] = []
        self._summed: list[_View] = []
        self._slots: list[int] = []
        self._end = 0

    def _close(self) -> None:
        if self._computed:
            device = self._scratch.device
            encoders = make_encoders(self._computed, device)
            self._steps.append(_Step(encoders, ChecksumTable.build(self._summed, device, self._slots)))
        self._begin()


class MessageChecksums:
    """Computes the checksums of the messages that a refit checks: all, or one of each pair in turn.

    What is encoded while it is written (cast, quantized) lies nowhere on the sender. It is encoded once more into scratch
    memory, strip by strip, and added up there.

    Attributes:
        sums: int64 ``[messages, 2]`` on the device, peers in ascending order; 0 for what is not checked.
        scratch_bytes: of that memory.
    """

    def __init__(
        self,
        pairs: Mapping[int, Sequence[BoundMessage]],
        verify: str,
        device: torch.device,
        *,
        ahead: bool,
        in_portions: bool = False,
    ):
        """
        Args:
            pairs: the messages with each peer, in the order that both sides know.
            verify: ``off``, ``sampled`` or ``full``.
            device: of the views.
            ahead: prepare all checksums now, so that no refit waits for a compiler. Otherwise each refit prepares what it
                checks: where weights move before every refit, the rest would be prepared for nothing.
            in_portions: whether :meth:`compute` is asked for some portions at a time.
        """
        self.messages = [message for peer in sorted(pairs) for message, _ in pairs[peer]]
        self.sums = torch.zeros(len(self.messages), 2, dtype=torch.int64, device=device)
        computed = [
            view
            for bound in pairs.values()
            for _, held in bound
            for view in held
            if verify != "off" and isinstance(view, EncodedView)
        ]
        largest = [
            prod(stop - start for start, stop in strip) * view.dtype.itemsize
            for view in computed
            # The first may be cut short; later ones are no larger than the second.
            for strip in islice(view.strips(CHECKED_AT_ONCE), 2)
        ]
        together = min(CHECKED_AT_ONCE, sum(padded(view.nbytes) for view in computed))
        self.scratch_bytes = max([*largest, together])
        self._scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        # For each pair what its refits check in turn.
        self._groups: list[list[list[_Group]]] = []
        slot = 0
        for peer in sorted(pairs):
            bound = list(zip(range(slot, slot + len(pairs[peer])), pairs[peer], strict=True))
            slot += len(bound)
            portions = portions_of([message for message, _ in pairs[peer]]) if in_portions else repeat(0)
            parts = [
                (portion, [one for _, one in found])
                for portion, found in groupby(zip(portions, bound, strict=False), itemgetter(0))
            ]
            turns = {
                "off": [],
                "sampled": [[_Group(portion, [one])] for portion, part in parts for one in part],
                "full": [[_Group(portion, part) for portion, part in parts]],
            }
            self._groups.append(turns[verify])
        # What is encoded is held weakly until it is prepared.
        self._may_expire = bool(computed) and not ahead
        if ahead:
            for group in self._all_groups():
                group.steps(self._scratch)

    def expired(self) -> bool:
        """Whether a weight is gone whose sum is to be prepared yet, so that all of this has to be made anew."""
        return self._may_expire and any(group.expired() for group in self._all_groups())

    def prepare(self, refit: int) -> None:
        """Prepare what a refit checks, if it is not.

        Raises:
            RefitError: the memory of a weight was freed.
        """
        for group in self._due(refit):
            group.steps(self._scratch)

    def compute(self, refit: int, portions: Container[int] = range(PORTIONS)) -> int:
        """Enqueue the checksums of a refit on the current stream; returns the bytes that they cover.

        Args:
            refit: its number.
            portions: those that are added up; beside what was before, if the first one is not among them.

        Raises:
            RefitError: as :meth:`prepare`.
        """
        if 0 in portions:
            self.sums.zero_()
        covered = 0
        for group in self._due(refit):
            if group.portion in portions:
                for encoders, table in group.steps(self._scratch):
                    for encoder in encoders:
                        encoder.launch()
                    table.add_to(self.sums)
                covered += group.nbytes
        return covered

    def _due(self, refit: int) -> Iterator[_Group]:
        """What a refit checks."""
        return chain.from_iterable(turns[refit % len(turns)] for turns in self._groups if turns)

    def _all_groups(self) -> Iterator[_Group]:
        return chain.from_iterable(turn for turns in self._groups for turn in turns)


def no_checksums() -> MessageChecksums:
    """Of no message."""
    return MessageChecksums({}, "off", torch.device("cpu"), ahead=False)
