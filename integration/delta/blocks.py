"""The packed form of a delta, and its counterpart on CPUs of the kernels in :mod:`.kernels`.

A *block* is what differs among neighbouring elements of a stream, at most :data:`MOST` of them. It has

- an *entry* of two int64: the byte of the stream at which it begins, and
  ``start / 4 | form << 30 | count << 32 | elements << 48``, where ``start`` is its place in the data, ``count`` how many of its
  ``elements`` differ;
- its data, in the shortest of three forms: :data:`SPARSE` (uint16 index of each element that differs, then their values),
  :data:`BITMAP` (a bit for each element, least significant first, then the values of those whose bit is set) and
  :data:`WHOLE` (all values). Values begin at a multiple of 4 bytes, or of 8 if an element has 8.

Blocks overwrite, so that their order does not matter, and one that comes twice does no harm.

The *weight sum* of a stream is the sum over all elements of ``value · (2 · (byte mod 16) + 1) · w(byte div 16)`` modulo 2^64, where
``value`` is the element's bits as a signed number, ``byte`` its place in the stream, and ``w`` a hash of 32 bits, made odd. Each
side adds to its own what a block changes there, so the sums differ if a block is lost, or meets another base than it was made
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

SPARSE, BITMAP, WHOLE = range(3)
ENTRY_BYTES = 16
# Of a pass, int64: blocks packed, bytes reserved, end of the data, blocks without room, elements that differ.
COUNTS = 5
# Elements of a block at most.
MOST = 16384

Bits = npt.NDArray[np.signedinteger[np.typing.NBitBase]]
Ints = npt.NDArray[np.int64]


class Counts(NamedTuple):
    """What a pass over a section has packed."""

    blocks: int
    reserved: int
    nbytes: int
    without_room: int
    changed: int


def alignment(itemsize: int) -> int:
    """Of a block's parts in the data."""
    return max(4, itemsize)


def bits(view: torch.Tensor) -> Bits:
    """A contiguous CPU tensor's elements as signed numbers of their size."""
    flat = view.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"<i{view.element_size()}")


def weigh(values: Bits, stream: Ints) -> int:
    """What elements of these bits at these bytes of a stream add to its weight sum; int64, modulo 2^64."""
    with np.errstate(over="ignore"):
        parts = (2 * (stream & 15) + 1) * _weights(stream >> 4)
        return int((values.astype(np.int64) * parts).sum(dtype=np.int64))


def weigh_change(new: Bits, old: Bits, stream: Ints) -> int:
    """What elements add to a weight sum that change from ``old`` to ``new``; as :func:`weigh`."""
    return wrapped(weigh(new, stream) - weigh(old, stream))


def wrapped(number: int) -> int:
    """Modulo 2^64, as int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def places(start: int, count: int, itemsize: int) -> Ints:
    """The bytes of a stream at which ``count`` elements from byte ``start`` on begin."""
    return start + itemsize * np.arange(count, dtype=np.int64)


class Packed(NamedTuple):
    """Room for the blocks of a pass: int64 ``[n, 2]`` and bytes."""

    entries: Ints
    data: npt.NDArray[np.uint8]


def pack(new: Bits, base: Bits, start: int, room: Packed, counts: list[int]) -> int:
    """Pack what differs of neighbouring elements, and bring the base up to it.

    Args:
        new: their bits.
        base: their bits in the base; what is packed is copied there.
        start: byte of the stream at which they begin.
        room: for the blocks.
        counts: of the pass, :data:`COUNTS` numbers; added to.

    Returns:
        What it adds to the weight sum; int64, modulo 2^64. Blocks without room add nothing, and leave the base as it is.
    """
    size, align, total = new.itemsize, alignment(new.itemsize), 0
    differ = np.flatnonzero(new != base)
    cuts = np.searchsorted(differ, np.arange(0, new.size + MOST, MOST))
    for number in np.flatnonzero(np.diff(cuts)).tolist():
        first = number * MOST
        index = differ[cuts[number] : cuts[number + 1]] - first
        values, old = new[first : first + MOST], base[first : first + MOST]
        sparse, bitmap = -(-2 * index.size // align) * align, -(-values.size // (8 * align)) * align
        form, header = (SPARSE, sparse) if sparse <= bitmap else (BITMAP, bitmap)
        chosen = values[index]
        if values.nbytes <= header + chosen.nbytes:
            form, header, chosen = WHOLE, 0, values
        need = -(-(header + chosen.nbytes) // align) * align
        place = counts[1]
        counts[1] += need
        if place + need > room.data.size:
            counts[3] += 1
            continue
        block = room.data[place : place + need]
        if form == SPARSE:
            block[: 2 * index.size].view("<u2")[:] = index
        elif form == BITMAP:
            flags = np.zeros(values.size, dtype=np.uint8)
            flags[index] = 1
            packed = np.packbits(flags, bitorder="little")
            block[: packed.size] = packed
        block[header : header + chosen.nbytes] = chosen.view(np.uint8)
        told = place // 4 | form << 30 | index.size << 32 | values.size << 48
        room.entries[counts[0]] = start + first * size, told - (told >> 63 << 64)
        counts[0] += 1
        counts[2] = place + need
        counts[4] += index.size
        where = start + size * (first + index)
        total += weigh_change(values[index], old[index], where)
        old[index] = values[index]
    return wrapped(total)


def unpack(entry: Sequence[int], data: npt.NDArray[np.uint8], itemsize: int) -> tuple[int, Ints, Bits]:
    """A block: the byte of the stream at which it begins, and index and bits of what it writes."""
    first, told = entry
    begin, form = (told & 0x3FFFFFFF) * 4, told >> 30 & 3
    count, elements = told >> 32 & 0xFFFF, told >> 48 & 0xFFFF
    align = alignment(itemsize)
    if form == SPARSE:
        index = data[begin : begin + 2 * count].view("<u2").astype(np.int64)
        begin += -(-2 * count // align) * align
    elif form == BITMAP:
        flags = np.unpackbits(data[begin : begin + -(-elements // 8)], bitorder="little", count=elements)
        index = np.flatnonzero(flags)
        begin += -(-elements // (8 * align)) * align
    else:
        index = np.arange(elements, dtype=np.int64)
    values = data[begin : begin + itemsize * index.size].view(f"<i{itemsize}")
    return first, index, values


def _weights(group: Ints) -> Ints:
    x = group.astype(np.uint32)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return ((x ^ x >> np.uint32(16)) | np.uint32(1)).astype(np.int64)
