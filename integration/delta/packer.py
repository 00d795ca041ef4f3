"""The sender's side of a stream: the base, and what packs the difference from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..packing import CopyTable, EncodedView, Encoder, Strided, make_copy, make_encoders
from ..packing.encoded import CHECKED_AT_ONCE, padded
from ..packing.rows import COLUMNS, WIDEST, Ints, build_tables, collapse, row_bytes
from ..packing.tables import Launch
from ..transport.storage import LiveView, LiveViews
from . import blocks
from .blocks import COUNTS, Counts
from .streams import Part, Stream

# Units that a program compares at a time, elements of those that differ that it looks at in one go, and its warps.
_TILE, _CHUNK, _WARPS = 1024, 1024, 4
# Programs of a multiprocessor, and tiles of a launch at most: what else wants the GPU meanwhile, as a header that is sent,
# waits for the end of a launch, some 0.4 ms.
_PROGRAMS, _TILES = 5, 1 << 15
# Of a thread, so that so many programs fit at once: a multiprocessor has 2^16, and gives them out 8 a thread at a time.
_REGISTERS = (1 << 16) // (_PROGRAMS * _WARPS * 32) // 8 * 8
_WEIGH_TILE, _WEIGH_WARPS = 512, 4
# A block always fits.
LEAST_ROOM = 1 << 18
# Bytes that are encoded before they are compared. Twice in each such step the GPU runs out of work, for some 10 µs.
_ENCODED_AT_ONCE = 128 << 20

# What a rank holds of the parts of a section.
_Held = Sequence[tuple[Part, LiveView]]


class Base:
    """What a rank last sent of a stream, packed; and its weight sum, int64 ``[1]`` on the device.

    Args:
        stream: its layout.
        device: that compares with it.
        where: ``gpu`` for that device's memory, ``host`` for page-locked host memory, which kernels read over PCIe.
    """

    def __init__(self, stream: Stream, device: torch.device, where: str):
        self.stream = stream
        on_host = where == "host" and device.type == "cuda"
        self.memory = torch.zeros(
            stream.nbytes, dtype=torch.uint8, device="cpu" if on_host else device, pin_memory=on_host
        )
        self.total = torch.zeros(1, dtype=torch.int64, device=device)


class Room:
    """Where a pass over a section packs its blocks, and what it counts.

    Args:
        entries: blocks that it may have.
        nbytes: of their data.
        device: of all of it.
    """

    def __init__(self, entries: int, nbytes: int, device: torch.device):
        self.entries = torch.empty(max(1, entries), 2, dtype=torch.int64, device=device)
        self.data = torch.empty(max(nbytes, LEAST_ROOM), dtype=torch.uint8, device=device)
        # Behind the counts stands how many bytes of data there is room for.
        self._numbers = torch.full((COUNTS + 1,), self.data.numel(), dtype=torch.int64, device=device)
        self.counts = self._numbers[:COUNTS]
        self._on_host = torch.zeros(COUNTS, dtype=torch.int64, pin_memory=device.type == "cuda")

    @property
    def nbytes(self) -> int:
        """Of its buffers."""
        return self.entries.nbytes + self.data.nbytes

    def tell(self) -> None:
        """Enqueue the copy of the counts to the host."""
        self._on_host.copy_(self.counts, non_blocking=True)

    def told(self) -> Counts:
        """The counts, once what :meth:`tell` enqueued is done."""
        return Counts(*self._on_host.tolist())

    def payload(self, counts: Counts) -> list[torch.Tensor]:
        """What is sent of a pass: uint8, entries and data."""
        entries = self.entries[: counts.blocks].view(torch.uint8).view(-1)
        return [entries, self.data[: counts.nbytes]]


class Packer(Protocol):
    """Packs the sections of a stream. On a GPU all of it is only enqueued on the current stream.

    What is made of the same blocks of a weight is encoded once: codes, and with them the scales, whose section comes later. So
    each section is packed in its turn first; further passes may come in any order.

    Attributes:
        itemsizes: bytes of an element of each section.
        entries: blocks that a section may have at most.
    """

    itemsizes: list[int]
    entries: int

    def take(self) -> None:
        """Set the base to the weights as they are."""

    def pack(self, section: int, room: Room) -> None:
        """Pack what differs from the base in a section, as far as there is room, and bring the base up to that."""


def make_packers(
    streams: Sequence[tuple[Sequence[Sequence[Part]], Base]], views: LiveViews, device: torch.device
) -> list[Packer]:
    """A packer of the weights where they lie now, for the sections of each stream and its base.

    They are for one CUDA stream: what they encode goes to the same scratch memory.

    Raises:
        NotComputable: the device can't encode from where a weight lies, or into memory.
    """
    if device.type != "cuda":
        return [HostPacker(sections, views, base, device) for sections, base in streams]
    scratch = encoding_scratch([sections for sections, _ in streams], views, device)
    return [DevicePacker(sections, views, base, scratch) for sections, base in streams]


class HostPacker:
    """On a CPU."""

    def __init__(
        self, sections: Sequence[Sequence[Part]], views: LiveViews, base: Base, device: torch.device
    ):
        self._sections, self._base = sections, base
        self.itemsizes = [parts[0].itemsize for parts in sections]
        counts = [sum(-(-p.segment.nbytes // p.itemsize // blocks.MOST) for p in parts) for parts in sections]
        self.entries = max(counts, default=0)
        # Memory of sections in turns, and behind it what is made before its section's turn.
        end = max(
            (padded(parts[-1].start + parts[-1].segment.nbytes - parts[0].start) for parts in sections),
            default=0,
        )
        self._places: dict[int, int] = {}
        made_in: dict[object, int] = {}
        made: list[list[tuple[Part, LiveView]]] = [[] for _ in sections]
        for number, parts in enumerate(sections):
            for part, live in _held(parts, views):
                turn = number
                if isinstance(live, EncodedView):
                    turn = made_in.setdefault(live.made_of, number)
                made[turn].append((part, live))
                self._places[part.start] = part.start - parts[0].start if turn == number else end
                end += padded(part.segment.nbytes) * (turn < number)
        self._packed = torch.zeros(end, dtype=torch.uint8)
        self._copies = [
            make_copy(
                [(live, _cut(self._packed, self._places[part.start], live)) for part, live in found], device
            )
            for found in made
        ]

    def take(self) -> None:
        self._base.total.zero_()
        for section, parts in enumerate(self._sections):
            self._copies[section].launch()
            for part in parts:
                new, kept = self._bits(part)
                kept[:] = new
                self._base.total += blocks.weigh(new, blocks.places(part.start, new.size, part.itemsize))

    def pack(self, section: int, room: Room) -> None:
        parts = self._sections[section]
        self._copies[section].launch()
        counts = [0] * COUNTS
        packed = blocks.Packed(room.entries.numpy(), room.data.numpy())
        for part in parts:
            new, kept = self._bits(part)
            self._base.total += blocks.pack(new, kept, part.start, packed, counts)
        room.counts.copy_(torch.tensor(counts))

    def _bits(self, part: Part) -> tuple[blocks.Bits, blocks.Bits]:
        """Of a part as it is now, and in the base."""
        begin = self._places[part.start]
        size, kind = part.segment.nbytes, f"<i{part.itemsize}"
        new = self._packed[begin : begin + size].numpy().view(kind)
        return new, self._base.memory[part.start : part.start + size].numpy().view(kind)


class _Strip(NamedTuple):
    """Of an encoded part, and its place in the base."""

    section: int
    view: EncodedView
    kept: Strided


class _Step:
    """What is encoded into scratch memory first, and rows of what is compared then: with the base, which is side b."""

    def __init__(self, encoders: Sequence[Encoder], rows: Ints):
        self.encoders, self.rows = encoders, rows


class DevicePacker:
    """By kernels, which read weights and base once."""

    def __init__(
        self, sections: Sequence[Sequence[Part]], views: LiveViews, base: Base, scratch: torch.Tensor
    ):
        """
        Args:
            sections: of the stream.
            views: of what lies on this rank.
            base: of the stream.
            scratch: of :func:`encoding_scratch`.
        """
        self._base, self._device, self._scratch = base, scratch.device, scratch
        self.itemsizes = [parts[0].itemsize for parts in sections]
        held = [_held(parts, views) for parts in sections]
        everything = [pair for found in held for pair in found]
        # What take does: all is packed into the base.
        encoded = [(v, _cut(base.memory, p.start, v)) for p, v in everything if isinstance(v, EncodedView)]
        self._encoders = make_encoders(encoded, self._device)
        self._copies = CopyTable.of(collapse(self._plain(everything)), self._device)
        self._weighed = self._weigh_tables()
        # Of the kernels' arguments, as they are compiled for.
        self._like = Room(1, 1, self._device)
        self._programs = programs_of(self._device, _PROGRAMS)
        self._listed = torch.empty(self._programs, _TILE, dtype=torch.uint16, device=self._device)
        self._launches = [
            [(step.encoders, self._make_launches(step.rows, size)) for step in steps]
            for steps, size in zip(self._make_steps(held), self.itemsizes, strict=True)
        ]
        tables = [sum(launch.tiles for _, made in steps for launch, _ in made) for steps in self._launches]
        self.entries = max(tables, default=0)

    def take(self) -> None:
        for encoder in self._encoders:
            encoder.launch()
        self._copies.launch()
        self._base.total.zero_()
        for table in self._weighed:
            table.add_to(self._base.total)

    def pack(self, section: int, room: Room) -> None:
        room.counts.zero_()
        out = (room.counts, self._base.total, room.entries, room.data, self._listed)
        for encoders, launches in self._launches[section]:
            for encoder in encoders:
                encoder.launch()
            for launch, places in launches:
                for place in places:
                    launch(place, *out)

    def _weigh_tables(self) -> list[WeighTable]:
        """Of the base."""
        found = []
        for size, (begin, end) in self._base.stream.extents.items():
            count = -(-(end - begin) // size)
            # The gaps between parts are zeros.
            memory = Strided.packed(self._base.memory.data_ptr() + begin, (count,), size)
            found.append(WeighTable([(memory, Strided.packed(begin, (count,), size))], size, self._device))
        return found

    def _plain(self, found: _Held) -> list[tuple[Strided, Strided, int]]:
        """What is not encoded, and its place in the base."""
        base = self._base.memory.data_ptr()
        return [(Strided.of(v), _kept(p, base), 0) for p, v in found if isinstance(v, torch.Tensor)]

    def _make_steps(self, held: Sequence[_Held]) -> list[list[_Step]]:
        """Of each section."""
        plain = [self._plain(found) for found in held]
        groups = _groups(held, self._base.memory.data_ptr())
        nbytes = sum(padded(strip.view.nbytes) for group in groups for strip in _later(group))
        # What is made before its section's turn stays here.
        self._ahead, ahead_end = torch.empty(nbytes, dtype=torch.uint8, device=self._device), 0
        steps: list[list[_Step]] = [[] for _ in held]
        for batch in _batches(groups, self._scratch.numel()):
            encoded: list[tuple[EncodedView, torch.Tensor]] = []
            compared: list[tuple[Strided, Strided, int]] = []
            end, section = 0, batch[0].section
            for strip in batch:
                # A tensor, into which formats without a kernel can be encoded too.
                if strip.section == section:
                    place = _cut(self._scratch, end, strip.view)
                    end += padded(strip.view.nbytes)
                    compared.append((Strided.of(place), strip.kept, 0))
                else:
                    place = _cut(self._ahead, ahead_end, strip.view)
                    ahead_end += padded(strip.view.nbytes)
                    plain[strip.section].append((Strided.of(place), strip.kept, 0))
                encoded.append((strip.view, place))
            steps[section].append(_Step(make_encoders(encoded, self._device), collapse(compared)))
        for found, rows in zip(steps, plain, strict=True):
            if rows:
                found.append(_Step([], collapse(rows)))
        return steps

    def _make_launches(self, rows: Ints, itemsize: int) -> list[tuple[Launch, list[torch.Tensor]]]:
        """Kernels, each with what its launches are told on the device: the address of the base, and which tiles they take."""
        from ..packing.kernels import COPY_WORDS
        from .kernels import WORDS, pack_changed

        like, made = self._like, []
        # A block has no more elements than its index can tell.
        tile = min(_TILE, blocks.MOST * itemsize // WIDEST)
        for table in build_tables(rows, tile):
            address, tiles = self._base.memory.data_ptr(), len(table.tiles)
            cuts = [(begin, min(begin + _TILES, tiles)) for begin in range(0, tiles, _TILES)]
            # Padded: the kernel is compiled for addresses that are multiples of 16.
            places = list(torch.tensor([(address, *cut, 0) for cut in cuts], device=self._device))
            out = (places[0], like.counts, self._base.total, like.entries, like.data, self._listed)
            word, _, lanes = COPY_WORDS[table.unit]
            elements = table.unit // itemsize
            constants = (
                COLUMNS,
                word,
                lanes,
                WORDS[itemsize],
                itemsize,
                blocks.alignment(itemsize),
                elements,
                tile,
                min(_CHUNK // elements, _TILE // 4),
                table.nested,
            )
            launch = Launch(
                pack_changed, _WARPS, table, constants, self._device, out, self._programs, _REGISTERS
            )
            made.append((launch, places))
        return made


def programs_of(device: torch.device, each: int) -> int:
    """Programs that take tiles or blocks in turns, ``each`` for a multiprocessor."""
    if device.type != "cuda":  # Triton's interpreter, in tests
        return 3
    return each * torch.cuda.get_device_properties(device).multi_processor_count


class WeighTable:
    """Weight sums of memory (first) at places of a stream (second), of elements of one size, prepared once.

    Its tables take about a thousandth of the memory.
    """

    def __init__(self, pairs: Sequence[tuple[Strided, Strided]], itemsize: int, device: torch.device):
        from .kernels import WORDS, weigh

        total = torch.zeros(1, dtype=torch.int64, device=device)
        self._launches = []
        for table in build_tables(collapse((a, b, 0) for a, b in pairs), _WEIGH_TILE):
            constants: tuple[Any, ...] = (
                COLUMNS,
                WORDS[itemsize],
                itemsize,
                table.unit // itemsize,
                _WEIGH_TILE,
                table.nested,
            )
            self._launches.append(Launch(weigh, _WEIGH_WARPS, table, constants, device, (total,)))

    def add_to(self, total: torch.Tensor) -> None:
        """Enqueue the sum, which is added to ``total``, int64 ``[1]``."""
        for launch in self._launches:
            launch(total)


def encoding_scratch(
    streams: Iterable[Sequence[Sequence[Part]]], views: LiveViews, device: torch.device
) -> torch.Tensor:
    """Memory for what is encoded, which lies nowhere on the sender: for the sections of any of these streams."""
    most = 0
    for sections in streams:
        held = [_held(parts, views) for parts in sections]
        sizes = [sum(padded(strip.view.nbytes) for strip in group) for group in _groups(held, 0)]
        most = max(most, *sizes, min(_ENCODED_AT_ONCE, sum(sizes))) if sizes else most
    return torch.empty(most, dtype=torch.uint8, device=device)


def _held(parts: Sequence[Part], views: LiveViews) -> _Held:
    return [(part, views.of(part.segment)) for part in parts]


def _kept(part: Part, base: int) -> Strided:
    """A part's place in the base that begins at this address."""
    return Strided.packed(base + part.start, part.shape, part.itemsize)


def _cut(memory: torch.Tensor, begin: int, live: LiveView) -> torch.Tensor:
    """Memory from a byte on for what is packed of a view."""
    nbytes = prod(live.shape) * live.dtype.itemsize
    return memory[begin : begin + nbytes].view(live.dtype).view(live.shape)


def _groups(held: Sequence[_Held], base: int) -> list[list[_Strip]]:
    """Strips of all that is encoded: of a group are those that are made together, the first section's first."""
    found: dict[object, list[_Strip]] = {}
    for section, parts in enumerate(held):
        for part, live in parts:
            if isinstance(live, EncodedView):
                for view, kept in _strips(live, _kept(part, base)):
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
    """A part in strips, each with its place in the base, where it has no gaps."""
    found = [(view.slice(strip), kept.slice(strip)) for strip in view.strips(CHECKED_AT_ONCE)]
    return found if all(place.contiguous for _, place in found) else [(view, kept)]


def stream_rows(pairs: Sequence[tuple[Strided, Strided]]) -> tuple[Ints, Ints]:
    """Rows of memory (first) at places of a stream (second), in the stream's order: starts ``[n + 1]``, rows ``[n, 6]``, as
    :func:`.kernels.apply_blocks` has them."""
    rows = collapse((a, b, 0) for a, b in pairs)
    starts = np.append(rows[:, 1], np.int64(1) << 62)
    assert (np.diff(starts) > 0).all(), "parts stand in the stream's order"
    return starts, np.ascontiguousarray(np.column_stack([rows[:, [0, 3, 4, 5, 6]], row_bytes(rows)]))
