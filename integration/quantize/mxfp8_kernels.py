"""The Triton kernel of MXFP8: reads weights once, writes codes and scales. Imported only where it runs.

A program quantizes some blocks of one weight of the table. Addresses are plain integers.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .fp8_kernels import read_row, store_codes
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

    A row, ``UNIT`` and ``CONVERTS`` are those of :func:`.fp8_kernels.read_row` and :func:`.fp8_kernels.store_codes`; no row cuts a block.
    """
    row, weights, target, scales_at, height, width, number = read_row(tiles, rows, COLUMNS, WORD, UNIT, UNIT)
    source, source_row, source_column = weights
    across = width // 32
    block = number * BLOCKS + tl.arange(0, BLOCKS)
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
    store_codes(target, r, c, scaled, CONVERTS)
    scale_at = scales_at.to(tl.pointer_type(tl.uint8)) + (down * tl.load(row + 9) + over * tl.load(row + 10))
    tl.store(scale_at, byte.to(tl.uint8), mask=inside & (scales_at != 0))
