"""Triton kernels of deltas: mark and pack what differs, put it where it belongs, and weigh weights.

Imported only where there is a CUDA device. The blocks that they write and read are described in :mod:`.blocks`.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ..packing.kernels import _place

# For each size of an element the type of its bits.
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _weight(group):
    """Of a group of 16 bytes of the stream: an odd number below 2^32 (a hash by C. Wellons, "lowbias32")."""
    x = group.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return ((x ^ (x >> 16)) | 1).to(tl.int64)


@triton.jit
def _unit_sum(values, stream, lane, ITEM: tl.constexpr, LANES: tl.constexpr):
    """Of units' elements, ``[units, LANES]``, the sum weighted by their places in their 16 bytes, int64."""
    if LANES * ITEM == 16:
        part = 2 * lane * ITEM + 1
    else:
        part = 2 * ((stream & 15).to(tl.int32)[:, None] + lane * ITEM) + 1
    if ITEM <= 2:  # 17 bits, times 31, 16 times
        found = tl.sum(values.to(tl.int32) * part, axis=1).to(tl.int64)
    else:
        found = tl.sum(values.to(tl.int64) * part, axis=1)
    return found


@triton.jit
def _bytes_that_differ(new, old):
    """Of uint32 words of 4 bytes: a bit for each byte that differs, the lowest for the first one; int32."""
    both = new ^ old
    top = (((both & 0x7F7F7F7F) + 0x7F7F7F7F) | both) & 0x80808080
    # The product brings the four bits beside each other, at 24 and above.
    return (((top >> 7) * 0x01020408) >> 24).to(tl.int32)


@triton.jit
def _bytes_change(new, old, lane):
    """Of uint32 words of 4 signed bytes, the ``lane``-th of their 16 bytes: by how much :func:`_unit_sum` of them changes; int32."""
    # Two bytes at a time: 128 is added to both sides, then no byte is negative, and half words hold the differences.
    even = (((new ^ 0x80808080) & 0x00FF00FF) - ((old ^ 0x80808080) & 0x00FF00FF)).to(tl.int32, bitcast=True)
    odd = (((new ^ 0x80808080) >> 8) & 0x00FF00FF) - (((old ^ 0x80808080) >> 8) & 0x00FF00FF)
    odd = odd.to(tl.int32, bitcast=True)
    first, second = (even << 16) >> 16, (odd << 16) >> 16
    third, fourth = (even + 0x8000) >> 16, (odd + 0x8000) >> 16
    return (8 * lane + 1) * (first + second + third + fourth) + 2 * second + 4 * third + 6 * fourth


@triton.jit
def _bits_set(word):
    """How many bits of 32 are set; uint32, of which the compiler makes one instruction."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return ((eights * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _inside(number, size):
    """Of words of this ``number``, 32 elements each, the bits of the first ``size`` elements; uint32."""
    left = tl.maximum(tl.minimum(size - number * 32, 32), 0)
    return (0xFFFFFFFF >> (32 - left).to(tl.uint64)).to(tl.uint32)


@triton.jit
def _words_at(bits, first, number, size):
    """Of elements from ``first`` on, 32 to a word: the words of this ``number``, uint32, without bits behind ``size`` elements.

    ``bits``: address of the bit of element 0, a multiple of 4. Nothing is read beyond the words that hold these elements.
    """
    shift = (first & 31).to(tl.int32)
    at = (bits + (first >> 5) * 4).to(tl.pointer_type(tl.uint32)) + number
    begin = number * 32
    low = tl.load(at, mask=begin < size, other=0).to(tl.uint64)
    high = tl.load(at + 1, mask=begin + 32 - shift < size, other=0).to(tl.uint64)
    found = (((high << 32) | low) >> shift.to(tl.uint64)).to(tl.uint32)
    return found & _inside(number, size)


@triton.jit
def _list_set(words, number, listed):
    """Write the place of each bit that is set of uint32 ``words``, uint16 and ascending; returns how many there are.

    The other threads read them behind a barrier.
    """
    found = _bits_set(words)
    at = tl.cumsum(found, axis=0) - found
    left = words
    for turn in range(tl.max(found, axis=0)):
        rest = left & (left - 1)
        lowest = _bits_set((left ^ rest) - 1)
        tl.store(listed + (at + turn), (number * 32 + lowest).to(tl.uint16), mask=left != 0)
        left = rest
    return tl.sum(found, axis=0)


@triton.jit
def _clear(bits, first, number, words):
    """Take away the bits that :func:`_words_at` has found."""
    shift = (first & 31).to(tl.uint32)
    at = (bits + (first >> 5) * 4).to(tl.pointer_type(tl.int32)) + number
    low = words << shift
    tl.atomic_and(at, (low ^ 0xFFFFFFFF).to(tl.int32, bitcast=True), mask=low != 0, sem="relaxed")
    if shift > 0:
        high = words >> (32 - shift)
        tl.atomic_and(at + 1, (high ^ 0xFFFFFFFF).to(tl.int32, bitcast=True), mask=high != 0, sem="relaxed")


@triton.jit
def _address(row, within):
    """Of what lies so many bytes from the beginning of a row of :func:`.packer.strided_rows`."""
    run = tl.load(row + 2).to(tl.int32)
    lines = tl.load(row + 1).to(tl.int32)
    line = within // run
    column = within - line * run
    outer = line // lines
    line = line - outer * lines
    return (
        tl.load(row) + outer.to(tl.int64) * tl.load(row + 3) + line.to(tl.int64) * tl.load(row + 4) + column
    )


@triton.jit
def record_changes(
    tiles,
    rows,
    copy,
    place,
    total,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
    MARKS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Side a of each row beside a copy, by its place in the stream, which is side b.

    With ``MARKS``, mark what differs from the copy, and add to ``total`` what that changes. With ``COPIES``, bring the copy up to it.

    ``copy``: uint8, of the whole stream. ``place``: address of the marks of elements of this size, and where these begin in the
    stream.
    """
    a, b, offset_a, offset_b, mask, _ = _place(tl.program_id(0), tiles, rows, COLUMNS, TILE, NESTED)
    # Bytes, where they stand as 16, are compared by four.
    ACROSS: tl.constexpr = 4 if LANES == 16 else LANES
    KIND: tl.constexpr = tl.uint32 if LANES == 16 else WORD
    lane = tl.arange(0, ACROSS)[None, :]
    source = tl.multiple_of(a.to(tl.pointer_type(KIND)), LANES * ITEM)
    kept = tl.multiple_of((copy + b).to(tl.pointer_type(KIND)), LANES * ITEM)
    inside = mask[:, None]
    new = tl.load(source + (offset_a[:, None] * ACROSS + lane), mask=inside, other=0)
    at = kept + (offset_b[:, None] * ACROSS + lane)
    if MARKS:
        old = tl.load(at, mask=inside, other=0)
        if LANES == 16:
            bits = tl.sum(_bytes_that_differ(new, old) << (4 * lane), axis=1)
        else:
            bits = tl.sum((new != old).to(tl.int32) << lane, axis=1)
        differs = bits != 0
        if COPIES:
            tl.store(at, new, mask=differs[:, None])
        stream = b + offset_b * (LANES * ITEM)
        element = (stream - tl.load(place + 1)) // ITEM
        if LANES >= 8:  # nobody else has elements of this byte, or of these two
            marks = (tl.load(place) + (element >> 3)).to(
                tl.pointer_type(tl.uint16 if LANES == 16 else tl.uint8)
            )
            before = tl.load(marks, mask=differs, other=0).to(tl.int32)
            tl.store(marks, (before | bits).to(tl.uint16 if LANES == 16 else tl.uint8), mask=differs)
        else:
            word = (tl.load(place) + (element >> 5) * 4).to(tl.pointer_type(tl.int32))
            tl.atomic_or(word, bits << (element & 31).to(tl.int32), mask=differs, sem="relaxed")
        if LANES == 16:
            units = tl.sum(_bytes_change(new, old, lane), axis=1).to(tl.int64)
        elif ITEM <= 2:
            units = _unit_sum(new.to(tl.int32) - old.to(tl.int32), stream, lane, ITEM, LANES)
        else:
            units = _unit_sum(new.to(tl.int64) - old.to(tl.int64), stream, lane, ITEM, LANES)
        moved = tl.sum(units * _weight(stream >> 4), axis=0)
        tl.atomic_add(total, moved, mask=moved != 0, sem="relaxed")
    else:
        tl.store(at, new, mask=inside)


@triton.jit
def pack_marked(
    tiles,
    rows,
    place,
    counts,
    entries,
    data,
    scratch,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Pack a block of what is marked of each tile, which has up to ``TILE`` elements of one row; what is packed loses its marks.

    ``rows``: as :func:`apply_blocks`, and the row's first byte in the stream and its first tile. ``place``: address of the marks of
    elements of this size, where these begin in the stream, and how many tiles there are, which the programs take in turns.
    ``counts``: as :mod:`.blocks` has them. A block that finds no room leaves the marks as they are, so that a later pass finds it.
    ``scratch``: uint16 ``[programs, LISTED]``.
    """
    for tile in range(tl.program_id(0), tl.load(place + 2).to(tl.int32), tl.num_programs(0)):
        row = rows + tl.load(tiles + tile).to(tl.int64) * COLUMNS
        begin = (tile - tl.load(row + 7).to(tl.int32)) * TILE
        size = tl.minimum(tl.load(row + 5).to(tl.int32) // ITEM - begin, TILE)
        stream = tl.load(row + 6) + begin.to(tl.int64) * ITEM
        first = (stream - tl.load(place + 1)) // ITEM
        number = tl.arange(0, TILE // 32)
        words = _words_at(tl.load(place), first, number, size)
        count = tl.sum(_bits_set(words), axis=0)
        if count > 0:
            values = count * ITEM
            sparse = (2 * count + ALIGN - 1) // ALIGN * ALIGN
            bitmap = (size + 8 * ALIGN - 1) // (8 * ALIGN) * ALIGN
            mode = tl.where(sparse <= bitmap, 0, 1)
            header = tl.where(mode == 0, sparse, bitmap)
            whole = size * ITEM <= header + values
            mode = tl.where(whole, 2, mode)
            header = tl.where(whole, 0, header)
            values = tl.where(whole, size * ITEM, values)
            need = (header + values + ALIGN - 1) // ALIGN * ALIGN
            start = tl.atomic_add(counts + 1, need.to(tl.int64), sem="relaxed")
            if start + need <= tl.load(counts + 5):
                slot = tl.atomic_add(counts, 1, sem="relaxed")
                tl.atomic_max(counts + 2, start + need, sem="relaxed")
                tl.atomic_add(counts + 4, count.to(tl.int64), sem="relaxed")
                tl.store(entries + 2 * slot, stream)
                told = (start // 4) | (mode.to(tl.int64) << 30)
                told = told | ((count - 1).to(tl.int64) << 32) | ((size - 1).to(tl.int64) << 48)
                tl.store(entries + 2 * slot + 1, told)
                block = data + start
                landed = (block + header).to(tl.pointer_type(WORD))
                index = block.to(tl.pointer_type(tl.uint16))
                if mode == 0:
                    _list_set(words, number, index)
                if mode == 1:
                    tl.store(block.to(tl.pointer_type(tl.uint32)) + number, words, mask=number * 4 < bitmap)
                    index = scratch + tl.program_id(0) * LISTED
                done = count * 0
                for part in range(0, tl.where(mode == 1, size, 1), LISTED):
                    here = tl.where(mode == 2, size, count)
                    if mode == 1:
                        # The same bits again, from the cache: a list of all of them would take too much memory.
                        few = tl.arange(0, LISTED // 32)
                        here = _list_set(
                            _words_at(tl.load(place), first + part, few, size - part), few, index
                        )
                    # What one thread has listed another one reads.
                    tl.debug_barrier()
                    for chunk in range(0, here, CHUNK):
                        pick = chunk + tl.arange(0, CHUNK)
                        there = pick < here
                        listed = tl.load(index + pick, mask=there & (mode < 2), other=0).to(tl.int32)
                        element = begin + part + tl.where(mode == 2, pick, listed)
                        source = _address(row, element * ITEM).to(tl.pointer_type(WORD))
                        tl.store(landed + done + pick, tl.load(source, mask=there, other=0), mask=there)
                    done += here
                    # Before the list is written again, and the marks are.
                    tl.debug_barrier()
                _clear(tl.load(place), first, number, words)
            else:
                tl.atomic_add(counts + 3, 1, sem="relaxed")


@triton.jit
def apply_blocks(
    entries,
    data,
    starts,
    rows,
    near,
    total,
    sizes,
    scratch,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
    GRAIN: tl.constexpr,
):
    """Write blocks' values to the live weights, and add to ``total`` what that changes.

    ``starts``: for each row its first byte in the stream, and behind them a number beyond all. ``rows``: int64 ``[n, 6]``:
    address, lines, bytes of a line, outer and line stride, bytes. ``near``: int32, for each ``GRAIN`` bytes of the stream the last
    row that begins at or before the first of them, and one more number. ``sizes``: blocks, which the programs take in turns, bytes of
    the data, and where elements of this size begin and end in the stream. ``scratch``: uint16 ``[programs, LISTED]``.

    Whatever a block tells, nothing is read outside the data, nor written outside the weights. A block that is no sender's is
    left out, and the weight sum then tells of it.
    """
    moved = tl.zeros((CHUNK,), dtype=tl.int64)
    for number in range(tl.program_id(0), tl.load(sizes).to(tl.int32), tl.num_programs(0)):
        first = tl.load(entries + 2 * number)
        told = tl.load(entries + 2 * number + 1)
        start = (told & 0x3FFFFFFF) * 4
        block = data + start
        mode = ((told >> 30) & 3).to(tl.int32)
        count = ((told >> 32) & 0xFFFF).to(tl.int32) + 1
        elements = ((told >> 48) & 0xFFFF).to(tl.int32) + 1
        sparse = (2 * count + ALIGN - 1) // ALIGN * ALIGN
        bitmap = (elements + 8 * ALIGN - 1) // (8 * ALIGN) * ALIGN
        header = tl.where(mode == 0, sparse, tl.where(mode == 1, bitmap, 0))
        limit = tl.where(mode == 2, elements, count)
        sound = (mode <= 2) & (count <= elements) & (elements <= MOST)
        sound = sound & (start % ALIGN == 0) & (start + header + limit * ITEM <= tl.load(sizes + 1))
        sound = sound & (first >= tl.load(sizes + 2)) & (first % ITEM == 0)
        # Not a sum with ``first``, which could be too large for 64 bits.
        sound = sound & (first <= tl.load(sizes + 3) - elements.to(tl.int64) * ITEM)
        if sound:
            low = tl.load(near + first // GRAIN)
            high = tl.load(near + first // GRAIN + 1) + 1
            while low + 1 < high:
                middle = (low + high) // 2
                before = tl.load(starts + middle) <= first
                low = tl.where(before, middle, low)
                high = tl.where(before, high, middle)
            end = first + elements.to(tl.int64) * ITEM
            values = (block + header).to(tl.pointer_type(WORD))
            index = block.to(tl.pointer_type(tl.uint16))
            if mode == 1:
                index = scratch + tl.program_id(0) * LISTED
            done = count * 0
            for part in range(0, tl.where(mode == 1, elements, 1), LISTED):
                here = limit
                if mode == 1:
                    few = tl.arange(0, LISTED // 32)
                    held = (block + part // 8).to(tl.pointer_type(tl.uint32)) + few
                    words = tl.load(held, mask=few * 32 < elements - part, other=0)
                    words = words & _inside(few, elements - part)
                    here = tl.minimum(_list_set(words, few, index), limit - done)
                    tl.debug_barrier()
                # Usually one.
                row = low
                while tl.load(starts + row) < end:
                    begin = tl.load(starts + row)
                    nbytes = tl.load(rows + row * 6 + 5)
                    for chunk in range(0, here, CHUNK):
                        pick = chunk + tl.arange(0, CHUNK)
                        there = pick < here
                        listed = tl.load(index + pick, mask=there & (mode < 2), other=0).to(tl.int32)
                        element = part + tl.where(mode == 2, pick, listed)
                        stream = first + element.to(tl.int64) * ITEM
                        within = stream - begin
                        # Between two parts there may be a gap.
                        there = there & (element < elements) & (within >= 0) & (within < nbytes)
                        live = _address(rows + row * 6, within.to(tl.int32)).to(tl.pointer_type(WORD))
                        new = tl.load(values + done + pick, mask=there, other=0)
                        old = tl.load(live, mask=there, other=0)
                        tl.store(live, new, mask=there)
                        weight = (2 * (stream & 15) + 1) * _weight(stream >> 4)
                        moved += (new.to(tl.int64) - old.to(tl.int64)) * weight
                    row += 1
                done += here
                # Before the list is written again.
                tl.debug_barrier()
    tl.atomic_add(total, tl.sum(moved, axis=0), sem="relaxed")


@triton.jit
def weigh(
    tiles,
    rows,
    total,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Add up side a of each row, by its places in the stream, which are side b."""
    a, b, offset_a, offset_b, mask, _ = _place(tl.program_id(0), tiles, rows, COLUMNS, TILE, NESTED)
    source = tl.multiple_of(a.to(tl.pointer_type(WORD)), LANES * ITEM)
    lane = tl.arange(0, LANES)[None, :]
    value = tl.load(source + (offset_a[:, None] * LANES + lane), mask=mask[:, None], other=0)
    stream = b + offset_b * (LANES * ITEM)
    weighed = _unit_sum(value, stream, lane, ITEM, LANES) * _weight(stream >> 4)
    tl.atomic_add(total, tl.sum(weighed, axis=0), sem="relaxed")
