"""The sender's side of a stream: the base, and what packs the difference from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

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
_WEIGH_TILE, _WEIGH_WARPS = 512, 4
# A block always fits.
LEAST_ROOM = 1 << 18


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


def make_packer(
    sections: Sequence[Sequence[Part]], views: LiveViews, base: Base, device: torch.device
) -> Packer:
    """A packer of the weights where they lie now.

    Raises:
        NotComputable: the device can't encode from where a weight lies, or into memory.
    """
    if device.type == "cuda":
        return DevicePacker(sections, views, base, device)
    return HostPacker(sections, views, base, device)


class HostPacker:
    """On a CPU."""

    def __init__(
        self, sections: Sequence[Sequence[Part]], views: LiveViews, base: Base, device: torch.device
    ):
        self._sections, self._base = sections, base
        self.itemsizes = [parts[0].itemsize for parts in sections]
        counts = [sum(-(-p.segment.nbytes // p.itemsize // blocks.MOST) for p in parts) for parts in sections]
        self.entries = max(counts, default=0)
        sizes = [parts[-1].start + parts[-1].segment.nbytes - parts[0].start for parts in sections]
        self._packed = torch.zeros(max(sizes, default=0), dtype=torch.uint8)
        self._copies = [
            make_copy(
                [(live, self._place(parts, p, live)) for p in parts for live in [views.of(p.segment)]], device
            )
            for parts in sections
        ]

    def take(self) -> None:
        self._base.total.zero_()
        for section, parts in enumerate(self._sections):
            self._copies[section].launch()
            for part in parts:
                new, kept = self._bits(parts, part)
                kept[:] = new
                self._base.total += blocks.weigh(new, blocks.places(part.start, new.size, part.itemsize))

    def pack(self, section: int, room: Room) -> None:
        parts = self._sections[section]
        self._copies[section].launch()
        counts = [0] * COUNTS
        packed = blocks.Packed(room.entries.numpy(), room.data.numpy())
        for part in parts:
            new, kept = self._bits(parts, part)
            self._base.total += blocks.pack(new, kept, part.start, packed, counts)
        room.counts.copy_(torch.tensor(counts))

    def _place(self, parts: Sequence[Part], part: Part, live: LiveView) -> torch.Tensor:
        begin = part.start - parts[0].start
        return self._packed[begin : begin + part.segment.nbytes].view(live.dtype).view(part.shape)

    def _bits(self, parts: Sequence[Part], part: Part) -> tuple[blocks.Bits, blocks.Bits]:
        """Of a part as it is now, and in the base."""
        begin = part.start - parts[0].start
        size, kind = part.segment.nbytes, f"<i{part.itemsize}"
        new = self._packed[begin : begin + size].numpy().view(kind)
        return new, self._base.memory[part.start : part.start + size].numpy().view(kind)


class _Step:
    """What is encoded into scratch memory first, and rows of what is compared then: with the base, which is side b."""

    def __init__(self, encoders: Sequence[Encoder], rows: Ints):
        self.encoders, self.rows = encoders, rows


class DevicePacker:
    """By kernels, which read weights and base once."""

    def __init__(
        self, sections: Sequence[Sequence[Part]], views: LiveViews, base: Base, device: torch.device
    ):
        self._base, self._device = base, device
        self.itemsizes = [parts[0].itemsize for parts in sections]
        held = [[(part, views.of(part.segment)) for part in parts] for parts in sections]
        self._scratch = _scratch([live for found in held for _, live in found], device)
        self._steps = [self._make_steps(found) for found in held]
        # Of the kernels' arguments, as they are compiled for.
        self._like = Room(1, 1, device)
        self._programs = programs_of(device, _PROGRAMS)
        self._listed = torch.empty(self._programs, _TILE, dtype=torch.uint16, device=device)
        self._launches = [
            [(step.encoders, self._make_launches(step.rows, size)) for step in steps]
            for steps, size in zip(self._steps, self.itemsizes, strict=True)
        ]
        tables = [sum(launch.tiles for _, made in steps for launch, _ in made) for steps in self._launches]
        self.entries = max(tables, default=0)

    def take(self) -> None:
        for steps in self._steps:
            for step in steps:
                for encoder in step.encoders:
                    encoder.launch()
                CopyTable.of(step.rows, self._device).launch()
        self._base.total.zero_()
        for size, (begin, end) in self._base.stream.extents.items():
            count = -(-(end - begin) // size)
            # The gaps between parts are zeros.
            memory = Strided.packed(self._base.memory.data_ptr() + begin, (count,), size)
            pairs = [(memory, Strided.packed(begin, (count,), size))]
            WeighTable(pairs, size, self._device).add_to(self._base.total)

    def pack(self, section: int, room: Room) -> None:
        room.counts.zero_()
        out = (room.counts, self._base.total, room.entries, room.data, self._listed)
        for encoders, launches in self._launches[section]:
            for encoder in encoders:
                encoder.launch()
            for launch, places in launches:
                for place in places:
                    launch(place, *out)

    def _make_steps(self, found: Sequence[tuple[Part, LiveView]]) -> list[_Step]:
        plain = [
            (Strided.of(live), self._kept(part), 0) for part, live in found if isinstance(live, torch.Tensor)
        ]
        steps = [_Step([], collapse(plain))] if plain else []
        encoded: list[tuple[EncodedView, torch.Tensor]] = []
        compared: list[tuple[Strided, Strided, int]] = []
        end = 0
        for part, live in found:
            if isinstance(live, torch.Tensor):
                continue
            for view, kept in _strips(live, self._kept(part)):
                if end + view.nbytes > self._scratch.numel():
                    steps.append(_Step(make_encoders(encoded, self._device), collapse(compared)))
                    encoded, compared, end = [], [], 0
                # A tensor, into which formats without a kernel can be encoded too.
                place = self._scratch[end : end + view.nbytes].view(view.dtype).view(view.shape)
                end += padded(view.nbytes)
                encoded.append((view, place))
                compared.append((Strided.of(place), kept, 0))
        if encoded:
            steps.append(_Step(make_encoders(encoded, self._device), collapse(compared)))
        return steps

    def _kept(self, part: Part) -> Strided:
        return Strided.packed(self._base.memory.data_ptr() + part.start, part.shape, part.itemsize)

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
            launch = Launch(pack_changed, _WARPS, table, constants, self._device, out, self._programs)
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


def _scratch(views: Sequence[LiveView], device: torch.device) -> torch.Tensor:
    """Memory for what is encoded, which lies nowhere on the sender: as little as some strips, as the checks of ``ipc`` take."""
    encoded = [view for view in views if isinstance(view, EncodedView)]
    strips = [strip.nbytes for view in encoded for strip, _ in _strips(view, _nowhere(view))]
    together = min(CHECKED_AT_ONCE, sum(map(padded, strips)))
    return torch.empty(padded(max([together, *strips])), dtype=torch.uint8, device=device)


def _strips(view: EncodedView, kept: Strided) -> list[tuple[EncodedView, Strided]]:
    """A part in strips, each with its place in the base, where it has no gaps."""
    found = [(view.slice(strip), kept.slice(strip)) for strip in view.strips(CHECKED_AT_ONCE)]
    return found if all(place.contiguous for _, place in found) else [(view, kept)]


def _nowhere(view: EncodedView) -> Strided:
    return Strided.packed(0, view.shape, view.dtype.itemsize)


def stream_rows(pairs: Sequence[tuple[Strided, Strided]]) -> tuple[Ints, Ints]:
    """Rows of memory (first) at places of a stream (second), in the stream's order: starts ``[n + 1]``, rows ``[n, 6]``, as
    :func:`.kernels.apply_blocks` has them."""
    rows = collapse((a, b, 0) for a, b in pairs)
    starts = np.append(rows[:, 1], np.int64(1) << 62)
    assert (np.diff(starts) > 0).all(), "parts stand in the stream's order"
    return starts, np.ascontiguousarray(np.column_stack([rows[:, [0, 3, 4, 5, 6]], row_bytes(rows)]))
