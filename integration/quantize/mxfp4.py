"""MXFP4: E2M1 elements two to a byte, one E8M0 scale (a power of two) for 32 elements along the last dimension.

OCP Microscaling Formats v1.0: ``w ≈ e2m1 · 2 ** (scale - 127)``, and the scale 255 is NaN. Which power a block gets is left to the
maker (§6.3 has one as an example, in which the largest elements saturate). This is ``downcast_to_mxfp_torch`` of OpenAI's
``triton_kernels`` (``numerics_details/mxfp.py``, ``ROUND_UP``), by which transformers' ``quantize_to_mxfp4`` makes GPT-OSS's
experts, bit for bit for all finite numbers: the least power of two at which nothing saturates, ``2 ** ceil(log2(amax / 6))``, then
the nearest E2M1, ties to the even one, with the sign of a zero kept.

E2M1 has no NaN, so a block that holds a NaN or an infinity gets the scale 255: it is NaN as a whole. (``triton_kernels`` gives 255 for
an infinity, and zeros for a NaN.)
"""

from __future__ import annotations

import torch

from . import blocks, nvfp4

BLOCK = 32
NAN_SCALE = 255
_E2M1_MAX = 6.0
_MANTISSA, _EXPONENT = 0x7FFFFF, 0x7F800000


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight, or a shard that cuts no block.

    Args:
        weight: ``[..., k]``, BF16, FP16 or FP32, any strides; ``k`` a multiple of 32.

    Returns:
        Codes (``uint8`` ``[..., k / 2]``, the even element in the low nibble) and scales (``uint8`` ``[..., k / 32]``), contiguous.

    Raises:
        ValueError: the weight cannot be quantized, or ``k`` is not a multiple of 32.
    """
    blocks.check_weight(weight, (BLOCK,))
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"MXFP4 takes rows of a multiple of {BLOCK} elements, not of {weight.shape[-1]}; leave the weight in BF16"
        )
    amax = blocks.block_amax(weight, (BLOCK,))
    finite = torch.isfinite(amax)
    # Rounded up to a power of two by its bits; denormals become the least normal number.
    bits = ((amax / _E2M1_MAX).view(torch.int32) + _MANTISSA) & _EXPONENT
    scale = bits.view(torch.float32)
    factor = torch.where((bits == 0) | ~finite, torch.zeros_like(scale), 1.0 / scale)
    scaled = weight.detach() * blocks.spread(factor, weight.shape, (BLOCK,))
    codes = nvfp4.magnitudes(scaled) | (torch.signbit(scaled).to(torch.uint8) << 3)
    kept = blocks.spread(finite.to(torch.uint8), weight.shape, (BLOCK,))
    scales = torch.where(finite, bits >> 23, NAN_SCALE).to(torch.uint8)
    return nvfp4.pack(codes * kept).contiguous(), scales.contiguous()


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """``e2m1 · 2 ** (scale - 127)`` in FP32, rounded to ``dtype``; NaN where the block's scale is 255.

    Args:
        packed: ``uint8`` ``[..., k / 2]``.
        scale: ``uint8`` ``[..., k / 32]``.
        dtype: of the result ``[..., k]``.
    """
    codes = nvfp4.unpack(packed)
    values = nvfp4.values(codes) * blocks.spread(
        scale.view(torch.float8_e8m0fnu).float(), codes.shape, (BLOCK,)
    )
    return values.to(dtype)
