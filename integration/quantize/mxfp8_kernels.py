"""The Triton kernel of MXFP8: reads weights once, writes codes and scales. Imported only where it runs.

A program quantizes some blocks of one weight of the table. Addresses are plain integers.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .fp8_kernels import e4m3
from .nvfp4_kernels import in_fp32


@triton.jit
def quantize_mxfp8(
    tiles,
    rows,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCKS: tl.constexpr,
    SATURATES: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """:func:`.mxfp8.quantize`, the same operations in the same order; ``SATURATES`` for :attr:`.mxfp8.Rounding.DOWN`.

    A row, ``UNIT`` and ``CONVERTS`` are those of :func:`.fp8_kernels.quantize_blocks`, of jobs that cut no block.
    """
    pid = tl.program_id(0)
    row = rows + tl.load(tiles + pid).to(tl.int64) * COLUMNS
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), UNIT * WORD.primitive_bitwidth // 8)
    codes = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.uint8)), UNIT)
    scales_at = tl.load(row + 2)
    height = tl.load(row + 3).to(tl.int32)
    across = tl.load(row + 4).to(tl.int32) // 32
    source_row = tl.multiple_of(tl.load(row + 5), UNIT)
    codes_row = tl.multiple_of(tl.load(row + 7), UNIT)
    if UNIT > 1:
        source_column = 1
        codes_column = 1
    else:
        source_column = tl.load(row + 6)
        codes_column = tl.load(row + 8)
    top = tl.load(row + 12).to(tl.int32)
    left = tl.multiple_of(tl.load(row + 13).to(tl.int32), UNIT)
    bottom = tl.load(row + 14).to(tl.int32)
    right = tl.multiple_of(tl.load(row + 15).to(tl.int32), UNIT)
    block = (pid - tl.load(row + 11).to(tl.int32)) * BLOCKS + tl.arange(0, BLOCKS)
    down = block // across
    over = block - down * across
    inside = down < height
    r = down[:, None]
    c = over[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = inside[:, None] & (c >= 0)
    x = in_fp32(tl.load(source + (r * source_row + c * source_column), mask=mask, other=0.0), ROUND)
    # Sizes in the order of their bits as integers, NaN above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if SATURATES:
        byte = (largest >> 23) - 8
        byte = tl.where(byte < 0, 0, byte)
    else:
        bits = (largest.to(tl.float32, bitcast=True) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
        exponent = bits >> 23
        mantissa = bits & 0x7FFFFF
        byte = exponent + tl.where(exponent == 0, mantissa > 0x400000, mantissa != 0).to(tl.int32)
    finite = largest < 0x7F800000
    byte = tl.where(finite, byte, 255)
    # 2 ** (127 - byte), and NaN.
    factor = tl.where(finite, (254 - byte) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    scaled = x * factor[:, None]
    if SATURATES:
        scaled = tl.where(scaled > 448.0, 448.0, scaled)
        scaled = tl.where(scaled < -448.0, -448.0, scaled)
    if CONVERTS:
        # It saturates where torch's has NaN: beyond 448, where nothing scaled is, but for NaN.
        q = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        q = e4m3(scaled)
    wanted = mask & (r >= top) & (r < bottom) & (c >= left) & (c < right)
    tl.store(codes + ((r - top) * codes_row + (c - left) * codes_column), q, mask=wanted)
    scale_at = scales_at.to(tl.pointer_type(tl.uint8)) + (down * tl.load(row + 9) + over * tl.load(row + 10))
    tl.store(scale_at, byte.to(tl.uint8), mask=inside & (scales_at != 0))
