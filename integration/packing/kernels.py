"""Triton kernels over segment tables. Imported only where there is a CUDA device.

A program handles one tile of one row of the table: ``TILE`` units of ``LANES`` words each, so that a unit of
16 bytes is one access of a thread. Addresses are plain integers: of this process, or of a peer's memory
that is mapped into it.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

# For each unit in bytes its word type, the word's bytes, and the words of a unit. A unit of 16 bytes is two
# lanes of one access; the checksum is defined on 32-bit words, of which narrower units are parts.
COPY_WORDS = {
    16: (tl.int64, 8, 2),
    8: (tl.int64, 8, 1),
    4: (tl.int32, 4, 1),
    2: (tl.int16, 2, 1),
    1: (tl.int8, 1, 1),
}
FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NUMBERS = {**FLOATS, torch.uint8: tl.uint8}
CHECKSUM_WORDS = {
    16: (tl.uint32, 4, 4),
    8: (tl.uint32, 4, 2),
    4: (tl.uint32, 4, 1),
    2: (tl.uint16, 2, 1),
    1: (tl.uint8, 1, 1),
}


@triton.jit
def _place(pid, tiles, rows, COLUMNS: tl.constexpr, TILE: tl.constexpr, NESTED: tl.constexpr):
    """Addresses of a tile's row, its units' offsets on both sides (in units), their mask, and the row's slot."""
    row = rows + tl.load(tiles + pid).to(tl.int64) * COLUMNS
    count = tl.load(row + 2).to(tl.int32)
    index = (pid - tl.load(row + 9).to(tl.int32)) * TILE + tl.arange(0, TILE)
    offset_a, offset_b = unit_offsets(row, index, NESTED)
    return tl.load(row), tl.load(row + 1), offset_a, offset_b, index < count, tl.load(row + 10)


@triton.jit
def unit_offsets(row, index, NESTED: tl.constexpr):
    """Offsets of a row's units on both sides, in units."""
    run = tl.load(row + 3).to(tl.int32)
    line = index // run
    column = index - line * run
    if NESTED:
        lines = tl.load(row + 4).to(tl.int32)
        outer = line // lines
        line = line - outer * lines
        offset_a = outer.to(tl.int64) * tl.load(row + 5) + line.to(tl.int64) * tl.load(row + 6) + column
        offset_b = outer.to(tl.int64) * tl.load(row + 7) + line.to(tl.int64) * tl.load(row + 8) + column
    else:
        offset_a = line.to(tl.int64) * tl.load(row + 6) + column
        offset_b = line.to(tl.int64) * tl.load(row + 8) + column
    return offset_a, offset_b


@triton.jit
def copy_segments(
    tiles,
    rows,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Copy side a of each row to side b."""
    a, b, offset_a, offset_b, mask, _ = _place(tl.program_id(0), tiles, rows, COLUMNS, TILE, NESTED)
    # The hint on the pointer: one on the number is lost in the conversion, and accesses would be of single words.
    source = tl.multiple_of(a.to(tl.pointer_type(WORD)), LANES * WORD_BYTES)
    target = tl.multiple_of(b.to(tl.pointer_type(WORD)), LANES * WORD_BYTES)
    lane = tl.arange(0, LANES)[None, :]
    mask = mask[:, None]
    value = tl.load(source + (offset_a[:, None] * LANES + lane), mask=mask)
    tl.store(target + (offset_b[:, None] * LANES + lane), value, mask=mask)


@triton.jit
def bits_to_bf16(x):
    """The bits of FP32 numbers, no NaN, of which the upper half is the nearest BF16."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits + 0x7FFF + ((bits >> 16) & 1)


@triton.jit
def to_bf16(x):
    """FP32 to the nearest BF16, ties to even, as torch rounds on a CPU (``c10/util/BFloat16.h``), NaN included.

    Triton's interpreter cuts the bits off instead.
    """
    return tl.where(x == x, bits_to_bf16(x) >> 16, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def cast_segments(
    tiles,
    rows,
    COLUMNS: tl.constexpr,
    SOURCE: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
    TARGET: tl.constexpr,
    TARGET_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Cast side a of each row to side b. Addresses and strides count elements, ``LANES`` of which are a unit."""
    a, b, offset_a, offset_b, mask, _ = _place(tl.program_id(0), tiles, rows, COLUMNS, TILE, NESTED)
    source = tl.multiple_of((a * SOURCE_BYTES).to(tl.pointer_type(SOURCE)), LANES * SOURCE_BYTES)
    target = tl.multiple_of((b * TARGET_BYTES).to(tl.pointer_type(TARGET)), LANES * TARGET_BYTES)
    lane = tl.arange(0, LANES)[None, :]
    mask = mask[:, None]
    value = tl.load(source + (offset_a[:, None] * LANES + lane), mask=mask)
    if tl.bfloat16 == TARGET:
        value = to_bf16(value.to(tl.float32))
    tl.store(target + (offset_b[:, None] * LANES + lane), value.to(TARGET), mask=mask)


@triton.jit
def largest_magnitudes(
    tiles,
    rows,
    out,
    COLUMNS: tl.constexpr,
    SOURCE: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The largest magnitude of side a of each row into ``out[slot]``, as the bits of FP32, of which NaN's are the largest.

    As in :func:`cast_segments`, all counts in elements. ``COUNT`` tiles, however many programs there are.
    """
    for tile in range(tl.program_id(0), COUNT, tl.num_programs(0)):
        a, _, offset_a, _, mask, slot = _place(tile, tiles, rows, COLUMNS, TILE, NESTED)
        source = tl.multiple_of((a * SOURCE_BYTES).to(tl.pointer_type(SOURCE)), LANES * SOURCE_BYTES)
        lane = tl.arange(0, LANES)[None, :]
        value = tl.load(source + (offset_a[:, None] * LANES + lane), mask=mask[:, None], other=0)
        if tl.bfloat16 == SOURCE:
            bits = (value.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32) << 16
        else:
            bits = value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(out + slot, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")


@triton.jit
def _mix(x):
    x = x * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def checksum_segments(
    tiles,
    rows,
    out,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Add up each row's words, weighted by their place in the message, which is side b; into ``out[slot]``."""
    a, b, offset_a, offset_b, mask, slot = _place(tl.program_id(0), tiles, rows, COLUMNS, TILE, NESTED)
    source = tl.multiple_of(a.to(tl.pointer_type(WORD)), LANES * WORD_BYTES)
    lane = tl.arange(0, LANES)[None, :]
    value = tl.load(source + (offset_a[:, None] * LANES + lane), mask=mask[:, None], other=0).to(tl.uint64)
    position = b + (offset_b[:, None] * LANES + lane) * WORD_BYTES
    if WORD_BYTES < 4:
        value = value << ((position & 3) * 8).to(tl.uint64)
    twice = ((position >> 2) * 2).to(tl.uint64)
    first = tl.sum(tl.sum((value * _mix(twice)).to(tl.int64, bitcast=True), axis=1), axis=0)
    second = tl.sum(tl.sum((value * _mix(twice + 1)).to(tl.int64, bitcast=True), axis=1), axis=0)
    tl.atomic_add(out + slot * 2, first, sem="relaxed")
    tl.atomic_add(out + slot * 2 + 1, second, sem="relaxed")
