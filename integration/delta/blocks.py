"""The packed form of a delta, and its counterpart on CPUs of the kernels in :mod:`.kernels`.

A *block* is what differs among neighbouring elements of a stream, at most :data:`MOST` of them. It has

- an *entry* of two int64: the byte of the stream at which it begins, and
  ``start / 4 | form << 30 | (count - 1) << 32 | (elements - 1) << 48``, where ``start`` is its place in the data, ``count`` how many
  of its ``elements`` differ;
- its data, in the shortest of three forms: :data:`SPARSE` (uint16 index of each element that differs, then their values),
  :data:`BITMAP` (a bit for each element, least significant first, then the values of those whose bit is set) and
  :data:`WHOLE` (all values). Values begin at a multiple of 4 bytes, or of 8 if an element has 8.

Blocks overwrite, so that their order does not matter, and one that comes twice does no harm. A *header* tells ahead of a
section's blocks how many there are.

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

from ..layout import flat_bytes

SPARSE, BITMAP, WHOLE = range(3)
ENTRY_BYTES = 16
# Of a pass, int64: blocks packed, bytes reserved, end of the data, blocks without room, elements that differ.
COUNTS = 5
# Bytes of an element at most: of the largest number that a kernel compares.
MOST_ITEMSIZE = 8
# Elements of a block at most: as many as an index of 16 bits tells apart. Fewer would make more blocks, each of which takes time.
MOST = 1 << 16

Bits = npt.NDArray[np.signedinteger[np.typing.NBitBase]]
Ints = npt.NDArray[np.int64]


class Damaged(ValueError):
    """What has arrived can't be what was packed; the text says why."""


class Counts(NamedTuple):
    """What a pass over a section has packed."""

    blocks: int
    reserved: int
    nbytes: int
    without_room: int
    changed: int


class Header(NamedTuple):
    """What is told ahead of a section's blocks, as int64.

    Attributes:
        blocks: of the section.
        nbytes: of their data.
        itemsize: of an element.
        last: whether no section follows.
        total: weight sum of the stream once all blocks so far are written; on the device, where it is filled in.
        changed: elements that differed, in all sections so far.
        check: sum over the others but ``total``, which is compared with the receiver's own in the end.
    """

    blocks: int
    nbytes: int
    itemsize: int
    last: int
    total: int
    changed: int
    check: int

    @classmethod
    def of(cls, found: Counts, itemsize: int, *, last: bool, changed: int) -> Header:
        """Of a pass; without ``total``."""
        made = cls(found.blocks, found.nbytes, itemsize, int(last), 0, changed, 0)
        return made._replace(check=made._sum())

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Header:
        """As it has arrived.

        Raises:
            Damaged: it is not what was told.
        """
        found = cls(*numbers)
        if found.check != found._sum():
            raise Damaged("a header's sum is not that of its numbers")
        return found

    def _sum(self) -> int:
        return weigh(np.array(self._replace(total=0, check=0), dtype=np.int64), places(0, len(self), 8))


def alignment(itemsize: int) -> int:
    """Of a block's parts in the data."""
    return max(4, itemsize)


def bits(view: torch.Tensor) -> Bits:
    """A contiguous CPU tensor's elements as signed numbers of their size."""
    # Not numpy(), after which torch refuses to free the storage, as trainers do that offload.
    return np.from_dlpack(flat_bytes(view.detach())).view(f"<i{view.element_size()}")


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


def pack(new: Bits, differ: Ints, start: int, room: Packed, counts: list[int]) -> Ints:
    """Pack those of neighbouring elements that differ from what was last sent.

    Args:
        new: the elements' bits.
        differ: index of each that differs, ascending.
        start: byte of the stream at which they begin.
        room: for the blocks.
        counts: of the pass, :data:`COUNTS` numbers; added to.

    Returns:
        Those of ``differ`` that have found room.
    """
    size, align = new.itemsize, alignment(new.itemsize)
    found = [differ[:0]]
    cuts = np.searchsorted(differ, np.arange(0, new.size + MOST, MOST))
    for number in np.flatnonzero(np.diff(cuts)).tolist():
        first = number * MOST
        index = differ[cuts[number] : cuts[number + 1]] - first
        values = new[first : first + MOST]
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
        told = place // 4 | form << 30 | index.size - 1 << 32 | values.size - 1 << 48
        room.entries[counts[0]] = start + first * size, told - (told >> 63 << 64)
        counts[0] += 1
        counts[2] = place + need
        counts[4] += index.size
        found.append(first + index)
    return np.concatenate(found)


def unpack(entry: Sequence[int], data: npt.NDArray[np.uint8], itemsize: int) -> tuple[int, Ints, Bits]:
    """A block: the byte of the stream at which it begins, and index and bits of what it writes.

    Raises:
        Damaged: it reaches beyond the data, or beyond its own elements.
    """
    first, told = entry
    begin, form = (told & 0x3FFFFFFF) * 4, told >> 30 & 3
    count, elements = (told >> 32 & 0xFFFF) + 1, (told >> 48 & 0xFFFF) + 1
    align = alignment(itemsize)
    if form > WHOLE or count > elements:
        raise Damaged(f"a block of form {form} with {count} of {elements} elements")
    sizes = (-(-2 * count // align) * align, -(-elements // (8 * align)) * align, 0)
    landed = begin + sizes[form]
    end = landed + itemsize * (elements if form == WHOLE else count)
    if end > data.size:
        raise Damaged(f"a block ends at byte {end} of {data.size}")
    if form == SPARSE:
        index = data[begin : begin + 2 * count].view("<u2").astype(np.int64)
    elif form == BITMAP:
        flags = np.unpackbits(data[begin : begin + -(-elements // 8)], bitorder="little", count=elements)
        index = np.flatnonzero(flags)
    else:
        index = np.arange(elements, dtype=np.int64)
    if form != WHOLE and (index.size != count or index.max() >= elements):
        raise Damaged(f"a block's index does not name {count} of {elements} elements")
    return first, index, data[landed:end].view(f"<i{itemsize}")


def expected_bytes(elements: int, itemsize: int, share: float) -> float:
    """Bytes that a block takes on average, its entry among them, where each of its elements differs with probability ``share``.

    Args:
        elements: at most :data:`MOST`.
        itemsize: of an element.
        share: from 0 to 1; where no element differs there is no block.
    """
    if share in (0.0, 1.0):
        return share * (elements * itemsize + ENTRY_BYTES)
    count, align = np.arange(1, elements + 1), alignment(itemsize)
    ways = np.cumsum(np.log((elements - count + 1) / count))
    likely = np.exp(ways + count * np.log(share) + (elements - count) * np.log1p(-share))
    sparse, bitmap = -(-2 * count // align) * align, -(-elements // (8 * align)) * align
    nbytes = np.minimum(np.minimum(sparse, bitmap) + count * itemsize, elements * itemsize)
    return float((likely * (-(-nbytes // align) * align + ENTRY_BYTES)).sum())


def _weights(group: Ints) -> Ints:
    x = group.astype(np.uint32)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return ((x ^ x >> np.uint32(16)) | np.uint32(1)).astype(np.int64)
