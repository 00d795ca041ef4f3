"""The Triton kernels of INT4. Imported only where they run.

One reads weights once and writes codes and scales: a program quantizes some groups of one weight of the table, whose addresses are plain
integers. The other writes what codes and scales stand for, in place of weights.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packing.kernels import FLOATS, bits_to_bf16
from .fp8_kernels import read_row
from .int4 import BY_LARGEST
from .nvfp4_kernels import LEAST, in_fp32, in_kind, inverse_of, larger, quotient

# Elements of a program that writes weights, and its warps.
_ELEMENTS, _WARPS = 4096, 4
# The last bit of numbers about it is worth 1.
_WHOLE = tl.constexpr(1.5 * 2.0**23)
# Codes begin with 8.
_SHIFT = tl.constexpr(1.5 * 2.0**23 + 8)
# What the other bits of eight such numbers come to, where their last four make an int32.
_OTHERS = tl.constexpr(sum(0x4B400000 << 4 * place for place in range(8)) & 0xFFFFFFFF)
_EIGHT_ZEROS = tl.constexpr(-0x77777778)


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    """Finite FP32 numbers rounded to those of a type, in FP32."""
    if tl.bfloat16 == KIND:
        x = (bits_to_bf16(x) & 0xFFFF0000).to(tl.float32, bitcast=True)
    elif tl.float16 == KIND:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _scale(amax, KIND: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr):
    """By which numbers of a type are divided, in FP32: rounded to the type, but for the rule ``amax/7``."""
    if LARGEST:
        scale = tl.maximum(tl.div_rn(amax, 7.0), 1e-10)
    else:
        # Of each number of 16 bits the product is rounded to the same one as the quotient.
        scale = tl.div_rn(amax, 7.5) if tl.float32 == KIND else amax * (1 / 7.5)
        scale = _rounded(scale, KIND)
        scale = tl.where(scale == 0.0, EPSILON, scale)
    return scale


@triton.jit
def _scaled(x, scale, KIND: tl.constexpr, LARGEST: tl.constexpr):
    """``x / scale`` of numbers of a type, no less than -8, in FP32: rounded to the type, or to what has the same code."""
    if LARGEST:
        # No scale of this rule is small.
        scaled = quotient(x, scale, True)
    else:
        ordinary = tl.min(tl.min(scale, axis=1), axis=0) >= LEAST
        if tl.bfloat16 == KIND:
            # Codes change at numbers of nine bits, which lie between two of BF16. What matters is only on which side a quotient is. If
            # it is not such a number, it is 2 ** -17 of it away at least, for both that are divided have eight bits.
            if ordinary:
                # No quotient is beyond 7.52. In steps of 2 ** -18, by which errors of the reciprocal vanish.
                scaled = tl.fma(x, tl.broadcast_to(inverse_of(scale), x.shape), 48.0) - 48.0
            else:
                scaled = tl.maximum(tl.div_rn(x, tl.broadcast_to(scale, x.shape)), -8.0)
            # The sum has 16 bits less for what is added: to eight bits, ties to even, as long as it stays below the next power of 2.
            scaled = tl.fma(scaled, -65536.0, tl.fma(scaled, 65536.0, scaled))
        else:
            scaled = tl.maximum(_rounded(quotient(x, scale, ordinary), KIND), -8.0)
    return scaled


@triton.jit
def _joined(codes, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Neighbours of a row in one number, the even one in the lower bits. ``WIDTH``: of the result."""
    low, high = tl.split(tl.reshape(codes, [HEIGHT, WIDTH, 2]))
    return low + (high << BITS)


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
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    DOWN: tl.constexpr,
):
    """:func:`.int4.quantize`, the same operations in the same order.

    A row and ``UNIT`` are those of :func:`.fp8_kernels.read_row`; no row cuts a group. ``KIND``: the type of the scales, to which each
    operation rounds, and ``EPSILON`` its own. ``LARGEST``: scales are made by the rule ``amax/7``, in FP32. ``ROUND``: to BF16 first.
    ``DOWN``: 0, or the codes of a column lie beside each other, and a program takes so many rows: what it writes is whole lines of memory
    then, which a peer's memory needs most.
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
    amax = tl.reduce(tl.abs(x), 1, larger)
    finite = amax < float("inf")
    scale = _scale(tl.where(finite, amax, 0.0), KIND, EPSILON, LARGEST)
    # What is not finite in a group gets codes without meaning here.
    code = (tl.minimum(_scaled(x, scale[:, None], KIND, LARGEST), 7.0) + _SHIFT).to(tl.int32, bitcast=True)
    code = _joined(code, BLOCKS, GROUP // 2, 4)
    code = _joined(code, BLOCKS, GROUP // 4, 8)
    code = _joined(code, BLOCKS, GROUP // 8, 16)
    code = tl.where(finite[:, None], code - _OTHERS, _EIGHT_ZEROS)
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
    tl.store(
        scale_at,
        tl.where(finite, _rounded(scale, KIND), float("nan")).to(KIND),
        mask=inside & (scales_at != 0),
    )


@triton.jit(do_not_specialize=["groups"])
def _round_trip(
    weights,
    out,
    groups,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    EPSILON: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """:func:`.int4.dequantize` of :func:`.int4.quantize`, with the same results; constants are those of :func:`quantize_int4`."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    inside = tl.arange(0, BLOCKS) < tl.minimum(groups - first, BLOCKS).to(tl.int32)
    place = tl.arange(0, BLOCKS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = inside[:, None] & (place >= 0)
    x = in_fp32(tl.load(weights + first * GROUP + place, mask=mask, other=0.0), False)
    amax = tl.reduce(tl.abs(x), 1, larger)
    finite = amax < float("inf")
    scale = _scale(tl.where(finite, amax, 0.0), KIND, EPSILON, LARGEST)
    code = (tl.minimum(_scaled(x, scale[:, None], KIND, LARGEST), 7.0) + _WHOLE) - _WHOLE
    value = tl.where(finite[:, None], code * _rounded(scale, KIND)[:, None], float("nan"))
    tl.store(out + first * GROUP + place, in_kind(value, KIND), mask=mask)


def round_trip(weight: torch.Tensor, group: int, scale_rule: str) -> torch.Tensor:
    """:func:`.int4.round_trip` of what can be quantized."""
    weight = weight.contiguous()
    out, groups, at_once = torch.empty_like(weight), weight.numel() // group, _ELEMENTS // group
    if groups:
        with torch.cuda.device_of(weight):
            _round_trip[(triton.cdiv(groups, at_once),)](
                weight,
                out,
                groups,
                at_once,
                group,
                FLOATS[weight.dtype],
                torch.finfo(weight.dtype).eps,
                scale_rule == BY_LARGEST,
                num_warps=_WARPS,
            )
    return out
