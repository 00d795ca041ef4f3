"""The sender's side of a stream: the base, and what packs the difference from it, or what a mask has in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..packing import CopyTable, EncodedView, Strided, make_encoders
from ..packing.rows import COLUMNS, WIDEST, Ints, build_tables, collapse, row_bytes
from ..packing.tables import Launch
from ..transport.storage import LiveViews
from . import blocks
from .blocks import COUNTS, Counts
from .mask import Mask
from .steps import DeviceSections, HostSections, Sections, cut, encoding_scratch, held_of, plain_rows
from .streams import Part, Stream

# Elements of those that differ that a program looks at in one go, and its warps.
_CHUNK, _WARPS = 1024, 4
# Tiles of a launch at most: what else wants the GPU meanwhile, as a header that is sent, waits for the end of a launch, some 0.4 ms.
_TILES = 1 << 15
_WEIGH_TILE, _WEIGH_WARPS = 512, 4
# A block always fits.
LEAST_ROOM = 1 << 18
# Bytes that are encoded before they are compared. Twice in each such step the GPU runs out of work, for some 10 µs.
_ENCODED_AT_ONCE = 128 << 20


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

    Each section is packed in its turn first (:mod:`.steps`); further passes may come in any order.

    Attributes:
        itemsizes: bytes of an element of each section.
        entries: blocks that a section may have at most.
    """

    itemsizes: list[int]
    entries: int

    def take(self) -> None:
        """Set the base to the weights as they are; nothing is marked then."""

    def begin(self) -> None:
        """Before the sections of a refit."""

    def pack(self, section: int, room: Room) -> None:
        """Pack what differs from the base in a section, as far as there is room, and bring the base up to that.

        With a mask: what is marked, which loses its marks; and the first time, add the section's weights to the sum.
        """


def make_packers(
    streams: Sequence[tuple[Sections, Base | Mask]], views: LiveViews, device: torch.device, *, weighs: bool
) -> list[Packer]:
    """A packer of the weights where they lie now, for the sections of each stream and its base or mask.

    They are for one CUDA stream: what they encode goes to the same scratch memory.

    Args:
        streams: of this rank.
        views: of the weights.
        device: of what is packed.
        weighs: whether somebody compares weight sums; with a mask none is made otherwise.

    Raises:
        NotComputable: the device can't encode from where a weight lies, or into memory.
    """
    if device.type != "cuda":
        return [
            HostMaskPacker(sections, views, kept, device, weighs)
            if isinstance(kept, Mask)
            else HostPacker(sections, views, kept, device)
            for sections, kept in streams
        ]
    scratch = encoding_scratch([sections for sections, _ in streams], views, device, _ENCODED_AT_ONCE)
    return [
        DeviceMaskPacker(sections, views, kept, scratch, weighs)
        if isinstance(kept, Mask)
        else DevicePacker(sections, views, kept, scratch)
        for sections, kept in streams
    ]


class HostPacker(HostSections):
    """On a CPU."""

    def __init__(self, sections: Sections, views: LiveViews, base: Base, device: torch.device):
        super().__init__(sections, views, device)
        self._base, self.entries = base, _most_blocks(sections)

    def take(self) -> None:
        self._base.total.zero_()
        for section in range(len(self.itemsizes)):
            for part, new in self.now(section):
                self._kept(part)[:] = new
                self._base.total += _weigh(part, new)

    def begin(self) -> None:
        return None

    def pack(self, section: int, room: Room) -> None:
        counts = [0] * COUNTS
        packed = blocks.Packed(room.entries.numpy(), room.data.numpy())
        for part, new in self.now(section):
            kept = self._kept(part)
            sent = blocks.pack(new, np.flatnonzero(new != kept), part.start, packed, counts)
            places = part.start + part.itemsize * sent
            self._base.total += blocks.weigh_change(new[sent], kept[sent], places)
            kept[sent] = new[sent]
        room.counts.copy_(torch.tensor(counts))

    def _kept(self, part: Part) -> blocks.Bits:
        memory = self._base.memory[part.start : part.start + part.segment.nbytes]
        return memory.numpy().view(f"<i{part.itemsize}")


class HostMaskPacker(HostSections):
    """On a CPU, by a mask."""

    def __init__(self, sections: Sections, views: LiveViews, mask: Mask, device: torch.device, weighs: bool):
        super().__init__(sections, views, device)
        self._mask, self._weighs, self.entries = mask, weighs, _most_blocks(sections)
        self._weighed: set[int] = set()

    def take(self) -> None:
        self.begin()
        for section in range(len(self.itemsizes) if self._weighs else 0):
            for part, new in self.now(section):
                self._mask.total += _weigh(part, new)
        self._mask.memory.zero_()

    def begin(self) -> None:
        self._mask.total.zero_()
        self._weighed = set()

    def pack(self, section: int, room: Room) -> None:
        counts = [0] * COUNTS
        packed = blocks.Packed(room.entries.numpy(), room.data.numpy())
        weighs = self._weighs and section not in self._weighed
        self._weighed.add(section)
        for part, new in self.now(section):
            flags = self._mask.read(part)
            sent = blocks.pack(new, np.flatnonzero(flags), part.start, packed, counts)
            flags[sent] = False
            self._mask.write(part, flags)
            if weighs:
                self._mask.total += _weigh(part, new)
        room.counts.copy_(torch.tensor(counts))


def _most_blocks(sections: Sections) -> int:
    """Of a section on a CPU."""
    found = (sum(-(-p.segment.nbytes // p.itemsize // blocks.MOST) for p in parts) for parts in sections)
    return max(found, default=0)


def _weigh(part: Part, new: blocks.Bits) -> int:
    return blocks.weigh(new, blocks.places(part.start, new.size, part.itemsize))


class _DevicePacker(DeviceSections):
    """What packers by kernels have in common.

    Args:
        sections: of the stream.
        views: of what lies on this rank.
        kept: base or mask of the stream.
        scratch: of :func:`.steps.encoding_scratch`.

    Attributes:
        tile: units that a program looks at in one go.
        each: programs of a multiprocessor.
    """

    tile: int
    each: int

    def __init__(self, sections: Sections, views: LiveViews, kept: Base | Mask, scratch: torch.Tensor):
        origin = 0 if isinstance(kept, Mask) else kept.memory.data_ptr()
        super().__init__(sections, views, origin, scratch)
        self._kept = kept
        # Of the kernels' arguments, as they are compiled for.
        self._like = Room(1, 1, self._device)
        self._programs = programs_of(self._device, self.each)
        self._listed = torch.empty(self._programs, self.tile, dtype=torch.uint16, device=self._device)
        self._launches = [
            [self._make_launches(step.rows, size) for step in steps]
            for steps, size in zip(self.steps, self.itemsizes, strict=True)
        ]
        tables = [sum(launch.tiles for made in steps for launch, _ in made) for steps in self._launches]
        self.entries = max(tables, default=0)

    def _encode(self, section: int, step: int) -> None:
        for encoder in self.steps[section][step].encoders:
            encoder.launch()

    def _pack_step(self, section: int, step: int, room: Room) -> None:
        """Pack what has been encoded for a step, and what it reads besides."""
        out = (room.counts, self._kept.total, room.entries, room.data, self._listed)
        for launch, places in self._launches[section][step]:
            for place in places:
                launch(place, *out)

    def _make_launches(self, rows: Ints, itemsize: int) -> list[tuple[Launch, list[torch.Tensor]]]:
        """Kernels, each with what its launches are told on the device: the address of base or mask, and which tiles they take."""
        from ..packing.kernels import COPY_WORDS
        from .kernels import WORDS, pack_changed

        like, made, address, marked = self._like, [], self._kept.memory.data_ptr(), False
        if isinstance(self._kept, Mask):
            address, marked = address + self._kept.origin(itemsize), True
        # A block has no more elements than its index can tell.
        tile = min(self.tile, blocks.MOST * itemsize // WIDEST)
        for table in build_tables(rows, tile):
            tiles = len(table.tiles)
            cuts = [(begin, min(begin + _TILES, tiles)) for begin in range(0, tiles, _TILES)]
            # Padded: the kernel is compiled for addresses that are multiples of 16.
            places = list(torch.tensor([(address, *cut, 0) for cut in cuts], device=self._device))
            out = (places[0], like.counts, self._kept.total, like.entries, like.data, self._listed)
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
                min(_CHUNK // elements, _CHUNK // 4),
                table.nested,
                marked,
            )
            registers = registers_of(self.each)
            launch = Launch(
                pack_changed, _WARPS, table, constants, self._device, out, self._programs, registers
            )
            made.append((launch, places))
        return made


class DevicePacker(_DevicePacker):
    """By kernels, which read weights and base once."""

    tile, each = 1024, 5

    def __init__(self, sections: Sections, views: LiveViews, base: Base, scratch: torch.Tensor):
        super().__init__(sections, views, base, scratch)
        self._base = base
        everything = [pair for parts in sections for pair in held_of(parts, views)]
        # What take does: all is packed into the base.
        encoded = [(v, cut(base.memory, p.start, v)) for p, v in everything if isinstance(v, EncodedView)]
        self._encoders = make_encoders(encoded, self._device)
        self._copies = CopyTable.of(collapse(plain_rows(everything, base.memory.data_ptr())), self._device)
        self._weighed = self._weigh_tables()

    def take(self) -> None:
        for encoder in self._encoders:
            encoder.launch()
        self._copies.launch()
        self._base.total.zero_()
        for table in self._weighed:
            table.add_to(self._base.total)

    def begin(self) -> None:
        return None

    def pack(self, section: int, room: Room) -> None:
        room.counts.zero_()
        for step in range(len(self.steps[section])):
            self._encode(section, step)
            self._pack_step(section, step, room)

    def _weigh_tables(self) -> list[WeighTable]:
        """Of the base."""
        found = []
        for size, (begin, end) in self._base.stream.extents.items():
            count = -(-(end - begin) // size)
            # The gaps between parts are zeros.
            memory = Strided.packed(self._base.memory.data_ptr() + begin, (count,), size)
            rows = collapse([(memory, Strided.packed(begin, (count,), size), 0)])
            found.append(WeighTable(rows, size, self._device))
        return found


class DeviceMaskPacker(_DevicePacker):
    """By kernels, which read a mask and what it marks, and all weights for their sum."""

    # They wait for memory most of the time.
    tile, each = 2048, 8

    def __init__(self, sections: Sections, views: LiveViews, mask: Mask, scratch: torch.Tensor, weighs: bool):
        super().__init__(sections, views, mask, scratch)
        self._mask, self._weighed = mask, set[int]()
        self._weights = [
            [WeighTable(step.rows, size, self._device) if weighs else None for step in steps]
            for steps, size in zip(self.steps, self.itemsizes, strict=True)
        ]

    def take(self) -> None:
        self.begin()
        for section in range(len(self.steps)):
            self._read(section, None)
        self._mask.memory.zero_()

    def begin(self) -> None:
        self._mask.total.zero_()
        self._weighed = set()

    def pack(self, section: int, room: Room) -> None:
        room.counts.zero_()
        self._read(section, room)

    def _read(self, section: int, room: Room | None) -> None:
        """Pack a section into a room, if there is one, and weigh it if that was not done."""
        weighs = section not in self._weighed
        self._weighed.add(section)
        for step, weights in enumerate(self._weights[section]):
            self._encode(section, step)
            if room is not None:
                self._pack_step(section, step, room)
            if weights is not None and weighs:
                weights.add_to(self._mask.total)


def registers_of(each: int) -> int:
    """Of a thread, so that so many programs of a multiprocessor fit at once: it has 2^16, and gives them out 8 a thread at a time."""
    return (1 << 16) // (each * _WARPS * 32) // 8 * 8


def programs_of(device: torch.device, each: int) -> int:
    """Programs that take tiles or blocks in turns, ``each`` for a multiprocessor."""
    if device.type != "cuda":  # Triton's interpreter, in tests
        return 3
    return each * torch.cuda.get_device_properties(device).multi_processor_count


class WeighTable:
    """Weight sums of memory (side a of the rows) at places of a stream (side b), of elements of one size, prepared once.

    Its tables take about a thousandth of the memory.
    """

    def __init__(self, rows: Ints, itemsize: int, device: torch.device):
        from .kernels import WORDS, weigh

        total = torch.zeros(1, dtype=torch.int64, device=device)
        self._launches = []
        for table in build_tables(rows, _WEIGH_TILE):
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


def stream_rows(pairs: Sequence[tuple[Strided, Strided]]) -> tuple[Ints, Ints]:
    """Rows of memory (first) at places of a stream (second), in the stream's order: starts ``[n + 1]``, rows ``[n, 6]``, as
    :func:`.kernels.apply_blocks` has them."""
    rows = collapse((a, b, 0) for a, b in pairs)
    starts = np.append(rows[:, 1], np.int64(1) << 62)
    assert (np.diff(starts) > 0).all(), "parts stand in the stream's order"
    return starts, np.ascontiguousarray(np.column_stack([rows[:, [0, 3, 4, 5, 6]], row_bytes(rows)]))
