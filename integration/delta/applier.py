"""The receiver's side of a stream: live weights that blocks are written to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ..packing import Strided
from ..packing.rows import collapse
from ..transport.storage import LiveViews, in_memory
from . import blocks
from .packer import LISTED, WeighTable, programs_of, registers_of, strided_rows
from .streams import Stream

# Elements that one program writes at a time, and its warps.
CHUNK, WARPS = 512, 4
# Programs of a multiprocessor.
PROGRAMS = 8
# Bytes of the stream to each of which the first row is noted.
GRAIN = 1 << 17


class Applier(Protocol):
    """Writes blocks to the live weights. On a GPU all of it is only enqueued on the current stream.

    Attributes:
        total: weight sum of the stream as it is on this rank, int64 ``[1]`` on the device.
    """

    total: torch.Tensor

    def weigh(self) -> None:
        """Set ``total`` from all live weights."""

    def apply(self, entries: torch.Tensor, data: torch.Tensor, itemsize: int) -> None:
        """Write blocks: entries int64 ``[n, 2]`` and data uint8, of elements of one size; ``total`` follows.

        Raises:
            Damaged: on a CPU, a block reaches beyond the weights or the data; nothing was written.
        """


def make_appliers(
    streams: Sequence[tuple[Stream, torch.Tensor]], views: LiveViews, device: torch.device
) -> list[Applier]:
    """For each stream an applier to the weights where they lie now, with its total as an earlier one left it.

    They are for one CUDA stream: their kernels share scratch memory.
    """
    if device.type != "cuda":
        return [HostApplier(stream, views, total) for stream, total in streams]
    scratch = make_scratch(device)
    return [DeviceApplier(stream, views, total, scratch) for stream, total in streams]


def make_scratch(device: torch.device) -> torch.Tensor:
    """Memory for the kernels that write blocks: uint16 ``[programs, LISTED]``."""
    return torch.empty(programs_of(device, PROGRAMS), LISTED, dtype=torch.uint16, device=device)


class HostApplier:
    """On a CPU."""

    def __init__(self, stream: Stream, views: LiveViews, total: torch.Tensor):
        self.total = total
        self._parts = stream.parts
        self._starts = [part.start for part in stream.parts]
        self._live = [in_memory(views.of(part.segment)).detach() for part in stream.parts]

    def weigh(self) -> None:
        self.total.zero_()
        for part, live in zip(self._parts, self._live, strict=True):
            bits = blocks.bits(live.contiguous())
            self.total += blocks.weigh(bits, blocks.places(part.start, bits.size, part.itemsize))

    def apply(self, entries: torch.Tensor, data: torch.Tensor, itemsize: int) -> None:
        for _ in self._blocks(entries, data, itemsize):
            pass  # all of them are whole, or nothing is written
        for place, first, index, values in self._blocks(entries, data, itemsize):
            live = self._live[place].view(_SIGNED[itemsize])
            inside = torch.from_numpy((first - self._starts[place]) // itemsize + index)
            where = torch.unravel_index(inside, live.shape) if live.dim() else (...,)
            stream = first + itemsize * index
            old = live[where].reshape(-1).numpy()
            self.total += blocks.weigh_change(values, old, stream)
            new = torch.from_numpy(np.array(values))
            live[where] = new if live.dim() else new[0]

    def _blocks(
        self, entries: torch.Tensor, data: torch.Tensor, itemsize: int
    ) -> Iterator[tuple[int, int, blocks.Ints, blocks.Bits]]:
        """Number of the part that each block belongs to, and what it is."""
        raw = data.numpy()
        for entry in entries.tolist():
            first, index, values = blocks.unpack(entry, raw, itemsize)
            place = bisect_right(self._starts, first) - 1
            part = self._parts[place]
            inside = first - part.start
            end = inside + itemsize * (int(index.max()) + 1)
            if place < 0 or inside % itemsize or end > part.segment.nbytes or part.itemsize != itemsize:
                raise blocks.Damaged(f"a block at byte {first} of the stream reaches beyond a weight")
            yield place, first, index, values


# Bits of elements, which fancy indexing takes for any dtype.
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceApplier:
    """By a kernel, whose programs take the blocks in turns."""

    def __init__(self, stream: Stream, views: LiveViews, total: torch.Tensor, scratch: torch.Tensor):
        self.total, self._device = total, scratch.device
        pairs = [
            (Strided.of(in_memory(views.of(p.segment))), Strided.packed(p.start, p.shape, p.itemsize))
            for p in stream.parts
        ]
        self._extents = stream.extents
        by_size = {size: [pair for pair in pairs if pair[0].itemsize == size] for size in self._extents}
        rows = collapse((a, b, 0) for a, b in pairs)
        starts = np.append(rows[:, 1], np.int64(1) << 62)
        assert (np.diff(starts) > 0).all(), "parts stand in the stream's order"
        grains = np.arange(0, stream.nbytes + 2 * GRAIN, GRAIN)
        near = np.searchsorted(starts[:-1], grains, side="right").astype(np.int32) - 1
        self._rows = [torch.from_numpy(t).to(self._device) for t in (starts, strided_rows(rows), near)]
        self._scratch = scratch
        self._kernels = {size: self._compiled(size) for size in by_size}
        self._weighed = [
            WeighTable(collapse((a, b, 0) for a, b in held), size, self._device)
            for size, held in by_size.items()
        ]

    def weigh(self) -> None:
        self.total.zero_()
        for table in self._weighed:
            table.add_to(self.total)

    def apply(self, entries: torch.Tensor, data: torch.Tensor, itemsize: int) -> None:
        if len(entries):
            numbers = [len(entries), data.numel(), *self._extents[itemsize]]
            sizes = torch.tensor(numbers, dtype=torch.int64)
            if self._device.type == "cuda":
                sizes = sizes.pin_memory().to(self._device, non_blocking=True)
            held = (entries, data, *self._rows, self.total, sizes, self._scratch)
            self._kernels[itemsize](min(len(entries), len(self._scratch)), held)

    def _compiled(self, itemsize: int) -> Any:
        """As :class:`..packing.tables.Launch`: compiled now, and launched without a look-up."""
        from .kernels import WORDS, apply_blocks

        align = blocks.alignment(itemsize)
        constants = (WORDS[itemsize], itemsize, align, blocks.MOST, CHUNK, LISTED, GRAIN)
        if self._device.type != "cuda":  # Triton's interpreter, in tests
            return lambda count, held: partial(apply_blocks[(count,)], num_warps=WARPS)(*held, *constants)
        entries = torch.zeros(1, 2, dtype=torch.int64, device=self._device)
        data = torch.zeros(16, dtype=torch.uint8, device=self._device)
        sizes = torch.zeros(4, dtype=torch.int64, device=self._device)
        held = (entries, data, *self._rows, self.total, sizes, self._scratch)
        with torch.cuda.device(self._device):
            registers = registers_of(PROGRAMS, WARPS)
            compiled = apply_blocks.warmup(*held, *constants, grid=(1,), num_warps=WARPS, maxnreg=registers)
            # Loads the kernel to the device, which the first refit would wait for.
            compiled[(1, 1, 1)]
        return lambda count, held: compiled[(count, 1, 1)](*held, *constants)
