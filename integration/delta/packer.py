"""The sender's side of a stream: the base, and what packs the difference from it, or what a mask has in its place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from ..packing import CopyTable, EncodedView, Strided, make_encoders
from ..packing.rows import COLUMNS, Ints, Table, build_tables, collapse, row_bytes
from ..packing.tables import Launch
from ..transport.storage import LiveViews
from . import blocks
from .blocks import COUNTS, Counts
from .mask import ChangeTable, Mask
from .steps import DeviceSections, HostSections, Sections, cut, encoding_scratch, held_of, plain_rows
from .streams import Part, Stream

# Elements that a program looks at for one block, those of them that it packs in one go, and its warps.
TILE, CHUNK, WARPS = blocks.MOST, 512, 8
# Programs of a multiprocessor that pack at once: they wait for memory most of the time.
PROGRAMS = 4
# Elements that a program lists at most, where the marks themselves are sent in the place of a list.
LISTED = 1 << 14
_WEIGH_TILE, _WEIGH_WARPS = 1024, 4
# A block always fits, of elements of 8 bytes too.
LEAST_ROOM = 8 * blocks.MOST
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
        # What differs from it, for kernels, which find that out and pack it in two goes.
        self.marks: Mask | None = None


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
        entries: blocks that all sections together may have at most.
    """

    itemsizes: list[int]
    entries: int

    def take(self) -> None:
        """Set the base to the weights as they are; nothing is marked then."""

    def begin(self, weighed: Collection[int]) -> None:
        """Before the sections of a refit.

        Args:
            weighed: sections whose weights are read for their sum, whatever the mask tells; a base is compared with all weights.
        """

    def pack(self, sections: Sequence[int], room: Room) -> None:
        """Pack what differs from the base in sections of elements of one size, as far as there is room, and bring the base up to that.

        With a mask: what is marked, which loses its marks; and the first time, set the sums of sections that are weighed.
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

    def begin(self, weighed: Collection[int]) -> None:
        return None

    def pack(self, sections: Sequence[int], room: Room) -> None:
        counts = [0] * COUNTS
        packed = blocks.Packed(room.entries.numpy(), room.data.numpy())
        for part, new in chain.from_iterable(map(self.now, sections)):
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
        self._to_weigh: set[int] = set()

    def take(self) -> None:
        for section in range(len(self.itemsizes) if self._weighs else 0):
            self._mask.sums[section, 0] = 0
            for part, new in self.now(section):
                self._mask.sums[section, 0] += _weigh(part, new)
        self._mask.memory.zero_()

    def begin(self, weighed: Collection[int]) -> None:
        self._to_weigh = set(weighed)

    def pack(self, sections: Sequence[int], room: Room) -> None:
        counts = [0] * COUNTS
        packed = blocks.Packed(room.entries.numpy(), room.data.numpy())
        for section in sections:
            weighs = section in self._to_weigh
            if weighs:
                self._to_weigh.remove(section)
                self._mask.sums[section, 0] = 0
            for part, new in self.now(section):
                flags = self._mask.read(part)
                sent = blocks.pack(new, np.flatnonzero(flags), part.start, packed, counts)
                flags[sent] = False
                self._mask.write(part, flags)
                if weighs:
                    self._mask.sums[section, 0] += _weigh(part, new)
        room.counts.copy_(torch.tensor(counts))


def _most_blocks(sections: Sections) -> int:
    """Of all sections on a CPU."""
    return sum(
        -(-part.segment.nbytes // part.itemsize // blocks.MOST) for parts in sections for part in parts
    )


def _weigh(part: Part, new: blocks.Bits) -> int:
    return blocks.weigh(new, blocks.places(part.start, new.size, part.itemsize))


class _DevicePacker(DeviceSections):
    """What packers by kernels have in common.

    Args:
        sections: of the stream.
        views: of what lies on this rank.
        mask: what is packed.
        scratch: of :func:`.steps.encoding_scratch`.
        copy: of the stream, uint8, which a look brings up to the weights and from which they are packed; None if they are packed from
            where they lie, or are encoded.
    """

    def __init__(
        self,
        sections: Sections,
        views: LiveViews,
        mask: Mask,
        scratch: torch.Tensor,
        copy: torch.Tensor | None = None,
    ):
        super().__init__(sections, views, scratch)
        self._to_look_at = set[int]()
        programs = programs_of(self._device, PROGRAMS)
        listed = torch.empty(programs, LISTED, dtype=torch.uint16, device=self._device)
        # Of each section, by the step after which it is packed.
        self._tables = [
            {number: PackTable(rows, size, mask, listed, self._device) for number, rows in found.items()}
            for found, size in zip(self._rows(sections, copy), self.itemsizes, strict=True)
        ]
        self.entries = sum(table.tiles for tables in self._tables for table in tables.values())

    def _rows(self, sections: Sections, copy: torch.Tensor | None) -> list[dict[int, Ints]]:
        """What is packed of each section, by the step after which it is."""
        if copy is None:
            return [{number: step.rows for number, step in enumerate(steps)} for steps in self.steps]
        return [
            {len(steps) - 1: collapse(_copied(part, copy.data_ptr()) for part in parts)}
            for parts, steps in zip(sections, self.steps, strict=True)
        ]

    def begin(self, weighed: Collection[int]) -> None:
        self._to_look_at = set(weighed)

    def pack(self, sections: Sequence[int], room: Room) -> None:
        room.counts.zero_()
        for section in sections:
            looks = section in self._to_look_at
            self._to_look_at.discard(section)
            self._read(section, room, looks=looks)

    def _read(self, section: int, room: Room | None, *, looks: bool) -> None:
        """Pack a section into a room, if there is one, and look at all of its weights first, if that is due."""
        if looks:
            self._begin_look(section)
        for number, step in enumerate(self.steps[section]):
            packs = room is not None and number in self._tables[section]
            for encoder in step.encoders if looks or packs else ():
                encoder.launch()
            if looks:
                self._look(section, number)
            if room is not None and packs:
                self._tables[section][number].pack(room)

    def _begin_look(self, section: int) -> None:
        """Before the first step of a section that is looked at."""

    def _look(self, section: int, step: int) -> None:
        """At all weights of a step, once they are encoded and before they are packed."""
        raise NotImplementedError


class DevicePacker(_DevicePacker):
    """By kernels that mark what differs from the base, bring it up to that, and pack what is marked."""

    def __init__(self, sections: Sections, views: LiveViews, base: Base, scratch: torch.Tensor):
        if base.marks is None:
            base.marks = Mask(base.stream, 0, scratch.device)
        # On the host values that are read one by one would cross PCIe in lines of 32 bytes.
        copy = base.memory if base.memory.device == scratch.device else None
        super().__init__(sections, views, base.marks, scratch, copy)
        self._base = base
        everything = [pair for parts in sections for pair in held_of(parts, views)]
        # What take does: all is packed into the base.
        encoded = [(v, cut(base.memory, p.start, v)) for p, v in everything if isinstance(v, EncodedView)]
        self._encoders = make_encoders(encoded, self._device)
        self._copies = CopyTable.of(collapse(plain_rows(everything, base.memory.data_ptr())), self._device)
        self._weighed = self._weigh_tables()
        self._changes = [
            [
                ChangeTable(step.rows, size, base.marks, base.total, self._device, marks=True, copies=True)
                for step in steps
            ]
            for steps, size in zip(self.steps, self.itemsizes, strict=True)
        ]

    def begin(self, weighed: Collection[int]) -> None:
        super().begin(range(len(self.steps)))

    def take(self) -> None:
        for encoder in self._encoders:
            encoder.launch()
        self._copies.launch()
        self._base.total.zero_()
        for table in self._weighed:
            table.add_to(self._base.total)

    def _look(self, section: int, step: int) -> None:
        self._changes[section][step].compare(self._base.memory)

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
    """By kernels, which read a mask and what it marks, and weights for their sums."""

    def __init__(self, sections: Sections, views: LiveViews, mask: Mask, scratch: torch.Tensor, weighs: bool):
        super().__init__(sections, views, mask, scratch)
        self._mask, self._weighs = mask, weighs
        self._weights = [
            [WeighTable(step.rows, size, self._device) for step in steps]
            for steps, size in zip(self.steps, self.itemsizes, strict=True)
        ]

    def take(self) -> None:
        for section in range(len(self.steps) if self._weighs else 0):
            self._read(section, None, looks=True)
        self._mask.memory.zero_()

    def _begin_look(self, section: int) -> None:
        self._mask.sums[section].zero_()

    def _look(self, section: int, step: int) -> None:
        self._weights[section][step].add_to(self._mask.sums[section])


class PackTable:
    """What is packed of memory (side a of the rows) by the marks of its places in a stream (side b), prepared once.

    Args:
        rows: of :class:`.steps.Step`, of elements of one size.
        itemsize: of an element.
        mask: of the stream.
        listed: scratch memory, uint16 ``[programs, LISTED]``.
        device: of all of it.

    Attributes:
        tiles: blocks at most.
    """

    def __init__(self, rows: Ints, itemsize: int, mask: Mask, listed: torch.Tensor, device: torch.device):
        from .kernels import WORDS, pack_marked

        self._mask, self._listed = mask, listed  # the mask's memory is written by address
        starts, held = rows[:, 1], strided_rows(rows)
        counts = -(-held[:, 5] // (itemsize * TILE))
        table = np.column_stack([held, starts, np.cumsum(counts) - counts])
        self.tiles = int(counts.sum())
        tiles = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        self._place = torch.tensor([*mask.place(itemsize), self.tiles], device=device)
        constants = (
            table.shape[1],
            WORDS[itemsize],
            itemsize,
            blocks.alignment(itemsize),
            TILE,
            CHUNK,
            LISTED,
        )
        like = Room(1, 1, device)
        out = (self._place, like.counts, like.entries, like.data, listed)
        registers = registers_of(PROGRAMS, WARPS)
        found = Table(itemsize, True, np.ascontiguousarray(table), tiles, int(held[:, 5].sum()))
        self._launch = Launch(pack_marked, WARPS, found, constants, device, out, len(listed), registers)

    def pack(self, room: Room) -> None:
        """Enqueue it; what is packed loses its marks."""
        self._launch(self._place, room.counts, room.entries, room.data, self._listed)


def _copied(part: Part, address: int) -> tuple[Strided, Strided, int]:
    """A part in a copy of its stream at this address, and its place in the stream."""
    shape = (part.segment.nbytes // part.itemsize,)
    return (
        Strided.packed(address + part.start, shape, part.itemsize),
        Strided.packed(part.start, shape, part.itemsize),
        0,
    )


def registers_of(each: int, warps: int) -> int:
    """Of a thread, so that so many programs of a multiprocessor fit at once: it has 2^16, and gives them out 8 a thread at a time."""
    return (1 << 16) // (each * warps * 32) // 8 * 8


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


def strided_rows(rows: Ints) -> Ints:
    """Side a of rows of :func:`..packing.rows.collapse`, int64 ``[n, 6]``, as :func:`.kernels.apply_blocks` has them."""
    return np.ascontiguousarray(np.column_stack([rows[:, [0, 3, 4, 5, 6]], row_bytes(rows)]))
