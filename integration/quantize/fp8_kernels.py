"""The Triton kernel of blockwise FP8: reads weights once, writes codes and scales. Imported only where it runs.

A program quantizes one block of one weight of the table. Addresses are plain integers. The kernels of MXFP8 and NVFP4 read the same rows.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ..packing.kernels import to_bf16


@triton.jit
def e4m3(x):
    """The bits of torch's own conversion (``c10/util/Float8_e4m3fn.h``), which GPUs before Ada do not have."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Up to 2**-6: adding 2**14, whose last bit is worth 2**-9, rounds to E4M3's denormals.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    code = (size + ((size >> 20) & 1) + 0x7FFFF - (120 << 23)) >> 20
    code = tl.where(size < (121 << 23), small, code)
    code = tl.where(size >= (1087 << 20), 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def read_row(tiles, rows, COLUMNS: tl.constexpr, WORD: tl.constexpr, UNIT: tl.constexpr, CODES: tl.constexpr):
    """What this program does.

    With ``UNIT`` above 1, rows of weights and codes are contiguous, and their addresses, distances, places and lengths are multiples of
    that many elements, and of ``CODES`` codes: what the compiler needs to know for wide accesses.

    Returns: the row; weights (address, row and column stride); where codes go (address, row and column stride, then the ``top``,
    ``left``, ``bottom`` and ``right`` of all codes of the weights between which codes are written, which may be none); the address of
    scales, or 0; rows and columns of weights; and the program's number among those of the row.
    """
    pid = tl.program_id(0)
    row = rows + tl.load(tiles + pid).to(tl.int64) * COLUMNS
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), UNIT * WORD.primitive_bitwidth // 8)
    codes = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.uint8)), CODES)
    scales_at = tl.load(row + 2)
    # 32 bits where they suffice: GPUs have no 64-bit arithmetic, and this is done by every thread.
    height = tl.load(row + 3).to(tl.int32)
    width = tl.multiple_of(tl.load(row + 4).to(tl.int32), UNIT)
    source_row = tl.multiple_of(tl.load(row + 5), UNIT)
    codes_row = tl.multiple_of(tl.load(row + 7), CODES)
    if UNIT > 1:
        source_column = 1
        codes_column = 1
    else:
        source_column = tl.load(row + 6)
        codes_column = tl.load(row + 8)
    top = tl.load(row + 12).to(tl.int32)
    left = tl.multiple_of(tl.load(row + 13).to(tl.int32), CODES)
    bottom = tl.load(row + 14).to(tl.int32)
    right = tl.multiple_of(tl.load(row + 15).to(tl.int32), CODES)
    weights = source, source_row, source_column
    target = codes, codes_row, codes_column, top, left, bottom, right
    return row, weights, target, scales_at, height, width, pid - tl.load(row + 11).to(tl.int32)


@triton.jit
def store_codes(target, r, c, scaled, CONVERTS: tl.constexpr):
    """The codes of scaled weights at rows ``r`` and columns ``c``, as far as they are wanted.

    ``CONVERTS``: the GPU has instructions for E4M3.
    """
    codes, codes_row, codes_column, top, left, bottom, right = target
    if CONVERTS:
        # It saturates where torch's has NaN: beyond 448, where nothing scaled is, but for NaN.
        q = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        q = e4m3(scaled)
    mask = (r >= top) & (r < bottom) & (c >= left) & (c < right)
    tl.store(codes + ((r - top) * codes_row + (c - left) * codes_column), q, mask=mask)


@triton.jit
def quantize_blocks(
    tiles,
    rows,
    COLUMNS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    ROUND: tl.constexpr,
    UNIT: tl.constexpr,
    CONVERTS: tl.constexpr,
    CUT: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """:func:`.fp8_blockwise.quantize`, the same operations in the same order.

    Its scales are written if they have an address. A row, ``UNIT`` and ``CONVERTS`` are those of :func:`read_row` and
    :func:`store_codes`. With ``CUT`` there is memory from ``top`` and ``left`` on only, the addresses are those of the first block's
    beginning, and with ``GIVEN`` scales are read.
    """
    row, weights, target, scales_at, height, width, tile = read_row(tiles, rows, COLUMNS, WORD, UNIT, UNIT)
    source, source_row, source_column = weights
    across = (width + BLOCK - 1) // BLOCK
    down = tile // across
    over = tile - down * across
    r = (down * BLOCK + tl.arange(0, BLOCK))[:, None]
    c = (over * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (r < height) & (c < width)
    if CUT:
        _, _, _, top, left, _, _ = target
        mask = mask & (r >= top) & (c >= left)
    x = tl.load(source + (r * source_row + c * source_column), mask=mask, other=0.0)
    if ROUND:
        x = to_bf16(x.to(tl.float32))
    scale_at = scales_at.to(tl.pointer_type(tl.float32)) + (
        down * tl.load(row + 9) + over * tl.load(row + 10)
    )
    if GIVEN:
        scale = tl.load(scale_at)
    else:
        # Sizes in the order of their bits as integers, NaN above all; of narrow types half the registers of FP32.
        if x.dtype == tl.float32:
            largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
        else:
            largest = tl.max(tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF, axis=1), axis=0).to(tl.int16)
        amax = largest.to(x.dtype, bitcast=True).to(tl.float32)
        amax = tl.where(amax < FLOOR, FLOOR, amax)
        scale = tl.div_rn(amax, 448.0)
        if UE8M0:
            bits = scale.to(tl.uint32, bitcast=True)
            power = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)) << 23
            scale = tl.where(scale < float("inf"), power.to(tl.float32, bitcast=True), scale)
    scaled = x.to(tl.float32) * tl.div_rn(1.0, scale)
    store_codes(target, r, c, scaled, CONVERTS)
    if not GIVEN:
        tl.store(scale_at, scale, mask=scales_at != 0)
