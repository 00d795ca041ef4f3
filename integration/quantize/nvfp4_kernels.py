"""The Triton kernel of NVFP4: reads weights once, writes codes and block scales. Imported only where it runs.

A program quantizes some blocks of one part of the table. Addresses are plain integers.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ..packing.kernels import to_bf16
from .fp8_kernels import e4m3

# From it on no remainder of a division is too small for FP32.
LEAST = tl.constexpr(2.0**-90)


@triton.jit
def e2m1(size):
    """The codes without signs that are nearest to sizes of at most 6, ties to the even one: :func:`.nvfp4.magnitudes`.

    They are the lowest four bits; higher ones have no meaning.
    """
    # Codes are steps of 1/2 below 2, of 1 below 4, and then of 2, which is what the last bit is worth of a number from 2**22,
    # 2**23 and 2**24 on.
    step = (tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & 0x7F800000) + (22 << 23)
    code = (size + step.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - (149 << 23)
    return code + (code >> 22)


@triton.jit
def in_fp32(x, ROUND: tl.constexpr):
    """Numbers of 16 or 32 bits in FP32; ``ROUND``: to BF16 first."""
    if ROUND:
        x = to_bf16(x.to(tl.float32))
    if x.dtype == tl.bfloat16:
        # By its bits: Triton's interpreter makes zeros of the smallest.
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def _larger(a, b):
    """NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quotient(x, by, fast):
    """``x / by``, correctly rounded. ``fast``: nothing overflows, or underflows in a remainder."""
    if fast:
        # As compilers divide, but with a reciprocal for many: one step of Newton's, and two corrections of each quotient.
        inverse = 1.0 / by
        inverse = tl.fma(tl.fma(-by, inverse, 1.0), inverse, inverse)
        opposite = tl.broadcast_to(-by, x.shape)
        inverse = tl.broadcast_to(inverse, x.shape)
        result = x * inverse
        result = tl.fma(tl.fma(opposite, result, x), inverse, result)
        result = tl.fma(tl.fma(opposite, result, x), inverse, result)
    else:
        result = tl.div_rn(x, tl.broadcast_to(by, x.shape))
    return result


@triton.jit
def quantize_nvfp4(
    tiles,
    rows,
    scales_2,
    WORD: tl.constexpr,
    BLOCKS: tl.constexpr,
    TINIEST: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    FLAT: tl.constexpr,
    MOST: tl.constexpr,
):
    """:func:`.nvfp4.quantize` of weights, with the same results.

    A row: addresses of weights, codes and scales, which lie row by row without gaps, blocks, blocks of a row of weights, strides of
    the weights in elements, and the first program. ``ROUND``: to BF16 first. With ``UNIT`` above 1, rows of weights are contiguous,
    and their addresses and distances multiples of that many elements; with ``FLAT`` they lie without gaps. ``MOST``: the largest
    global scale below which nothing underflows, 0 to divide one by one.
    """
    pid = tl.program_id(0)
    at = tl.load(tiles + pid)
    row = rows + at.to(tl.int64) * 8
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), UNIT * WORD.primitive_bitwidth // 8)
    codes = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.uint8)), 8)
    scales = tl.load(row + 2).to(tl.pointer_type(tl.uint8))
    block = (pid - tl.load(row + 7).to(tl.int32)) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < tl.load(row + 3).to(tl.int32)
    source_column = 1
    if FLAT:
        begin = block.to(tl.int64) * 16
    else:
        across = tl.load(row + 4).to(tl.int32)
        source_row = tl.multiple_of(tl.load(row + 5), UNIT)
        if UNIT == 1:
            source_column = tl.load(row + 6)
        down = block // across
        over = block - down * across
        begin = down.to(tl.int64) * source_row + over.to(tl.int64) * 16 * source_column
    element = tl.arange(0, 16)[None, :]
    mask = inside[:, None] & (element >= 0)
    x = tl.load(source + (begin[:, None] + element * source_column), mask=mask, other=0.0)
    x = in_fp32(x, ROUND)
    g = tl.load(scales_2 + at)
    fast = (g >= LEAST) & (g <= MOST)
    amax = tl.reduce(tl.abs(x), 1, _larger)
    finite = amax < float("inf")
    sixfold = 6.0 * g
    limit = 512.0 * sixfold
    scale = _quotient(tl.where(amax < limit, amax, limit), sixfold, fast)
    scale = tl.where(scale < TINIEST, TINIEST, scale)
    scale = tl.where(scale > 448.0, 448.0, scale)
    scale = tl.where(amax == 0.0, 1.0, scale)
    byte = tl.where(finite, e4m3(scale), 0x7F).to(tl.uint8)
    # No scale has a sign.
    bits = byte.to(tl.uint32)
    normal = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    decoded = tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)
    divisor = tl.where(finite, decoded * g, 1.0)
    # E2M1 has no NaN: a block that holds one, or an infinity, is zeros with a scale that is none.
    most = tl.where(finite, 6.0 * divisor, 0.0)[:, None]
    size = _quotient(tl.where(tl.abs(x) < most, tl.abs(x), most), divisor[:, None], fast)
    # Zero has no sign, nor has a quotient that vanishes.
    code = e2m1(size) + tl.where((x < 0.0) & (size > 0.0), 8, 0)
    low, high = tl.split(tl.reshape(code, [BLOCKS, 8, 2]))
    half = tl.arange(0, 8)[None, :]
    place = block.to(tl.int64)[:, None] * 8 + half
    tl.store(codes + place, (low + (high << 4)).to(tl.uint8), mask=inside[:, None] & (half >= 0))
    tl.store(scales + block, byte, mask=inside)
