"""The Triton kernel of INT4: reads weights once, writes codes and scales. Imported only where it runs.

A program quantizes some groups of one weight of the table. Addresses are plain integers.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ..packing.kernels import bits_to_bf16
from .fp8_kernels import read_row
from .nvfp4_kernels import LEAST, in_fp32, quotient


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    """Finite FP32 numbers rounded to those of a type, in FP32."""
    if tl.bfloat16 == KIND:
        x = (bits_to_bf16(x) & 0xFFFF0000).to(tl.float32, bitcast=True)
    elif tl.float16 == KIND:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _joined(codes, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Neighbours of a row in one number, the even one in the lower bits. ``WIDTH``: of the result."""
    low, high = tl.split(tl.reshape(codes, [HEIGHT, WIDTH, 2]))
    return low | (high << BITS)


@triton.jit
def quantize_int4(
    tiles,
    rows,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    EPSILON: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    DOWN: tl.constexpr,
):
    """:func:`.int4.quantize`, the same operations in the same order.

    A row and ``UNIT`` are those of :func:`.fp8_kernels.read_row`; no row cuts a group. ``KIND``: the type of the scales, to which each
    operation rounds, and ``EPSILON`` its own. ``ROUND``: to BF16 first. ``DOWN``: 0, or the codes of a column lie beside each other,
    and a program takes so many rows: what it writes is whole lines of memory then, which a peer's memory needs most.
    """
    row, weights, target, scales_at, height, width, number = read_row(
        tiles, rows, COLUMNS, WORD, UNIT, (UNIT + 7) // 8
    )
    source, source_row, source_column = weights
    across = width // GROUP
    block = tl.arange(0, BLOCKS)
    if DOWN:
        tiles_across = (across + BLOCKS // DOWN - 1) // (BLOCKS // DOWN)
        tile_down = number // tiles_across
        down = tile_down * DOWN + block % DOWN
        over = (number - tile_down * tiles_across) * (BLOCKS // DOWN) + block // DOWN
    else:
        block = number * BLOCKS + block
        down = block // across
        over = block - down * across
    inside = (down < height) & (over < across)
    r = down[:, None]
    c = over[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = inside[:, None] & (c >= 0)
    x = in_fp32(tl.load(source + (r * source_row + c * source_column), mask=mask, other=0.0), ROUND)
    # Sizes in the order of their bits as integers, NaN above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < 0x7F800000
    amax = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
    scale = _rounded(tl.div_rn(amax, 7.5), KIND)
    scale = tl.where(scale == 0.0, EPSILON, scale)
    # What is not finite in a group gets codes without meaning here.
    scaled = _rounded(quotient(x, scale[:, None], tl.min(scale, axis=0) >= LEAST), KIND)
    # The last bit of numbers about 1.5 · 2 ** 23 is worth 1.
    code = (tl.minimum(tl.maximum(scaled, -8.0), 7.0) + 12582920.0).to(tl.int32, bitcast=True) & 15
    code = _joined(code, BLOCKS, GROUP // 2, 4)
    code = _joined(code, BLOCKS, GROUP // 4, 8)
    code = _joined(code, BLOCKS, GROUP // 8, 16)
    code = tl.where(finite[:, None], code, -2004318072)  # eight codes of 0
    codes, codes_row, codes_column, top, left, bottom, right = target
    item = over[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    wanted = inside[:, None] & (r >= top) & (r < bottom) & (item >= left) & (item < right)
    if DOWN:
        codes_row = 1
        codes_column = tl.load(row + 8)
    place = (r - top) * codes_row + (item - left) * codes_column
    if DOWN:
        # Threads that follow each other write along the last dimension.
        code, place, wanted = tl.trans(code), tl.trans(place), tl.trans(wanted)
    tl.store(codes.to(tl.pointer_type(tl.int32)) + place, code, mask=wanted)
    scale_at = scales_at.to(tl.pointer_type(KIND)) + (down * tl.load(row + 9) + over * tl.load(row + 10))
    tl.store(scale_at, tl.where(finite, scale, float("nan")).to(KIND), mask=inside & (scales_at != 0))
