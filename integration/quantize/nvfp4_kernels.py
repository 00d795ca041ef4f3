"""The Triton kernel of NVFP4: reads weights once, writes codes and block scales. Imported only where it runs.

A program quantizes some blocks of one part of the table. Addresses are plain integers.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ..packing.kernels import to_bf16
from .fp8_kernels import e4m3, read_row

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
def larger(a, b):
    """NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def inverse_of(by):
    """``1 / by`` of ordinary numbers to the last bit or the one before: one step of Newton's."""
    inverse = 1.0 / by
    return tl.fma(tl.fma(-by, inverse, 1.0), inverse, inverse)


@triton.jit
def quotient(x, by, fast):
    """``x / by``, correctly rounded. ``fast``: nothing overflows, or underflows in a remainder."""
    if fast:
        # As compilers divide, but with a reciprocal for many, and two corrections of each quotient.
        opposite = tl.broadcast_to(-by, x.shape)
        inverse = tl.broadcast_to(inverse_of(by), x.shape)
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
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCKS: tl.constexpr,
    TINIEST: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    FLAT: tl.constexpr,
    MOST: tl.constexpr,
):
    """:func:`.nvfp4.quantize` of weights, with the same results.

    A row and ``UNIT`` are those of :func:`.fp8_kernels.read_row`, with two last columns: the address of the global scale, and that of
    an int32 which is raised to the bits of the largest magnitude, or 0. No row cuts a block. ``ROUND``: to BF16 first. With ``FLAT``
    there is one row of weights. ``MOST``: the largest global scale below which nothing underflows, 0 to divide one by one.
    """
    row, weights, target, scales_at, height, width, number = read_row(
        tiles, rows, COLUMNS, WORD, UNIT, (UNIT + 1) // 2
    )
    source, source_row, source_column = weights
    across = width // 16
    block = number * BLOCKS + tl.arange(0, BLOCKS)
    if FLAT:
        down = tl.zeros_like(block)
        over = block
    else:
        down = block // across
        over = block - down * across
    inside = block < height * across
    r = down[:, None]
    c = over[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = inside[:, None] & (c >= 0)
    x = in_fp32(tl.load(source + (r * source_row + c * source_column), mask=mask, other=0.0), ROUND)
    g = tl.load(tl.load(row + (COLUMNS - 2)).to(tl.pointer_type(tl.float32)))
    noted_at = tl.load(row + (COLUMNS - 1))
    fast = (g >= LEAST) & (g <= MOST)
    amax = tl.reduce(tl.abs(x), 1, larger)
    if noted_at != 0:
        noted = noted_at.to(tl.pointer_type(tl.int32))
        # The bits of magnitudes have their order. Few programs find a larger one than those before them.
        largest = tl.max(amax.to(tl.int32, bitcast=True))
        if largest > tl.load(noted, cache_modifier=".cg"):
            tl.atomic_max(noted, largest, sem="relaxed")
    finite = amax < float("inf")
    sixfold = 6.0 * g
    limit = 512.0 * sixfold
    scale = quotient(tl.where(amax < limit, amax, limit), sixfold, fast)
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
    size = quotient(tl.where(tl.abs(x) < most, tl.abs(x), most), divisor[:, None], fast)
    # Zero has no sign, nor has a quotient that vanishes.
    code = e2m1(size) + tl.where((x < 0.0) & (size > 0.0), 8, 0)
    low, high = tl.split(tl.reshape(code, [BLOCKS, 8, 2]))
    codes, codes_row, codes_column, top, left, bottom, right = target
    half = over[:, None] * 8 + tl.arange(0, 8)[None, :]
    wanted = inside[:, None] & (r >= top) & (r < bottom) & (half >= left) & (half < right)
    place = (r - top) * codes_row + (half - left) * codes_column
    tl.store(codes + place, (low + (high << 4)).to(tl.uint8), mask=wanted)
    scale_at = scales_at.to(tl.pointer_type(tl.uint8)) + (down * tl.load(row + 9) + over * tl.load(row + 10))
    tl.store(scale_at, byte, mask=inside & (scales_at != 0))
