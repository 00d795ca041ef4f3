"""Triton kernels of deltas: mark and pack what differs, put it where it belongs, and weigh weights.

Imported only where there is a CUDA device. The blocks that they write and read are described in :mod:`.blocks`.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ..packing.kernels import _place, unit_offsets

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
def _marks(marks, stream, valid, ITEM: tl.constexpr, LANES: tl.constexpr):
    """Of units that begin at bytes of the stream, a bit for each element that is marked."""
    group = stream >> 4
    if ITEM == 1:
        held = tl.load((marks + 2 * group).to(tl.pointer_type(tl.uint16)), mask=valid, other=0)
    else:
        held = tl.load((marks + group).to(tl.pointer_type(tl.uint8)), mask=valid, other=0)
    return (held.to(tl.int32) >> ((stream & 15) // ITEM).to(tl.int32)) & ((1 << LANES) - 1)


@triton.jit
def _bits_set(marks):
    """How many of the 16 lowest bits are set; no others are."""
    pairs = marks - ((marks >> 1) & 0x5555)
    fours = (pairs & 0x3333) + ((pairs >> 2) & 0x3333)
    eights = (fours + (fours >> 4)) & 0x0F0F
    return (eights + (eights >> 8)) & 0x1F


@triton.jit
def _change_marks(marks, stream, bits, ITEM: tl.constexpr, LANES: tl.constexpr, SETS: tl.constexpr):
    """Set the marks of units' elements, or take them away, where ``bits`` are set."""
    address = marks + (stream >> 4) * (2 if ITEM == 1 else 1)
    changed = bits != 0
    if LANES * ITEM == 16:  # nobody else has elements of these 16 bytes
        held = address.to(tl.pointer_type(tl.uint16 if ITEM == 1 else tl.uint8))
        before = tl.load(held, mask=changed, other=0).to(tl.int32)
        after = before | bits if SETS else before & ~bits
        tl.store(held, after.to(tl.uint16 if ITEM == 1 else tl.uint8), mask=changed)
    else:
        word = (address - (address & 3)).to(tl.pointer_type(tl.int32))
        shifted = bits << ((address & 3) * 8 + (stream & 15) // ITEM).to(tl.int32)
        if SETS:
            tl.atomic_or(word, shifted, mask=changed, sem="relaxed")
        else:
            tl.atomic_and(word, ~shifted, mask=changed, sem="relaxed")


@triton.jit
def record_changes(
    tiles,
    rows,
    copy,
    place,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
    MARKS: tl.constexpr,
):
    """Copy side a of each row to its place in the stream, which is side b; or, with ``MARKS``, mark what differs from that copy.

    ``copy``: uint8, of the whole stream. ``place``: address of the marks of the stream's first byte.
    """
    a, b, offset_a, offset_b, mask, _ = _place(tl.program_id(0), tiles, rows, COLUMNS, TILE, NESTED)
    lane = tl.arange(0, LANES)[None, :]
    source = tl.multiple_of(a.to(tl.pointer_type(WORD)), LANES * ITEM)
    kept = tl.multiple_of((copy + b).to(tl.pointer_type(WORD)), LANES * ITEM)
    inside = mask[:, None]
    new = tl.load(source + (offset_a[:, None] * LANES + lane), mask=inside, other=0)
    at = kept + (offset_b[:, None] * LANES + lane)
    if MARKS:
        old = tl.load(at, mask=inside, other=0)
        bits = tl.sum((new != old).to(tl.int32) << lane, axis=1)
        _change_marks(tl.load(place), b + offset_b * (LANES * ITEM), bits, ITEM, LANES, True)
    else:
        tl.store(at, new, mask=inside)


@triton.jit
def pack_changed(
    tiles,
    rows,
    place,
    counts,
    total,
    entries,
    data,
    scratch,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_LANES: tl.constexpr,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    NESTED: tl.constexpr,
    MARKED: tl.constexpr,
):
    """Compare side a of each row with the base, which is side b, and pack a block of what differs; or, ``MARKED``, of what is marked.

    A unit has ``LANES`` elements. All units of a tile are compared in one go, as wide words; only those that differ are looked
    at by element, ``CHUNK`` at a time. With marks there is no base, and side b is the place in the stream: only marked elements are
    read, ``total`` stays as it is, and what is packed loses its marks.

    ``place``: address of the base's first byte, or of the marks of the stream's first byte, and the first tile and the one behind
    the last, which the programs take in turns. ``counts``: as :mod:`.blocks` has them. A block that finds no room leaves the base,
    or the marks, as they are, so that the next pass finds it once more. ``scratch``: uint16 ``[programs, TILE]``.
    """
    listed = scratch + tl.program_id(0) * TILE
    lane = tl.arange(0, LANES)[None, :]
    first = tl.load(place + 1).to(tl.int32) + tl.program_id(0)
    for tile in range(first, tl.load(place + 2).to(tl.int32), tl.num_programs(0)):
        row = rows + tl.load(tiles + tile).to(tl.int64) * COLUMNS
        a = tl.load(row)
        b = tl.load(row + 1)
        begin = (tile - tl.load(row + 9).to(tl.int32)) * TILE
        number = tl.arange(0, TILE)
        size = tl.minimum(tl.load(row + 2).to(tl.int32) - begin, TILE)
        inside = (number < size)[:, None]
        offset_a, offset_b = unit_offsets(row, begin + number, NESTED)
        if MARKED:
            marks = tl.load(place)
            found = _marks(marks, b + offset_b.to(tl.int64) * (LANES * ITEM), number < size, ITEM, LANES)
            differs = (found != 0).to(tl.int32)
        else:
            wide = tl.arange(0, WIDE_LANES)[None, :]
            wide_a = tl.multiple_of(a.to(tl.pointer_type(WIDE)), LANES * ITEM)
            wide_b = tl.multiple_of(b.to(tl.pointer_type(WIDE)), LANES * ITEM)
            ours = tl.load(wide_a + offset_a[:, None] * WIDE_LANES + wide, mask=inside, other=0)
            kept = tl.load(wide_b + offset_b[:, None] * WIDE_LANES + wide, mask=inside, other=0)
            differs = tl.max((ours != kept).to(tl.int32), axis=1)
        units = tl.sum(differs, axis=0)
        if units > 0:
            tl.store(listed + tl.cumsum(differs, axis=0) - differs, number.to(tl.uint16), mask=differs > 0)
            # The other threads read it.
            tl.debug_barrier()
            source = tl.multiple_of(a.to(tl.pointer_type(WORD)), LANES * ITEM)
            base = tl.multiple_of(b.to(tl.pointer_type(WORD)), LANES * ITEM)
            count = units * 0
            if MARKED:
                count = tl.sum(_bits_set(found), axis=0)
            else:
                for chunk in range(0, units, CHUNK):
                    pick = chunk + tl.arange(0, CHUNK)
                    unit = tl.load(listed + pick, mask=pick < units, other=0).to(tl.int32)
                    at_a, at_b = unit_offsets(row, begin + unit, NESTED)
                    there = (pick < units)[:, None]
                    new = tl.load(source + (at_a[:, None] * LANES + lane), mask=there, other=0)
                    old = tl.load(base + (at_b[:, None] * LANES + lane), mask=there, other=0)
                    count += tl.sum(tl.sum((new != old).to(tl.int32), axis=1), axis=0)
            elements = size * LANES
            values = count * ITEM
            sparse = (2 * count + ALIGN - 1) // ALIGN * ALIGN
            bitmap = (elements + 8 * ALIGN - 1) // (8 * ALIGN) * ALIGN
            # A byte of the bitmap has to be of one unit.
            mode = tl.where((sparse <= bitmap) | (LANES < 8), 0, 1)
            header = tl.where(mode == 0, sparse, bitmap)
            whole = elements * ITEM <= header + values
            mode = tl.where(whole, 2, mode)
            header = tl.where(whole, 0, header)
            values = tl.where(whole, elements * ITEM, values)
            need = (header + values + ALIGN - 1) // ALIGN * ALIGN
            start = tl.atomic_add(counts + 1, need.to(tl.int64), sem="relaxed")
            if start + need <= tl.load(counts + 5):
                slot = tl.atomic_add(counts, 1, sem="relaxed")
                tl.atomic_max(counts + 2, start + need, sem="relaxed")
                tl.atomic_add(counts + 4, count.to(tl.int64), sem="relaxed")
                # Of this tile, in bytes of the stream: the rows of the base have no gaps.
                stream = b if MARKED else b - tl.load(place)
                tl.store(entries + 2 * slot, stream + begin.to(tl.int64) * (LANES * ITEM))
                told = (start // 4) | (mode.to(tl.int64) << 30)
                told = told | (count.to(tl.int64) << 32) | (elements.to(tl.int64) << 48)
                tl.store(entries + 2 * slot + 1, told)
                block = data + start
                landed = (block + header).to(tl.pointer_type(WORD))
                if mode == 1:
                    byte = tl.arange(0, TILE * LANES // 8)
                    tl.store(block + byte, tl.zeros_like(byte).to(tl.uint8), mask=byte * 8 < elements)
                    tl.debug_barrier()
                if mode == 2:
                    for chunk in range(0, size, CHUNK):
                        unit = chunk + tl.arange(0, CHUNK)
                        there = (unit < size)[:, None]
                        at_a, _ = unit_offsets(row, begin + unit, NESTED)
                        new = tl.load(source + (at_a[:, None] * LANES + lane), mask=there, other=0)
                        tl.store(landed + unit[:, None] * LANES + lane, new, mask=there)
                done = units * 0
                moved = tl.zeros((CHUNK,), dtype=tl.int64)
                for chunk in range(0, units, CHUNK):
                    pick = chunk + tl.arange(0, CHUNK)
                    unit = tl.load(listed + pick, mask=pick < units, other=0).to(tl.int32)
                    at_a, at_b = unit_offsets(row, begin + unit, NESTED)
                    there = (pick < units)[:, None]
                    place_16 = stream + at_b.to(tl.int64) * (LANES * ITEM)
                    if MARKED:
                        marked = _marks(marks, place_16, pick < units, ITEM, LANES)
                        flags = (marked[:, None] >> lane) & 1
                        changed = flags > 0
                        new = tl.load(source + (at_a[:, None] * LANES + lane), mask=changed, other=0)
                    else:
                        new = tl.load(source + (at_a[:, None] * LANES + lane), mask=there, other=0)
                        old = tl.load(base + (at_b[:, None] * LANES + lane), mask=there, other=0)
                        changed = new != old
                        flags = changed.to(tl.int32)
                    of_unit = tl.sum(flags, axis=1)
                    at = done + (tl.cumsum(of_unit, axis=0) - of_unit)[:, None]
                    if LANES > 1:  # Triton 3.6 does not compile a scan of one element in a loop
                        at += tl.cumsum(flags, axis=1) - flags
                    element = unit[:, None] * LANES + lane
                    # No more than there is room for, should someone write the weights meanwhile.
                    fits = changed & (at < count)
                    if mode == 0:
                        tl.store(block.to(tl.pointer_type(tl.uint16)) + at, element.to(tl.uint16), mask=fits)
                    if LANES >= 8:  # noqa: SIM102 - narrower units would not compile
                        if mode == 1:
                            bits = tl.reshape(flags << (lane & 7), (CHUNK, LANES // 8, 8))
                            byte = unit[:, None] * (LANES // 8) + tl.arange(0, LANES // 8)[None, :]
                            tl.store(block + byte, tl.sum(bits, axis=2).to(tl.uint8), mask=there)
                    if mode < 2:
                        tl.store(landed + at, new, mask=fits)
                    if MARKED:
                        # Once all threads have read them.
                        tl.debug_barrier()
                        _change_marks(marks, place_16, marked, ITEM, LANES, False)
                    else:
                        tl.store(base + (at_b[:, None] * LANES + lane), new, mask=there)
                        part = 2 * ((place_16 & 15).to(tl.int32)[:, None] + lane * ITEM) + 1
                        if ITEM <= 2:
                            change = tl.sum((new.to(tl.int32) - old.to(tl.int32)) * part, axis=1).to(tl.int64)
                        else:
                            change = tl.sum((new.to(tl.int64) - old.to(tl.int64)) * part, axis=1)
                        moved += change * _weight(place_16 >> 4)
                    done += tl.sum(of_unit, axis=0)
                if not MARKED:
                    tl.atomic_add(total, tl.sum(moved, axis=0), sem="relaxed")
            else:
                tl.atomic_add(counts + 3, 1, sem="relaxed")
            # Before the list is written again.
            tl.debug_barrier()


@triton.jit
def apply_blocks(
    entries,
    data,
    starts,
    rows,
    total,
    sizes,
    scratch,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write blocks' values to the live weights, and add to ``total`` what that changes.

    ``starts``: for each row its first byte in the stream, and behind them a number beyond all. ``rows``: int64 ``[n, 6]``:
    address, lines, bytes of a line, outer and line stride, bytes. ``sizes``: rows, blocks, which the programs take in turns,
    bytes of the data, and where elements of this size begin and end in the stream. ``scratch``: uint16 ``[programs, MOST]``.

    Whatever a block tells, nothing is read outside the data, nor written outside the weights. A block that is no sender's is
    left out, and the weight sum then tells of it.
    """
    listed = scratch + tl.program_id(0) * MOST
    for number in range(tl.program_id(0), tl.load(sizes + 1).to(tl.int32), tl.num_programs(0)):
        first = tl.load(entries + 2 * number)
        told = tl.load(entries + 2 * number + 1)
        start = (told & 0x3FFFFFFF) * 4
        block = data + start
        mode = ((told >> 30) & 3).to(tl.int32)
        count = ((told >> 32) & 0xFFFF).to(tl.int32)
        elements = ((told >> 48) & 0xFFFF).to(tl.int32)
        low = first * 0
        high = tl.load(sizes)
        while low + 1 < high:
            middle = (low + high) // 2
            before = tl.load(starts + middle) <= first
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        sparse = (2 * count + ALIGN - 1) // ALIGN * ALIGN
        bitmap = (elements + 8 * ALIGN - 1) // (8 * ALIGN) * ALIGN
        header = tl.where(mode == 0, sparse, tl.where(mode == 1, bitmap, 0))
        values = (block + header).to(tl.pointer_type(WORD))
        limit = tl.where(mode == 2, elements, count)
        sound = (mode <= 2) & (count <= elements) & (elements <= MOST)
        sound = sound & (start % ALIGN == 0) & (start + header + limit * ITEM <= tl.load(sizes + 2))
        sound = sound & (first >= tl.load(sizes + 3)) & (first % ITEM == 0)
        # Not a sum with ``first``, which could be too large for 64 bits.
        sound = sound & (first <= tl.load(sizes + 4) - elements.to(tl.int64) * ITEM)
        limit = tl.where(sound, limit, 0)
        if sound & (mode == 1):
            done = count * 0
            for begin in range(0, (elements + 7) // 8, CHUNK):
                byte = begin + tl.arange(0, CHUNK)
                held = tl.load(block + byte, mask=byte * 8 < elements, other=0).to(tl.int32)
                bit = tl.arange(0, 8)[None, :]
                flags = (held[:, None] >> bit) & 1
                of_byte = tl.sum(flags, axis=1)
                at = done + (tl.cumsum(of_byte, axis=0) - of_byte)[:, None] + tl.cumsum(flags, axis=1) - flags
                tl.store(
                    listed + at, (byte[:, None] * 8 + bit).to(tl.uint16), mask=(flags > 0) & (at < count)
                )
                done += tl.sum(of_byte, axis=0)
            tl.debug_barrier()
        moved = tl.zeros((CHUNK,), dtype=tl.int64)
        for begin in range(0, limit, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            valid = at < limit
            told_here = tl.load(block.to(tl.pointer_type(tl.uint16)) + at, mask=valid & (mode == 0), other=0)
            found = tl.load(listed + at, mask=valid & (mode == 1), other=0)
            index = tl.where(mode == 2, at, told_here.to(tl.int32) + found.to(tl.int32))
            valid = valid & (index < elements)
            stream = first + index.to(tl.int64) * ITEM
            row = low + tl.zeros((CHUNK,), dtype=tl.int64)
            beyond = valid & (stream >= tl.load(starts + row + 1))
            while tl.max(beyond.to(tl.int32), axis=0) > 0:
                row = tl.where(beyond, row + 1, row)
                beyond = valid & (stream >= tl.load(starts + row + 1))
            held_at = rows + row * 6
            within = (stream - tl.load(starts + row)).to(tl.int32)
            # Between two parts there may be a gap.
            valid = valid & (within < tl.load(held_at + 5))
            run = tl.load(held_at + 2).to(tl.int32)
            lines = tl.load(held_at + 1).to(tl.int32)
            line = within // run
            column = within - line * run
            outer = line // lines
            line = line - outer * lines
            address = tl.load(held_at) + outer.to(tl.int64) * tl.load(held_at + 3)
            address = address + line.to(tl.int64) * tl.load(held_at + 4) + column
            live = address.to(tl.pointer_type(WORD))
            new = tl.load(values + at, mask=valid, other=0)
            old = tl.load(live, mask=valid, other=0)
            tl.store(live, new, mask=valid)
            part = 2 * (stream & 15) + 1
            change = (new.to(tl.int64) - old.to(tl.int64)) * part * _weight(stream >> 4)
            moved += tl.where(valid, change, 0)
        tl.atomic_add(total, tl.sum(moved, axis=0), sem="relaxed")
        # Before the list is written again.
        tl.debug_barrier()


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
    value = tl.load(source + (offset_a[:, None] * LANES + lane), mask=mask[:, None], other=0).to(tl.int64)
    stream = b + offset_b * (LANES * ITEM)
    part = 2 * ((stream & 15)[:, None] + lane * ITEM) + 1
    weighed = tl.where(mask, tl.sum(value * part, axis=1) * _weight(stream >> 4), 0)
    tl.atomic_add(total, tl.sum(weighed, axis=0), sem="relaxed")
