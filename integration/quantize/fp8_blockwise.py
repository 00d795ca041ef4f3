"""FP8 E4M3 weights in blocks of 128×128 with one FP32 scale each, as DeepSeek-V3's checkpoints have them.

The scale is the one to multiply by (``weight_scale_inv``): ``w ≈ q · scale``. The arithmetic is DeepGEMM's
``per_block_cast_to_fp8`` (``deep_gemm/utils/math.py``), which vLLM (``vllm/utils/deep_gemm.py``) and SGLang
(``fp8_utils.py``) copied::

    amax  = max(|w| in the block, 1e-4)          scale = amax / 448
    scale = 2 ** ceil(log2(scale))               with UE8M0 only
    q     = e4m3(w · (1 / scale))                FP32, round to nearest even

Every step is one correctly rounded FP32 operation, so CPUs and GPUs agree bit for bit. Two steps are spelled
otherwise for that: torch on CUDA turns a division by a number into a product with its reciprocal, so 448 is a
tensor here; and the exponent is taken from the bits (as in DeepGEMM's later ``ceil_to_ue8m0``), since FP32's ``log2``
rounds ``2**-12 · (1 + 2**-23)`` and its like down to the integer. There vLLM 0.21's scale is half of this one.

NaN and infinities stay loud, as in DeepGEMM: such a block has the scale NaN or infinity and dequantizes to
NaN as a whole. In a refit :mod:`..weights.scale_watch` turns them into an error before the engine may serve.

A block's bytes depend on the block only. So a shard that cuts no block gives the slice of the full tensor's
bytes, and shards that do (:func:`.blocks.straddled`) give them after the elementwise maximum of their
:func:`block_amax`. The maximum of their scales does as well: no step above takes a larger ``amax`` to a smaller
scale, so the largest of the parts' scales is the scale of the largest ``amax``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from . import blocks

BLOCK = (128, 128)
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4

_Offset = Sequence[int]


class ScaleFormat(Enum):
    """What scales may be.

    ``FP32``: any value; Hopper's kernels, Triton, CUTLASS. ``UE8M0``: powers of two, which DeepGEMM wants on
    Blackwell and which vLLM makes from any others there and, by its default, for DeepGEMM on Hopper (it
    quantizes the quantized weights once more, so send UE8M0 to such engines). Kept in FP32 tensors either
    way; :func:`.e8m0.to_e8m0` gives their bytes.
    """

    FP32 = "fp32"
    UE8M0 = "ue8m0"


def block_amax(
    weight: torch.Tensor, offset: _Offset = (0, 0), block: tuple[int, int] = BLOCK
) -> torch.Tensor:
    """Largest magnitude of each block that a shard touches: FP32 ``[..., blocks of rows, blocks of columns]``.

    Args:
        weight: ``[..., rows, columns]``, BF16, FP16 or FP32, any strides.
        offset: row and column of the full tensor at which the shard begins.
        block: rows and columns of a block.

    Raises:
        ValueError: the weight's dtype or number of dimensions cannot be quantized.
    """
    return blocks.block_amax(weight, block, offset)


def scales_of(amax: torch.Tensor, scale: ScaleFormat = ScaleFormat.FP32) -> torch.Tensor:
    """Scales of blocks with these maxima (whole blocks', not partial ones): FP32, of the same shape."""
    value = amax.clamp(min=AMAX_FLOOR) / torch.full((), E4M3_MAX, dtype=torch.float32, device=amax.device)
    if scale is ScaleFormat.FP32:
        return value
    bits = value.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    # Only maxima beyond FP32's range reach 255, and those stay what they are.
    power = (exponent << 23).view(torch.float32)
    return torch.where(torch.isfinite(value), power, value)


def quantize_with_amax(
    weight: torch.Tensor,
    amax: torch.Tensor,
    offset: _Offset = (0, 0),
    block: tuple[int, int] = BLOCK,
    scale: ScaleFormat = ScaleFormat.FP32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a shard whose blocks' maxima are known.

    Args:
        weight: ``[..., rows, columns]``, BF16, FP16 or FP32, any strides.
        amax: maxima of the blocks that the shard touches, over all their holders. Where one is too small (no
            exchange), elements beyond the range become NaN, or from torch 2.13 on the largest number.
        offset: row and column of the full tensor at which the shard begins.
        block: rows and columns of a block.
        scale: what scales may be.

    Returns:
        ``float8_e4m3fn`` of the weight's shape, contiguous, and the FP32 scales of the blocks it touches.

    Raises:
        ValueError: the weight cannot be quantized, or ``amax`` does not fit it.
    """
    scales = scales_of(amax, scale)
    return codes_of(weight, scales, offset, block), scales


def codes_of(
    weight: torch.Tensor, scales: torch.Tensor, offset: _Offset = (0, 0), block: tuple[int, int] = BLOCK
) -> torch.Tensor:
    """Quantize a shard whose blocks' scales are known: ``float8_e4m3fn`` of its shape, contiguous.

    Args:
        weight: ``[..., rows, columns]``, BF16, FP16 or FP32, any strides.
        scales: of the blocks that the shard touches, FP32.
        offset: row and column of the full tensor at which the shard begins.
        block: rows and columns of a block.

    Raises:
        ValueError: the weight cannot be quantized, or ``scales`` do not fit it.
    """
    blocks.check_weight(weight, block)
    factor = blocks.spread(scales.reciprocal(), weight.shape, block, offset)
    return (weight.detach() * factor).to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)


def quantize(
    weight: torch.Tensor, block: tuple[int, int] = BLOCK, scale: ScaleFormat = ScaleFormat.FP32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight, or a shard that cuts no block.

    Args:
        weight: ``[..., rows, columns]``, BF16, FP16 or FP32, any strides.
        block: rows and columns of a block.
        scale: what scales may be.

    Returns:
        ``float8_e4m3fn`` of the weight's shape, contiguous, and the scales: FP32
        ``[..., ceil(rows / block), ceil(columns / block)]``.

    Raises:
        ValueError: the weight's dtype or number of dimensions cannot be quantized.
    """
    return quantize_with_amax(weight, block_amax(weight, block=block), block=block, scale=scale)


def dequantize(
    quantized: torch.Tensor,
    scale: torch.Tensor,
    offset: _Offset = (0, 0),
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``q · scale`` in FP32, rounded to ``dtype``; the arguments are as in :func:`quantize_with_amax`.

    Raises:
        ValueError: the scales do not fit.
    """
    return (quantized.float() * blocks.spread(scale, quantized.shape, block, offset)).to(dtype)
