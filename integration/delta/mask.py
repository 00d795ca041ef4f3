"""What a sender keeps in place of a base with ``delta_base: optimizer``: which elements recorded steps have changed, and the weight
sums that they have left.

A step is recorded with a copy of all that is sent, which is made before it, compared after it, and freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..packing.rows import COLUMNS, Ints, build_tables
from ..packing.tables import Launch
from ..plan import aligned
from ..transport.storage import LiveViews
from .blocks import Bits, weigh_change
from .steps import DeviceSections, HostSections, Sections, encoding_scratch
from .streams import Part, Stream

_TILE, _WARPS = 512, 4

Flags = npt.NDArray[np.bool_]


class Mask:
    """For each element of a stream whether it may differ from what was last sent; and for each section its weight sum.

    Elements of one size stand together in the stream, and so do their bits: 8 to a byte, the first one's the lowest. Bits of each size
    begin at a multiple of 16 bytes.

    Args:
        stream: whose elements are marked.
        sections: of the stream, how many.
        device: of the mask.

    Attributes:
        memory: uint8, all zeros at first.
        sums: for each section the weight sum of its elements as they were last weighed, and changed by what was marked since; int64
            ``[sections, 2]``, of which the second ones are zeros, so that each sum lies at a multiple of 16 bytes.
    """

    def __init__(self, stream: Stream, sections: int, device: torch.device):
        self.stream = stream
        self._origins, nbytes = dict[int, int](), 0
        for size, (begin, end) in stream.extents.items():
            self._origins[size] = nbytes
            # The last access is of 4 bytes.
            nbytes = aligned(nbytes + (end - begin) // size // 8 + 4)
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.sums = torch.zeros(sections, 2, dtype=torch.int64, device=device)

    @property
    def total(self) -> torch.Tensor:
        """Weight sum of the stream, int64 ``[1]``."""
        return self.sums.sum().view(1)

    def place(self, itemsize: int) -> tuple[int, int]:
        """Address of the bits of elements of this size, and the byte of the stream at which these begin."""
        return self.memory.data_ptr() + self._origins[itemsize], self.stream.extents[itemsize][0]

    def read(self, part: Part) -> Flags:
        """On a CPU: the flags of a part's elements, bool ``[n]``."""
        held, first, count = self._bytes_of(part)
        return np.unpackbits(held, bitorder="little")[first : first + count].astype(np.bool_)

    def write(self, part: Part, flags: Flags) -> None:
        """On a CPU: set the flags of a part's elements, bool ``[n]``."""
        held, first, count = self._bytes_of(part)
        # Of the first byte and the last one, bits may be of other parts.
        spread = np.unpackbits(held, bitorder="little")
        spread[first : first + count] = flags
        held[:] = np.packbits(spread, bitorder="little")

    def _bytes_of(self, part: Part) -> tuple[npt.NDArray[np.uint8], int, int]:
        """Those that hold a part's bits, on the mask's memory; the first bit there, and how many."""
        count = part.segment.nbytes // part.itemsize
        first = (part.start - self.stream.extents[part.itemsize][0]) // part.itemsize
        begin = self._origins[part.itemsize] + first // 8
        end = self._origins[part.itemsize] + -(-(first + count) // 8)
        return self.memory.numpy()[begin:end], first % 8, count


class StepRecorder(Protocol):
    """Finds out what a step changes of a stream. On a GPU all of it is only enqueued on the current stream."""

    def keep(self, copy: torch.Tensor) -> None:
        """Copy the weights as they are.

        Args:
            copy: uint8 ``[stream.nbytes]`` on the device.
        """

    def mark(self, copy: torch.Tensor) -> None:
        """Mark what differs from a copy that :meth:`keep` has made."""


def make_recorders(
    streams: Sequence[tuple[Sections, Mask]], views: LiveViews, device: torch.device
) -> list[StepRecorder]:
    """A recorder of the weights where they lie now, for the sections of each stream and its mask.

    They are for one CUDA stream: what they encode goes to the same scratch memory.

    Raises:
        NotComputable: the device can't encode from where a weight lies.
    """
    if device.type != "cuda":
        return [HostRecorder(sections, views, mask, device) for sections, mask in streams]
    scratch = encoding_scratch([sections for sections, _ in streams], views, device)
    return [DeviceRecorder(sections, views, mask, scratch) for sections, mask in streams]


class HostRecorder(HostSections):
    """On a CPU."""

    def __init__(self, sections: Sections, views: LiveViews, mask: Mask, device: torch.device):
        super().__init__(sections, views, device)
        self._mask = mask

    def keep(self, copy: torch.Tensor) -> None:
        for section in range(len(self.itemsizes)):
            for part, new in self.now(section):
                _bits_of(copy, part)[:] = new

    def mark(self, copy: torch.Tensor) -> None:
        for section in range(len(self.itemsizes)):
            for part, new in self.now(section):
                old = _bits_of(copy, part)
                differ = np.flatnonzero(new != old)
                flags = self._mask.read(part)
                flags[differ] = True
                self._mask.write(part, flags)
                places = part.start + part.itemsize * differ
                self._mask.sums[section, 0] += weigh_change(new[differ], old[differ], places)


def _bits_of(copy: torch.Tensor, part: Part) -> Bits:
    """Of a part, in a copy of its stream."""
    return copy[part.start : part.start + part.segment.nbytes].numpy().view(f"<i{part.itemsize}")


class DeviceRecorder(DeviceSections):
    """By a kernel, which reads the weights once before a step and once after it."""

    def __init__(self, sections: Sections, views: LiveViews, mask: Mask, scratch: torch.Tensor):
        super().__init__(sections, views, scratch)
        self._tables = [
            [
                (
                    ChangeTable(step.rows, size, mask, held, self._device, marks=False, copies=True),
                    ChangeTable(step.rows, size, mask, held, self._device, marks=True, copies=False),
                )
                for step in steps
            ]
            for steps, size, held in zip(self.steps, self.itemsizes, mask.sums, strict=True)
        ]

    def keep(self, copy: torch.Tensor) -> None:
        self._run(copy, marks=False)

    def mark(self, copy: torch.Tensor) -> None:
        self._run(copy, marks=True)

    def _run(self, copy: torch.Tensor, *, marks: bool) -> None:
        for steps, tables in zip(self.steps, self._tables, strict=True):
            for step, (keep, mark) in zip(steps, tables, strict=True):
                for encoder in step.encoders:
                    encoder.launch()
                (mark if marks else keep).compare(copy)


class ChangeTable:
    """Memory (side a of the rows) beside a copy of it at places of a stream (side b), of elements of one size, prepared once.

    Args:
        rows: of :class:`.steps.Step`.
        itemsize: of an element.
        mask: of the stream.
        total: weight sum, int64, at a multiple of 16 bytes.
        device: of all of it.
        marks: whether what differs is marked, and the sum follows.
        copies: whether the copy is brought up to the memory.
    """

    def __init__(
        self,
        rows: Ints,
        itemsize: int,
        mask: Mask,
        total: torch.Tensor,
        device: torch.device,
        *,
        marks: bool,
        copies: bool,
    ):
        from .kernels import WORDS, record_changes

        self._mask, self._total = mask, total  # the mask's memory is written by address
        # Padded: the kernel is compiled for addresses that are multiples of 16.
        self._place = torch.tensor(mask.place(itemsize), device=device)
        like = torch.empty(16, dtype=torch.uint8, device=device)
        self._launches = []
        for table in build_tables(rows, _TILE):
            constants = (
                COLUMNS,
                WORDS[itemsize],
                itemsize,
                table.unit // itemsize,
                _TILE,
                table.nested,
                marks,
                copies,
            )
            out = (like, self._place, total)
            self._launches.append(Launch(record_changes, _WARPS, table, constants, device, out))

    def compare(self, copy: torch.Tensor) -> None:
        """Enqueue it; ``copy``: uint8 ``[stream.nbytes]``."""
        for launch in self._launches:
            launch(copy, self._place, self._total)
