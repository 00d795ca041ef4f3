"""How a sender reads its weights: section by section on a CPU; on a GPU where they lie, and what is encoded from scratch memory.

What is made of the same blocks of a weight is encoded once: codes, and with them the scales, whose section comes later. So each
section is read in its turn first; after that in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from ..packing import EncodedView, Encoder, Strided, make_copy, make_encoders
from ..packing.encoded import CHECKED_AT_ONCE, padded
from ..packing.rows import Ints, collapse
from ..transport.storage import LiveView, LiveViews
from .blocks import Bits
from .streams import Part

# Of a stream: neighbouring parts of elements of one size.
Sections = Sequence[Sequence[Part]]
# What a rank holds of the parts of a section.
Held = Sequence[tuple[Part, LiveView]]


class HostSections:
    """Sections of a stream on a CPU. No weight is kept.

    Args:
        sections: of the stream.
        views: of what lies on this rank.
        device: the CPU.

    Attributes:
        itemsizes: bytes of an element of each section.
    """

    def __init__(self, sections: Sections, views: LiveViews, device: torch.device):
        self._sections = sections
        self.itemsizes = [parts[0].itemsize for parts in sections]
        # Memory of sections in turns, and behind it what is made before its section's turn.
        end = max(
            (padded(parts[-1].start + parts[-1].segment.nbytes - parts[0].start) for parts in sections),
            default=0,
        )
        self._places: dict[int, int] = {}
        made_in: dict[object, int] = {}
        made: list[list[tuple[Part, LiveView]]] = [[] for _ in sections]
        for number, parts in enumerate(sections):
            for part, live in held_of(parts, views):
                turn = number
                if isinstance(live, EncodedView):
                    turn = made_in.setdefault(live.made_of, number)
                made[turn].append((part, live))
                self._places[part.start] = part.start - parts[0].start if turn == number else end
                end += padded(part.segment.nbytes) * (turn < number)
        self._packed = torch.zeros(end, dtype=torch.uint8)
        self._copies = [
            make_copy(
                [(live, cut(self._packed, self._places[part.start], live)) for part, live in found], device
            )
            for found in made
        ]

    def now(self, section: int) -> Iterator[tuple[Part, Bits]]:
        """The parts of a section, each with the bits that it is sent with now; they stand until the next call."""
        self._copies[section].launch()
        for part in self._sections[section]:
            begin = self._places[part.start]
            yield part, self._packed[begin : begin + part.segment.nbytes].numpy().view(f"<i{part.itemsize}")


class _Strip(NamedTuple):
    """Of an encoded part, and its place on side b."""

    section: int
    view: EncodedView
    kept: Strided


class Step(NamedTuple):
    """What is encoded into scratch memory first, and rows of what is read then, side a, with its place in the stream, side b."""

    encoders: Sequence[Encoder]
    rows: Ints


class DeviceSections:
    """Sections of a stream as kernels read them. No weight is kept, but in encoders.

    Args:
        sections: of the stream.
        views: of what lies on this rank.
        scratch: of :func:`encoding_scratch`.

    Attributes:
        itemsizes: bytes of an element of each section.
        steps: of each section.

    Raises:
        NotComputable: the device can't encode from where a weight lies.
    """

    def __init__(self, sections: Sections, views: LiveViews, scratch: torch.Tensor):
        self._device, self._scratch = scratch.device, scratch
        self.itemsizes = [parts[0].itemsize for parts in sections]
        held = [held_of(parts, views) for parts in sections]
        plain = [plain_rows(found, 0) for found in held]
        groups = _groups(held)
        nbytes = sum(padded(strip.view.nbytes) for group in groups for strip in _later(group))
        # What is made before its section's turn stays here.
        self._ahead, ahead_end = torch.empty(nbytes, dtype=torch.uint8, device=self._device), 0
        self.steps: list[list[Step]] = [[] for _ in held]
        for batch in _batches(groups, self._scratch.numel()):
            encoded: list[tuple[EncodedView, torch.Tensor]] = []
            read: list[tuple[Strided, Strided, int]] = []
            end, section = 0, batch[0].section
            for strip in batch:
                # A tensor, into which formats without a kernel can be encoded too.
                if strip.section == section:
                    place = cut(self._scratch, end, strip.view)
                    end += padded(strip.view.nbytes)
                    read.append((Strided.of(place), strip.kept, 0))
                else:
                    place = cut(self._ahead, ahead_end, strip.view)
                    ahead_end += padded(strip.view.nbytes)
                    plain[strip.section].append((Strided.of(place), strip.kept, 0))
                encoded.append((strip.view, place))
            self.steps[section].append(Step(make_encoders(encoded, self._device), collapse(read)))
        for found, rows in zip(self.steps, plain, strict=True):
            if rows:
                found.append(Step([], collapse(rows)))


def encoding_scratch(
    streams: Iterable[Sections], views: LiveViews, device: torch.device, at_once: int = CHECKED_AT_ONCE
) -> torch.Tensor:
    """Memory for what is encoded, which lies nowhere on the sender: for the sections of any of these streams.

    Args:
        streams: their sections.
        views: of what lies on this rank.
        device: that encodes.
        at_once: bytes that are encoded before they are read, unless one group needs more.
    """
    most = 0
    for sections in streams:
        held = [held_of(parts, views) for parts in sections]
        sizes = [sum(padded(strip.view.nbytes) for strip in group) for group in _groups(held)]
        most = max(most, *sizes, min(at_once, sum(sizes))) if sizes else most
    return torch.empty(most, dtype=torch.uint8, device=device)


def held_of(parts: Sequence[Part], views: LiveViews) -> Held:
    """What a rank holds of parts."""
    return [(part, views.of(part.segment)) for part in parts]


def plain_rows(found: Held, origin: int) -> list[tuple[Strided, Strided, int]]:
    """What is not encoded, and its place on side b."""
    return [(Strided.of(v), _placed(p, origin), 0) for p, v in found if isinstance(v, torch.Tensor)]


def cut(memory: torch.Tensor, begin: int, live: LiveView) -> torch.Tensor:
    """Memory from a byte on for what is packed of a view."""
    nbytes = prod(live.shape) * live.dtype.itemsize
    return memory[begin : begin + nbytes].view(live.dtype).view(live.shape)


def _placed(part: Part, origin: int) -> Strided:
    """A part's place in the stream whose first byte is at this address."""
    return Strided.packed(origin + part.start, part.shape, part.itemsize)


def _groups(held: Sequence[Held]) -> list[list[_Strip]]:
    """Strips of all that is encoded: of a group are those that are made together, the first section's first."""
    found: dict[object, list[_Strip]] = {}
    for section, parts in enumerate(held):
        for part, live in parts:
            if isinstance(live, EncodedView):
                for view, kept in _strips(live, _placed(part, 0)):
                    found.setdefault(view.made_of, []).append(_Strip(section, view, kept))
    return list(found.values())


def _later(group: Sequence[_Strip]) -> list[_Strip]:
    """Those that are made before their section's turn."""
    return [strip for strip in group if strip.section != group[0].section]


def _batches(groups: Iterable[list[_Strip]], most: int) -> Iterator[list[_Strip]]:
    """Neighbouring groups of one section, of which all but :func:`_later` ones take ``most`` bytes together."""
    batch: list[_Strip] = []
    held = 0
    for group in groups:
        need = sum(padded(strip.view.nbytes) for strip in group if strip.section == group[0].section)
        if batch and (batch[0].section != group[0].section or held + need > most):
            yield batch
            batch, held = [], 0
        batch += group
        held += need
    if batch:
        yield batch


def _strips(view: EncodedView, kept: Strided) -> list[tuple[EncodedView, Strided]]:
    """A part in strips, each with its place on side b, where it has no gaps."""
    found = [(view.slice(strip), kept.slice(strip)) for strip in view.strips(CHECKED_AT_ONCE)]
    return found if all(place.contiguous for _, place in found) else [(view, kept)]
