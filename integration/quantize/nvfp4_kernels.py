"""The Triton kernel of NVFP4: reads weights once, writes codes and block scales. Imported only where it runs.

A program quantizes some blocks of one part of the table. Addresses are plain integers.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ..packing.kernels import to_bf16
from .fp8_kernels import e4m3


@triton.jit
def e2m1(size):
    """The codes without signs that are nearest to sizes, ties to the even one, saturating: :func:`.nvfp4.magnitudes`."""
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32)


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
def quantize_nvfp4(
    tiles,
    rows,
    scales_2,
    WORD: tl.constexpr,
    BLOCKS: tl.constexpr,
    TINIEST: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
):
    """:func:`.nvfp4.quantize` of weights, the same operations in the same order.

    A row: addresses of weights, codes and scales, which lie row by row without gaps, blocks, blocks of a row of weights, strides of
    the weights in elements, and the first program. ``ROUND``: to BF16 first. With ``UNIT`` above 1, rows of weights are contiguous,
    and their addresses and distances multiples of that many elements.
    """
    pid = tl.program_id(0)
    at = tl.load(tiles + pid)
    row = rows + at.to(tl.int64) * 8
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), UNIT * WORD.primitive_bitwidth // 8)
    codes = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.uint8)), 8)
    scales = tl.load(row + 2).to(tl.pointer_type(tl.uint8))
    across = tl.load(row + 4).to(tl.int32)
    source_row = tl.multiple_of(tl.load(row + 5), UNIT)
    if UNIT > 1:
        source_column = 1
    else:
        source_column = tl.load(row + 6)
    block = (pid - tl.load(row + 7).to(tl.int32)) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < tl.load(row + 3).to(tl.int32)
    down = block // across
    over = block - down * across
    begin = down.to(tl.int64) * source_row + over.to(tl.int64) * 16 * source_column
    element = tl.arange(0, 16)[None, :]
    mask = inside[:, None] & (element >= 0)
    x = tl.load(source + (begin[:, None] + element * source_column), mask=mask, other=0.0)
    x = in_fp32(x, ROUND)
    g = tl.load(scales_2 + at)
    # Sizes in the order of their bits as integers, NaN above all.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, 6.0 * g)
    scale = tl.where(scale < TINIEST, TINIEST, scale)
    scale = tl.where(scale > 448.0, 448.0, scale)
    scale = tl.where(amax == 0.0, 1.0, scale)
    byte = tl.where(largest >= 0x7F800000, 0x7F, e4m3(scale)).to(tl.uint8)
    # No scale has a sign.
    bits = byte.to(tl.uint32)
    normal = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    decoded = tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)
    divisor = (decoded * g)[:, None]
    scaled = tl.div_rn(x, tl.broadcast_to(divisor, [BLOCKS, 16]))
    code = e2m1(tl.abs(scaled)) | ((scaled < 0.0).to(tl.int32) << 3)
    # E2M1 has no NaN: a block that holds one is zeros with a scale that is none.
    code = tl.where((largest >= 0x7F800000)[:, None], 0, code)
    low, high = tl.split(tl.reshape(code, [BLOCKS, 8, 2]))
    half = tl.arange(0, 8)[None, :]
    place = block.to(tl.int64)[:, None] * 8 + half
    tl.store(codes + place, (low | (high << 4)).to(tl.uint8), mask=inside[:, None] & (half >= 0))
    tl.store(scales + block, byte, mask=inside)
