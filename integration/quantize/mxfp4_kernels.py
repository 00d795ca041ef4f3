"""The Triton kernel of MXFP4: reads weights once, writes codes and scales. Imported only where it runs.

A program quantizes some blocks of one part of the table. Addresses are plain integers.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .nvfp4_kernels import e2m1, in_fp32


@triton.jit
def quantize_mxfp4(
    tiles,
    rows,
    WORD: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROUND: tl.constexpr,
    DOWN: tl.constexpr,
    UNIT: tl.constexpr,
):
    """:func:`.mxfp4.quantize` of weights, the same operations in the same order.

    A row: addresses of weights, codes and scales, which lie row by row without gaps, rows of weights, blocks of a row, strides of the
    weights in elements, and the first program. ``ROUND``: to BF16 first. ``DOWN``: neighbouring threads take neighbouring rows, for
    weights whose columns are contiguous. With ``UNIT`` above 1, rows of weights are contiguous, and their addresses and distances
    multiples of that many elements.
    """
    pid = tl.program_id(0)
    row = rows + tl.load(tiles + pid).to(tl.int64) * 8
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), UNIT * WORD.primitive_bitwidth // 8)
    codes = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.uint8)), 16)
    scales = tl.load(row + 2).to(tl.pointer_type(tl.uint8))
    height = tl.load(row + 3).to(tl.int32)
    across = tl.load(row + 4).to(tl.int32)
    source_row = tl.multiple_of(tl.load(row + 5), UNIT)
    if UNIT > 1:
        source_column = 1
    else:
        source_column = tl.load(row + 6)
    number = (pid - tl.load(row + 7).to(tl.int32)) * BLOCKS + tl.arange(0, BLOCKS)
    inside = number < height * across
    if DOWN:
        over = number // height
        down = number - over * height
    else:
        down = number // across
        over = number - down * across
    begin = down.to(tl.int64) * source_row + over.to(tl.int64) * 32 * source_column
    element = tl.arange(0, 32)[None, :]
    mask = inside[:, None] & (element >= 0)
    x = in_fp32(tl.load(source + (begin[:, None] + element * source_column), mask=mask, other=0.0), ROUND)
    # Sizes in the order of their bits as integers, NaN above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < 0x7F800000
    sixth = tl.div_rn(tl.where(finite, largest, 0).to(tl.float32, bitcast=True), 6.0)
    # Up to a power of two, by its bits.
    bits = (sixth.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    exponent = bits >> 23
    # 1 over it, exactly: 2 ** (127 - exponent).
    factor = tl.where(exponent == 0, 0, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = x * factor[:, None]
    # A zero's sign is kept.
    code = e2m1(tl.abs(scaled)) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    code = tl.where(finite[:, None], code, 0)
    low, high = tl.split(tl.reshape(code, [BLOCKS, 16, 2]))
    half = tl.arange(0, 16)[None, :]
    block = down.to(tl.int64) * across + over
    tl.store(
        codes + (block[:, None] * 16 + half),
        (low | (high << 4)).to(tl.uint8),
        mask=inside[:, None] & (half >= 0),
    )
    tl.store(scales + block, tl.where(finite, exponent, 255).to(tl.uint8), mask=inside)
