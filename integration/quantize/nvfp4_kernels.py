"""The Triton kernels of NVFP4. Imported only where they run.

One reads weights once and writes codes and block scales: a program quantizes some blocks of one part of the table, whose addresses are
plain integers. The other writes what codes and scales stand for, in place of weights or activations.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packing.kernels import FLOATS, to_bf16
from .fp8_kernels import e4m3, read_row
from .nvfp4 import BLOCK, COVERED, E4M3_TINIEST, Arithmetic

# Of a program.
_BLOCKS, _WARPS = 256, 4
# From it on no remainder of a division is too small for FP32.
LEAST = tl.constexpr(2.0**-90)


@triton.jit
def _beside(size):
    """What a size of at most 6 is added to, to be rounded to the nearest E2M1 number.

    They are multiples of 1/2 below 2, of 1 below 4, and then of 2, which is what the last bit is worth of a number from 2**22, 2**23 and
    2**24 on.
    """
    return ((tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & 0x7F800000) + (22 << 23)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def e2m1(size):
    """The codes without signs that are nearest to sizes of at most 6, ties to the even one: :func:`.nvfp4.magnitudes`.

    They are the lowest four bits; higher ones have no meaning.
    """
    code = (size + _beside(size)).to(tl.int32, bitcast=True) - (149 << 23)
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
def in_kind(x, KIND: tl.constexpr):
    """FP32 numbers rounded to a type."""
    # Triton's interpreter cuts the bits off.
    return to_bf16(x) if tl.bfloat16 == KIND else x.to(KIND)


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
def _scale_of_weights(amax, g, fast, TINIEST: tl.constexpr):
    """The bits of the scale of a block; ``g``: the global scale."""
    sixfold = 6.0 * g
    limit = 512.0 * sixfold
    scale = quotient(tl.where(amax < limit, amax, limit), sixfold, fast)
    scale = tl.where(scale < TINIEST, TINIEST, scale)
    scale = tl.where(scale > 448.0, 448.0, scale)
    scale = tl.where(amax == 0.0, 1.0, scale)
    return tl.where(amax < float("inf"), e4m3(scale), 0x7F).to(tl.uint8)


@triton.jit
def _decoded(byte):
    """The number that the bits of a scale stand for, none of which has a sign; of NaN one without meaning."""
    bits = byte.to(tl.uint32)
    normal = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _sizes_of_weights(x, divisor, finite, fast):
    """``|x| / divisor``, at most 6: the divisor is a block's scale times the global one."""
    divisor = tl.where(finite, divisor, 1.0)
    # E2M1 has no NaN: a block that holds one, or an infinity, is zeros with a scale that is none.
    most = tl.where(finite, 6.0 * divisor, 0.0)[:, None]
    return quotient(tl.where(tl.abs(x) < most, tl.abs(x), most), divisor[:, None], fast)


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
    byte = _scale_of_weights(amax, g, fast, TINIEST)
    size = _sizes_of_weights(x, _decoded(byte) * g, amax < float("inf"), fast)
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


# Tensors of activations have any number of blocks.
@triton.jit(do_not_specialize=["global_scales", "blocks", "blocks_of_each"])
def _round_trip(
    x_at,
    out_at,
    covered_at,
    global_scales,
    blocks,
    blocks_of_each,
    BLOCKS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    EACH: tl.constexpr,
    COVERED: tl.constexpr,
    TINIEST: tl.constexpr,
    MOST: tl.constexpr,
):
    """:func:`.nvfp4.dequantize` of :func:`.nvfp4.quantize`, with the same results.

    ``KIND``: the type of numbers and results. ``EACH``: ``blocks_of_each`` blocks have a global scale of their own. ``COVERED``: 0,
    or by how much the global scale is multiplied for the largest number that it covers; which ones it does is written too. ``MOST``: as in
    :func:`quantize_nvfp4`.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    inside = block < tl.minimum(blocks - first, BLOCKS).to(tl.int32)
    place = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = inside[:, None] & (place >= 0)
    x = in_fp32(tl.load(x_at + first * 16 + place, mask=mask, other=0.0), False)
    if EACH:
        g = tl.load(global_scales + (first + block) // blocks_of_each, mask=inside, other=1.0)
        fast = (tl.min(g) >= LEAST) & (tl.max(g) <= MOST)
    else:
        g = tl.load(global_scales)
        fast = (g >= LEAST) & (g <= MOST)
    amax = tl.reduce(tl.abs(x), 1, larger)
    finite = amax < float("inf")
    if ACTIVATIONS:
        inverse = tl.div_rn(1.0, g)
        made = inverse * (amax * (1.0 / 6.0))
        # A global scale that is NaN makes all results so, whatever comes of it here.
        scale = _decoded(e4m3(tl.where(made < 448.0, made, 448.0)))
        by = scale * tl.div_rn(1.0, inverse)
        factor = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, by)))
        size = tl.abs(x) * factor[:, None]
        size = tl.where(size < 6.0, size, 6.0)
    else:
        scale = _decoded(_scale_of_weights(amax, g, fast, TINIEST))
        size = _sizes_of_weights(x, scale * g, finite, fast)
    beside = _beside(size)
    value = (size + beside) - beside
    # What is rounded to 0 keeps its sign, and what was 0 before has none. (Triton subtracts from 0 to negate.)
    value = tl.where((x < 0.0) & (size > 0.0), value * -1.0, value) * (scale * g)[:, None]
    value = tl.where(finite[:, None], value, float("nan"))
    tl.store(out_at + first * 16 + place, in_kind(value, KIND), mask=mask)
    if COVERED > 0:
        limit = tl.broadcast_to(g * COVERED, block.shape)[:, None]
        tl.store(covered_at + first * 16 + place, (tl.abs(x) <= limit).to(tl.uint8), mask=mask)


def most_global_scale(dtype: torch.dtype, device: torch.device) -> float:
    """Up to which global scale no quotient of a weight underflows; 0 where Triton's interpreter rounds products before sums."""
    if device.type != "cuda":
        return 0.0
    return {torch.bfloat16: 2.0**7, torch.float16: 2.0**7}.get(dtype, 2.0**-9)


def round_trip(
    x: torch.Tensor, scale_2: torch.Tensor, arithmetic: Arithmetic, inside: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`.nvfp4.round_trip` of what can be quantized, with a global scale that fits.

    Args:
        x: any strides.
        scale_2: the global scale.
        arithmetic: the order of the operations.
        inside: takes :func:`.nvfp4.in_range`: bool, of the shape of ``x``, contiguous; None if nobody wants it.
    """
    x, scale_2 = x.contiguous(), scale_2.contiguous()
    out, blocks = torch.empty_like(x), x.numel() // BLOCK
    if blocks:
        with torch.cuda.device_of(x):
            _round_trip[(triton.cdiv(blocks, _BLOCKS),)](
                x,
                out,
                out if inside is None else inside.view(torch.uint8),
                scale_2,
                blocks,
                blocks // scale_2.numel(),
                _BLOCKS,
                FLOATS[x.dtype],
                arithmetic is Arithmetic.ACTIVATIONS,
                scale_2.numel() > 1,
                0.0 if inside is None else COVERED,
                E4M3_TINIEST,
                most_global_scale(x.dtype, x.device),
                num_warps=_WARPS,
            )
    return out
