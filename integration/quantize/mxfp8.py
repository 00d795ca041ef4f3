"""MXFP8: E4M3 elements, one E8M0 scale (a power of two) for 32 elements along the last dimension.

OCP Microscaling Formats v1.0. The scale is a byte ``e`` that means ``2 ** (e - 127)``; 255 is NaN. Which power
a block gets is left to the maker, and any engine reads any: vLLM 0.21 loads ``uint8`` ``weight_scale``
``[n, k / 32]`` beside ``float8_e4m3fn`` ``weight`` (ModelOpt's and compressed-tensors' checkpoints), and each
of its kernels rearranges the scales after loading (into tiles of 128 rows and 4 columns for cuBLAS and CUTLASS).
Makers differ (:class:`Rounding`).

An element is ``e4m3(w · 2 ** (127 - e))`` in FP32, to nearest even, and saturates at ±448 with
:attr:`Rounding.DOWN`, as OCP has it. A block that holds a NaN or an infinity gets the scale 255: it is NaN as a whole, never a number.
"""

from __future__ import annotations

from enum import Enum

import torch

from . import blocks

BLOCK = 32
E4M3_MAX = 448.0
_E4M3_EMAX = 8
NAN_SCALE = 255


class Rounding(Enum):
    """Which power of two is a block's scale.

    ``UP``: the least at which nothing saturates, ``2 ** ceil(log2(amax / 448))``. Transformer Engine's
    (``float_to_e8m0`` of ``ptx.cuh``: ``amax · (1 / 448)`` in FP32, ``cvt.rp``) and thus Megatron's,
    FlashInfer's and vLLM's online quantization on Blackwell; compressed-tensors' but for maxima of exactly
    ``1.75 · 2 ** k``, where its scale is twice this one.

    ``DOWN``: ``2 ** (floor(log2(amax)) - 8)``, the conversion of OCP MX v1.0 §6.3. Elements beyond
    ``1.75 · 2 ** floor(log2(amax))`` saturate.

    vLLM's own fallback before Blackwell takes ``2 ** floor(log2(amax))``, 256 times DOWN: it uses 9 of E4M3's
    17 binades below the maximum, so no one who can choose should.
    """

    UP = "up"
    DOWN = "down"


def block_amax(weight: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Largest magnitude of each block that a shard touches: FP32 ``[..., blocks]``.

    Args:
        weight: ``[..., k]``, BF16, FP16 or FP32, any strides.
        offset: position along the last dimension of the full tensor at which the shard begins.

    Raises:
        ValueError: the weight's dtype or number of dimensions cannot be quantized.
    """
    return blocks.block_amax(weight, (BLOCK,), (offset,))


def scales_of(amax: torch.Tensor, rounding: Rounding = Rounding.UP) -> torch.Tensor:
    """E8M0 scales (``uint8``) of blocks with these maxima (FP32; whole blocks', not partial ones)."""
    if rounding is Rounding.DOWN:
        # Below 2**-118 the clamp decides, so FP32's denormals need no care.
        byte = ((amax.view(torch.int32) >> 23) - _E4M3_EMAX).clamp(min=0)
    else:
        bits = (amax * (1.0 / E4M3_MAX)).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        # A denormal up to 2**-127 (half of the mantissa's range) is what the byte 0 stands for.
        byte = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
    return torch.where(torch.isfinite(amax), byte, NAN_SCALE).to(torch.uint8)


def quantize_with_amax(
    weight: torch.Tensor, amax: torch.Tensor, offset: int = 0, rounding: Rounding = Rounding.UP
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a shard whose blocks' maxima are known.

    Args:
        weight: ``[..., k]``, BF16, FP16 or FP32, any strides.
        amax: maxima of the blocks that the shard touches, over all their holders. Where one is too small (no
            exchange), elements beyond the range become NaN with UP, or from torch 2.13 on the largest number; with DOWN they saturate.
        offset: position along the last dimension of the full tensor at which the shard begins.
        rounding: which power of two is a block's scale.

    Returns:
        ``float8_e4m3fn`` of the weight's shape, contiguous, and the scales of the blocks it touches, ``uint8``.

    Raises:
        ValueError: the weight cannot be quantized, or ``amax`` does not fit it.
    """
    blocks.check_weight(weight, (BLOCK,))
    scales = scales_of(amax, rounding)
    # 254 - 255 wraps to 255: NaN's reciprocal is NaN.
    factor = blocks.spread(_value(254 - scales), weight.shape, (BLOCK,), (offset,))
    scaled = weight.detach() * factor
    if rounding is Rounding.DOWN:
        scaled = scaled.clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format), scales


def quantize(weight: torch.Tensor, rounding: Rounding = Rounding.UP) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight, or a shard that cuts no block.

    Args:
        weight: ``[..., k]``, BF16, FP16 or FP32, any strides; ``k`` a multiple of 32.
        rounding: which power of two is a block's scale.

    Returns:
        ``float8_e4m3fn`` of the weight's shape, contiguous, and the scales: ``uint8`` ``[..., k / 32]``.

    Raises:
        ValueError: the weight cannot be quantized, or ``k`` is not a multiple of 32, which no engine takes.
    """
    blocks.check_weight(weight, (BLOCK,))
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"MXFP8 takes rows of a multiple of {BLOCK} elements, not of {weight.shape[-1]}: engines refuse the "
            f"weight; leave it in BF16"
        )
    return quantize_with_amax(weight, block_amax(weight), rounding=rounding)


def dequantize(
    quantized: torch.Tensor, scale: torch.Tensor, offset: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``q · 2 ** (scale - 127)`` in FP32, rounded to ``dtype``; NaN where the scale is 255.

    Raises:
        ValueError: the scales do not fit.
    """
    return (quantized.float() * blocks.spread(_value(scale), quantized.shape, (BLOCK,), (offset,))).to(dtype)


def _value(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.float8_e8m0fnu).float()
