"""Triton kernels of deltas: pack what differs from the base, put it where it belongs, and weigh weights.

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
def pack_changed(
    tiles,
    rows,
    place,
    counts,
    total,
    entries,
    data,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Compare side a of each row with the base, which is side b, and pack a block of what differs.

    ``place``: address of the base's first byte, and bytes that ``data`` has. ``counts``: as :mod:`.blocks` has them. A block
    that finds no room leaves the base as it is, so that the next pass finds it once more.
    """
    a, b, offset_a, offset_b, mask, _ = _place(tl.program_id(0), tiles, rows, COLUMNS, TILE, NESTED)
    source = tl.multiple_of(a.to(tl.pointer_type(WORD)), LANES * ITEM)
    base = tl.multiple_of(b.to(tl.pointer_type(WORD)), LANES * ITEM)
    lane = tl.arange(0, LANES)[None, :]
    inside = mask[:, None]
    kept = base + (offset_b[:, None] * LANES + lane)
    new = tl.load(source + (offset_a[:, None] * LANES + lane), mask=inside, other=0)
    old = tl.load(kept, mask=inside, other=0)
    differs = new != old
    of_unit = tl.sum(differs.to(tl.int32), axis=1)
    count = tl.sum(of_unit, axis=0)
    if count > 0:
        units = tl.sum(mask.to(tl.int32), axis=0)
        elements = units * LANES
        values = count * ITEM
        sparse = (2 * count + ALIGN - 1) // ALIGN * ALIGN
        bitmap = (elements + 8 * ALIGN - 1) // (8 * ALIGN) * ALIGN
        mode = tl.where(sparse <= bitmap, 0, 1)
        header = tl.minimum(sparse, bitmap)
        dense = elements * ITEM <= header + values
        mode = tl.where(dense, 2, mode)
        header = tl.where(dense, 0, header)
        values = tl.where(dense, elements * ITEM, values)
        need = (header + values + ALIGN - 1) // ALIGN * ALIGN
        start = tl.atomic_add(counts + 1, need.to(tl.int64), sem="relaxed")
        if start + need <= tl.load(place + 1):
            slot = tl.atomic_add(counts, 1, sem="relaxed")
            tl.atomic_max(counts + 2, start + need, sem="relaxed")
            tl.atomic_add(counts + 4, count.to(tl.int64), sem="relaxed")
            # Of this tile, in bytes of the stream: the rows of the base have no gaps.
            stream = b - tl.load(place) + offset_b * (LANES * ITEM)
            first = tl.min(tl.where(mask, stream, 1 << 62), axis=0)
            tl.store(entries + 2 * slot, first)
            told = (start // 4) | (mode.to(tl.int64) << 30)
            told = told | (count.to(tl.int64) << 32) | (elements.to(tl.int64) << 48)
            tl.store(entries + 2 * slot + 1, told)
            ahead = tl.cumsum(differs.to(tl.int32), axis=1) - differs.to(tl.int32)
            ahead = ahead + (tl.cumsum(of_unit, axis=0) - of_unit)[:, None]
            element = tl.arange(0, TILE)[:, None] * LANES + lane
            block = data + start
            landed = (block + header).to(tl.pointer_type(WORD))
            if mode == 0:
                tl.store(block.to(tl.pointer_type(tl.int16)) + ahead, element.to(tl.int16), mask=differs)
                tl.store(landed + ahead, new, mask=differs)
            elif mode == 1:
                bits = tl.reshape(differs.to(tl.int32) << (element & 7), (TILE * LANES // 8, 8))
                number = tl.arange(0, TILE * LANES // 8)
                tl.store(block + number, tl.sum(bits, axis=1).to(tl.int8), mask=number * 8 < elements)
                tl.store(landed + ahead, new, mask=differs)
            else:
                tl.store(landed + element, new, mask=inside)
            tl.store(kept, new, mask=differs)
            part = 2 * ((stream & 15)[:, None] + lane * ITEM) + 1
            moved = tl.sum((new.to(tl.int64) - old.to(tl.int64)) * part, axis=1)
            moved = tl.where(mask, moved * _weight(stream >> 4), 0)
            tl.atomic_add(total, tl.sum(moved, axis=0), sem="relaxed")
        else:
            tl.atomic_add(counts + 3, 1, sem="relaxed")


@triton.jit
def apply_blocks(
    entries,
    data,
    starts,
    rows,
    total,
    last_row,
    WORD: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write a block's values to the live weights, and add to ``total`` what that changes.

    ``starts``: for each row its first byte in the stream, and behind them a number beyond all. ``rows``: int64 ``[n, 5]``:
    address, lines, bytes of a line, outer and line stride.
    """
    entry = entries + 2 * tl.program_id(0)
    first = tl.load(entry)
    told = tl.load(entry + 1)
    block = data + (told & 0x3FFFFFFF) * 4
    mode = ((told >> 30) & 3).to(tl.int32)
    count = ((told >> 32) & 0xFFFF).to(tl.int32)
    elements = ((told >> 48) & 0xFFFF).to(tl.int32)
    low = first * 0
    high = tl.load(last_row) + 1
    while low + 1 < high:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= first
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    sparse = (2 * count + ALIGN - 1) // ALIGN * ALIGN
    bitmap = (elements + 8 * ALIGN - 1) // (8 * ALIGN) * ALIGN
    header = tl.where(mode == 0, sparse, tl.where(mode == 1, bitmap, 0))
    values = (block + header).to(tl.pointer_type(WORD))
    limit = tl.where(mode == 0, count, elements)
    done = count * 0
    moved = tl.zeros((CHUNK,), dtype=tl.int64)
    for begin in range(0, limit, CHUNK):
        number = begin + tl.arange(0, CHUNK)
        valid = number < limit
        listed = tl.load(block.to(tl.pointer_type(tl.uint16)) + number, mask=valid & (mode == 0), other=0)
        flags = tl.load(block + number // 8, mask=valid & (mode == 1), other=0).to(tl.int32)
        on = ((flags >> (number & 7)) & 1) * valid.to(tl.int32)
        index = tl.where(mode == 0, listed.to(tl.int32), number)
        value_at = tl.where(mode == 1, done + tl.cumsum(on, axis=0) - on, number)
        done += tl.sum(on, axis=0)
        valid = valid & ((mode != 1) | (on > 0))
        stream = first + index.to(tl.int64) * ITEM
        row = low + tl.zeros((CHUNK,), dtype=tl.int64)
        beyond = valid & (stream >= tl.load(starts + row + 1))
        while tl.max(beyond.to(tl.int32), axis=0) > 0:
            row = tl.where(beyond, row + 1, row)
            beyond = valid & (stream >= tl.load(starts + row + 1))
        held = rows + row * 5
        within = (stream - tl.load(starts + row)).to(tl.int32)
        run = tl.load(held + 2).to(tl.int32)
        lines = tl.load(held + 1).to(tl.int32)
        line = within // run
        column = within - line * run
        outer = line // lines
        line = line - outer * lines
        address = tl.load(held) + outer.to(tl.int64) * tl.load(held + 3)
        address = address + line.to(tl.int64) * tl.load(held + 4) + column
        live = address.to(tl.pointer_type(WORD))
        new = tl.load(values + value_at, mask=valid, other=0)
        old = tl.load(live, mask=valid, other=0)
        tl.store(live, new, mask=valid)
        part = 2 * (stream & 15) + 1
        change = (new.to(tl.int64) - old.to(tl.int64)) * part * _weight(stream >> 4)
        moved += tl.where(valid, change, 0)
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
    value = tl.load(source + (offset_a[:, None] * LANES + lane), mask=mask[:, None], other=0).to(tl.int64)
    stream = b + offset_b * (LANES * ITEM)
    part = 2 * ((stream & 15)[:, None] + lane * ITEM) + 1
    weighed = tl.where(mask, tl.sum(value * part, axis=1) * _weight(stream >> 4), 0)
    tl.atomic_add(total, tl.sum(weighed, axis=0), sem="relaxed")
