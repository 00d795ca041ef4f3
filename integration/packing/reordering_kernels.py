"""Triton kernels of :mod:`.reordering`. Imported only where they run. Addresses are plain integers.

A row of a table ends with the number of its first program.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def set_aside(tiles, rows, aside, TILE: tl.constexpr):
    """Copy memory to its place in ``aside``, in units of 16 bytes. A row: address, units, units before it in ``aside``."""
    pid = tl.program_id(0)
    row = rows + tl.load(tiles + pid).to(tl.int64) * 4
    index = (pid - tl.load(row + 3).to(tl.int32)) * TILE + tl.arange(0, TILE)
    mask = (index < tl.load(row + 1).to(tl.int32))[:, None]
    lane = tl.arange(0, 2)[None, :]
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(aside.to(tl.pointer_type(tl.int64)), 16) + tl.load(row + 2) * 2
    value = tl.load(source + (index[:, None] * 2 + lane), mask=mask)
    tl.store(target + (index[:, None] * 2 + lane), value, mask=mask)


@triton.jit
def _part(tiles, rows, TILES: tl.constexpr):
    """What this program makes: the matrix's row of the table, its columns, tiles in a row of them, a tile's rows and columns, the row of
    tiles, and the first of up to ``TILES`` in it."""
    pid = tl.program_id(0)
    row = rows + tl.load(tiles + pid).to(tl.int64) * 11
    columns = tl.load(row + 2).to(tl.int32)
    across = tl.load(row + 3).to(tl.int32)
    height = tl.load(row + 4).to(tl.int32)
    width = tl.load(row + 5).to(tl.int32)
    chunks = (across + TILES - 1) // TILES
    local = pid - tl.load(row + 10).to(tl.int32)
    down = local // chunks
    return row, columns, across, height, width, down, (local - down * chunks) * TILES


@triton.jit
def put_in_order(
    tiles,
    rows,
    aside,
    maps,
    choices,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    TILES: tl.constexpr,
    MAPPED: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Write matrices from ``aside`` in order. A program makes up to ``TILES`` neighbours of a row of tiles, of ``WORDS`` words of 32
    bits each.

    A row: address, bytes before it in ``aside``, columns of the matrix, tiles in a row of them, a tile's rows and columns, addresses
    of the rows' starts, of the columns', and of each place's row and column, and the slot. With ``PAIRED`` the two elements of a byte
    lie four places apart in one word, the low one first: half as many reads.
    """
    row, columns, across, height, width, down, begin = _part(tiles, rows, TILES)
    over = begin + tl.arange(0, TILES)
    mask = over < across
    row_starts = tl.load(row + 6).to(tl.pointer_type(tl.int32))
    column_starts = tl.load(row + 7).to(tl.pointer_type(tl.int32))
    order = tl.load(row + 8).to(tl.pointer_type(tl.int32))
    start = tl.load(row_starts + down) + tl.load(column_starts + over, mask=mask, other=0)
    source = aside + tl.load(row + 1)
    if BITS == 16:
        source = source.to(tl.pointer_type(tl.uint16))
    word = tl.arange(0, WORDS)
    first = (down * height * columns + over * width)[:, None]
    mask = mask[:, None] & (word >= 0)[None, :]
    if MAPPED:
        bytes_of = maps + tl.load(choices + tl.load(row + 9)).to(tl.int64) * 256
    made = tl.zeros([TILES, WORDS], dtype=tl.uint32)
    for part in tl.static_range(32 // BITS // (2 if PAIRED else 1)):
        at = tl.load(order + word * (32 // BITS) + part)
        element = first + ((at >> 16) * columns + (at & 0xFFFF))[None, :]
        if PAIRED:
            value = tl.load(source + (element >> 1), mask=mask, other=0).to(tl.uint32)
            value = (value & 0xF) | ((value & 0xF0) << 12)
        elif BITS == 4:
            value = tl.load(source + (element >> 1), mask=mask, other=0).to(tl.uint32)
            value = (value >> ((element & 1) * 4).to(tl.uint32)) & 0xF
        else:
            value = tl.load(source + element, mask=mask, other=0).to(tl.uint32)
            if MAPPED:
                value = tl.load(bytes_of + value.to(tl.int32), mask=mask, other=0).to(tl.uint32)
        made |= value << (part * BITS)
    target = tl.load(row).to(tl.pointer_type(tl.int32))
    place = start.to(tl.int64)[:, None] * WORDS + word[None, :]
    tl.store(target + place, made.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def put_quads_in_order(
    tiles,
    rows,
    aside,
    maps,
    choices,
    QUADS: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """As :func:`put_in_order`, for elements of 4 bits in an order in which four words are made of four loaded ones: each has the
    byte of one number of all four, the low halves first. Whole words are read, a quarter as often as bytes.

    ``LANES`` quads lie side by side, first their words of byte 0, then those of byte 1, and so on. In a row there are the addresses
    of the quads' loaded words, a row and a word in it, instead of those of the places; the slot is of no use. ``WIDE``: a row of a
    tile has as many words as there are neighbours worth reading at a time.
    """
    row, columns, across, height, width, down, first = _part(tiles, rows, TILES)
    # In one dimension, so that the threads of a warp read words that lie near each other: of the quads of a wide tile, and of the same
    # row of neighbouring tiles otherwise.
    lane = tl.arange(0, QUADS * TILES)
    if WIDE:
        over = first + lane // QUADS
        quad = lane % QUADS
    else:
        over = first + lane % TILES
        quad = lane // TILES
    mask = over < across
    quads = tl.load(row + 8).to(tl.pointer_type(tl.int32)) + quad
    source = (aside + tl.load(row + 1)).to(tl.pointer_type(tl.uint32))
    stride = columns // 8
    source += down * height * stride + over * (width // 8)
    at = tl.load(quads)
    x0 = tl.load(source + ((at >> 16) * stride + (at & 0xFFFF)), mask=mask, other=0)
    at = tl.load(quads + QUADS)
    x1 = tl.load(source + ((at >> 16) * stride + (at & 0xFFFF)), mask=mask, other=0)
    at = tl.load(quads + 2 * QUADS)
    x2 = tl.load(source + ((at >> 16) * stride + (at & 0xFFFF)), mask=mask, other=0)
    at = tl.load(quads + 3 * QUADS)
    x3 = tl.load(source + ((at >> 16) * stride + (at & 0xFFFF)), mask=mask, other=0)
    # Of all bytes of two words the low halves and the high halves come together, then bytes change places, then pairs of bytes.
    low01 = (x0 & 0x0F0F0F0F) | ((x1 << 4) & 0xF0F0F0F0)
    low23 = (x2 & 0x0F0F0F0F) | ((x3 << 4) & 0xF0F0F0F0)
    high01 = ((x0 >> 4) & 0x0F0F0F0F) | (x1 & 0xF0F0F0F0)
    high23 = ((x2 >> 4) & 0x0F0F0F0F) | (x3 & 0xF0F0F0F0)
    low02 = (low01 & 0x00FF00FF) | ((low23 << 8) & 0xFF00FF00)
    low13 = ((low01 >> 8) & 0x00FF00FF) | (low23 & 0xFF00FF00)
    high02 = (high01 & 0x00FF00FF) | ((high23 << 8) & 0xFF00FF00)
    high13 = ((high01 >> 8) & 0x00FF00FF) | (high23 & 0xFF00FF00)
    y0 = (low02 & 0xFFFF) | (high02 << 16)
    y1 = (low13 & 0xFFFF) | (high13 << 16)
    y2 = (low02 >> 16) | (high02 & 0xFFFF0000)
    y3 = (low13 >> 16) | (high13 & 0xFFFF0000)
    made = tl.join(tl.join(y0, y2), tl.join(y1, y3))
    if WIDE:
        made = tl.permute(tl.reshape(made, [TILES, QUADS // LANES, LANES, 2, 2]), [0, 1, 3, 4, 2])
    else:
        made = tl.permute(tl.reshape(made, [QUADS // LANES, LANES, TILES, 2, 2]), [2, 0, 3, 4, 1])
    made = tl.reshape(made, [TILES, 4 * QUADS])
    over = first + tl.arange(0, TILES)
    mask = over < across
    row_starts = tl.load(row + 6).to(tl.pointer_type(tl.int32))
    column_starts = tl.load(row + 7).to(tl.pointer_type(tl.int32))
    start = tl.load(row_starts + down) + tl.load(column_starts + over, mask=mask, other=0)
    word = tl.arange(0, 4 * QUADS)
    target = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
    place = start.to(tl.int64)[:, None] * (4 * QUADS) + word[None, :]
    tl.store(target + place, made.to(tl.int32, bitcast=True), mask=mask[:, None] & (word >= 0)[None, :])


@triton.jit
def largest_bytes(tiles, rows, found, TILE: tl.constexpr):
    """The largest byte below 0x7F, which is E4M3's NaN, behind which are negative numbers. A row: address, bytes, slot."""
    pid = tl.program_id(0)
    row = rows + tl.load(tiles + pid).to(tl.int64) * 4
    index = (pid - tl.load(row + 3).to(tl.int32)) * TILE + tl.arange(0, TILE)
    mask = index < tl.load(row + 1).to(tl.int32)
    value = tl.load(tl.load(row).to(tl.pointer_type(tl.uint8)) + index, mask=mask, other=0).to(tl.int32)
    largest = tl.max(tl.where(value < 0x7F, value, 0), axis=0)
    tl.atomic_max(found + tl.load(row + 2), largest, sem="relaxed")
