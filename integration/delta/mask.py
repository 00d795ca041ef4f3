"""What a sender keeps in place of a base with ``delta_base: optimizer``: which elements a recorded step has changed.

A step is recorded with a copy of all that is sent, which is made before it, compared after it, and freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..packing.rows import COLUMNS, build_tables
from ..packing.tables import Launch
from ..plan import aligned
from ..transport.storage import LiveViews
from .blocks import Bits
from .steps import DeviceSections, HostSections, Sections, Step, encoding_scratch
from .streams import Part, Stream

_TILE, _WARPS = 512, 4

Flags = npt.NDArray[np.bool_]


class Mask:
    """For each element of a stream whether it may differ from what was last sent; and the stream's weight sum.

    16 bytes of the stream have a byte of the mask, and one bit of it for each element, the first one's the lowest. 16 elements of one
    byte have two bytes. They stand behind all others, in the stream and here.

    Args:
        stream: whose elements are marked.
        device: of the mask.

    Attributes:
        memory: uint8, all zeros at first.
        total: weight sum of the stream as it was last sent, int64 ``[1]``.
    """

    def __init__(self, stream: Stream, device: torch.device):
        self.stream = stream
        groups, narrow = -(-stream.nbytes // 16), 0
        if 1 in stream.extents:
            narrow = groups - stream.extents[1][0] // 16
        wide = groups - narrow
        # Of elements of one byte; a multiple of 16, so that two bytes are one access.
        self._narrow_origin = aligned(wide) - 2 * wide
        # The last access is of 4 bytes.
        nbytes = aligned(aligned(wide) + 2 * narrow + 4)
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.total = torch.zeros(1, dtype=torch.int64, device=device)

    def origin(self, itemsize: int) -> int:
        """Byte of the mask at which the stream's first 16 bytes would have theirs, if all elements were of this size."""
        return self._narrow_origin if itemsize == 1 else 0

    def read(self, part: Part) -> Flags:
        """On a CPU: the flags of a part's elements, bool ``[n]``."""
        per_group = 16 // part.itemsize
        flags = np.unpackbits(self._bytes_of(part), axis=1, bitorder="little")[:, :per_group]
        return flags.reshape(-1)[: part.segment.nbytes // part.itemsize].astype(np.bool_)

    def write(self, part: Part, flags: Flags) -> None:
        """On a CPU: set the flags of a part's elements, bool ``[n]``."""
        held = self._bytes_of(part)
        per_group = 16 // part.itemsize
        spread = np.zeros((len(held), 8 * held.shape[1]), dtype=np.bool_)
        padded = np.zeros(len(held) * per_group, dtype=np.bool_)
        padded[: flags.size] = flags
        spread[:, :per_group] = padded.reshape(-1, per_group)
        held[:] = np.packbits(spread, axis=1, bitorder="little")

    def _bytes_of(self, part: Part) -> npt.NDArray[np.uint8]:
        """uint8 ``[groups of 16 bytes, bytes for each]``, on the mask's memory."""
        width = 2 if part.itemsize == 1 else 1
        groups = -(-part.segment.nbytes // 16)
        begin = self.origin(part.itemsize) + width * (part.start // 16)
        found: npt.NDArray[np.uint8] = self.memory.numpy()[begin : begin + width * groups]
        return found.reshape(groups, width)


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
                self._mask.write(part, self._mask.read(part) | (new != _bits_of(copy, part)))


def _bits_of(copy: torch.Tensor, part: Part) -> Bits:
    """Of a part, in a copy of its stream."""
    return copy[part.start : part.start + part.segment.nbytes].numpy().view(f"<i{part.itemsize}")


class DeviceRecorder(DeviceSections):
    """By a kernel, which reads the weights once before a step and once after it."""

    def __init__(self, sections: Sections, views: LiveViews, mask: Mask, scratch: torch.Tensor):
        super().__init__(sections, views, 0, scratch)
        self._mask = mask  # its memory is written by address
        self._like = torch.empty(16, dtype=torch.uint8, device=self._device)
        # Padded: the kernel is compiled for addresses that are multiples of 16.
        self._places = {
            size: torch.tensor([mask.memory.data_ptr() + mask.origin(size), 0], device=self._device)
            for size in mask.stream.extents
        }
        self._launches = [
            [self._make_launches(step, size) for step in steps]
            for steps, size in zip(self.steps, self.itemsizes, strict=True)
        ]

    def keep(self, copy: torch.Tensor) -> None:
        self._run(copy, marks=False)

    def mark(self, copy: torch.Tensor) -> None:
        self._run(copy, marks=True)

    def _run(self, copy: torch.Tensor, *, marks: bool) -> None:
        for steps, size, launches in zip(self.steps, self.itemsizes, self._launches, strict=True):
            for step, of_step in zip(steps, launches, strict=True):
                for encoder in step.encoders:
                    encoder.launch()
                for keep, mark in of_step:
                    (mark if marks else keep)(copy, self._places[size])

    def _make_launches(self, step: Step, itemsize: int) -> list[tuple[Launch, Launch]]:
        """Those that copy, and those that mark."""
        from .kernels import WORDS, record_changes

        found, out = [], (self._like, self._places[itemsize])
        for table in build_tables(step.rows, _TILE):
            constants = (COLUMNS, WORDS[itemsize], itemsize, table.unit // itemsize, _TILE, table.nested)
            keep, mark = (
                Launch(record_changes, _WARPS, table, (*constants, marks), self._device, out)
                for marks in (False, True)
            )
            found.append((keep, mark))
        return found
