"""NVFP4: E2M1 elements two to a byte, an E4M3 scale for 16 elements, an FP32 scale for the tensor.

``w ≈ e2m1 · scale · global``: ``weight`` (``uint8`` ``[n, k / 2]``, the even element in the low nibble),
``weight_scale`` (``float8_e4m3fn`` ``[n, k / 16]``) and ``weight_scale_2`` (``amax / (6 · 448)``), as ModelOpt
writes them and vLLM loads them. compressed-tensors keeps ``weight_global_scale``, the reciprocal of the last.

Layers that an engine fuses (q, k and v; gate and up) must share the global scale: vLLM takes the largest of
theirs for all of them, beside block scales that were made with each one's own. Give :func:`global_scale`
all their maxima; so also those of all shards.

E2M1 has no NaN, so a block that holds a NaN or an infinity gets the scale NaN: it is NaN as a whole. (The
engines' kernels saturate infinities.) A tensor of zeros has the global scale 1.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from . import blocks

BLOCK = 16
PER_BYTE = 2
_E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINIEST = 2.0**-9
# With smaller ones, reciprocals of scales overflow here and in the engine.
LEAST_GLOBAL_SCALE = 2.0**-100
# The largest number that a global scale of 1 covers. The product of a scale with what it was made by dividing by may miss the maximum by
# a rounding or two.
COVERED = _E2M1_MAX * E4M3_MAX * (1 + 2.0**-20)

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES_WITH_SIGN = _VALUES + tuple(-v for v in _VALUES)


class Arithmetic(Enum):
    """In which order the FP32 operations go; results differ in the last bit, and so at ties in a code.

    ``WEIGHTS``: ModelOpt's ``NVFP4QTensor.quantize``: ``scale = e4m3(amax / (6 · g))``, 1 for a block of zeros
    and otherwise within ``[2 ** -9, 448]``, so that no block vanishes; ``code = e2m1(w / (scale · g))``.

    ``ACTIVATIONS``: what vLLM does to activations at each step (``ref_nvfp4_quant`` of
    ``nvfp4_emulation_utils.py``, written after the CUDA kernel ``scaled_fp4_quant``, which takes approximate
    reciprocals): ``scale = e4m3(min((1 / g) · (amax · (1 / 6)), 448))``,
    ``code = e2m1(x · (1 / (scale · (1 / (1 / g)))))``; a block whose scale rounds to 0 becomes zeros.
    """

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"


def global_scale(*amax: torch.Tensor) -> torch.Tensor:
    """``weight_scale_2`` of tensors or shards that share one: FP32, of the shape of the maxima.

    Args:
        amax: largest magnitudes, all of one shape: scalars, or one per expert.
    """
    largest = amax[0].float()
    for other in amax[1:]:
        largest = torch.maximum(largest, other.float())
    full_range = torch.full((), _E2M1_MAX * E4M3_MAX, dtype=torch.float32, device=largest.device)
    scale = (largest / full_range).clamp(min=LEAST_GLOBAL_SCALE)
    return torch.where(largest == 0, torch.ones_like(scale), scale)


def quantize(
    weight: torch.Tensor,
    scale_2: torch.Tensor | None = None,
    arithmetic: Arithmetic = Arithmetic.WEIGHTS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a weight or a shard of one; shards give slices of the full tensor's bytes for one ``scale_2``.

    Args:
        weight: ``[..., k]``, BF16, FP16 or FP32, any strides; ``k`` a multiple of 16.
        scale_2: the global scale, FP32 and at least ``LEAST_GLOBAL_SCALE``: a scalar, or one per element of the
            leading dimensions (experts). None makes it of this tensor's own maximum, which is right for a whole
            weight that nothing is fused with.
        arithmetic: the order of the operations.

    Returns:
        Codes (``uint8`` ``[..., k / 2]``), block scales (``float8_e4m3fn`` ``[..., k / 16]``), and ``scale_2``.

    Raises:
        ValueError: the weight cannot be quantized, ``k`` is not a multiple of 16, which no engine takes, or
            ``scale_2`` does not fit.
    """
    _check(weight)
    amax = blocks.block_amax(weight, (BLOCK,))
    if scale_2 is None:
        scale_2 = global_scale(amax.amax() if amax.numel() else amax.new_zeros(()))
    g = _per_row(scale_2, weight)
    scales = _block_scales(amax, g, arithmetic)
    decoded = scales.float()
    if arithmetic is Arithmetic.WEIGHTS:
        scaled = weight.detach() / blocks.spread(decoded * g, weight.shape, (BLOCK,))
    else:
        factor = torch.where(decoded == 0, decoded, (decoded * g.reciprocal().reciprocal()).reciprocal())
        scaled = weight.detach() * blocks.spread(factor, weight.shape, (BLOCK,))
    return pack(_codes(scaled)), scales, scale_2


def dequantize(
    packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``e2m1 · (scale · scale_2)`` in FP32, rounded to ``dtype``; NaN where the block's scale is.

    Raises:
        ValueError: the scales do not fit.
    """
    codes = unpack(packed)
    per_block = scale.float() * _per_row(scale_2, codes)
    return (values(codes) * blocks.spread(per_block, codes.shape, (BLOCK,))).to(dtype)


def round_trip(
    x: torch.Tensor, scale_2: torch.Tensor | None = None, arithmetic: Arithmetic = Arithmetic.WEIGHTS
) -> torch.Tensor:
    """What ``x`` is for an engine that has its codes: :func:`dequantize` of :func:`quantize`, in its dtype; on a GPU in one pass.

    Args:
        x: as in :func:`quantize`.
        scale_2: the global scale or None, as there.
        arithmetic: the order of the operations.

    Raises:
        ValueError: as in :func:`quantize`.
    """
    if not x.is_cuda:
        return dequantize(*quantize(x, scale_2, arithmetic), x.dtype)
    return _on_gpu(x, scale_2, arithmetic)


def round_trip_in_range(
    x: torch.Tensor, scale_2: torch.Tensor, arithmetic: Arithmetic = Arithmetic.WEIGHTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`round_trip`, and :func:`in_range`; on a GPU in one pass.

    Raises:
        ValueError: as in :func:`quantize`.
    """
    if not x.is_cuda:
        return round_trip(x, scale_2, arithmetic), in_range(x.detach(), scale_2)
    inside = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return _on_gpu(x, scale_2, arithmetic, inside), inside


def fake_quantize(
    x: torch.Tensor,
    scale_2: torch.Tensor | None = None,
    arithmetic: Arithmetic = Arithmetic.WEIGHTS,
) -> torch.Tensor:
    """What the engine will compute with in place of ``x``, for training that knows of it.

    The value is that of :func:`round_trip`. The gradient passes straight through, but
    for elements that a static ``scale_2`` cuts off (beyond ``6 · 448 · scale_2``): theirs is zero.

    Args:
        x: weights or activations, ``[..., k]``, BF16, FP16 or FP32; ``k`` a multiple of 16.
        scale_2: the static global scale (of a weight whose shards or fused neighbours share it, or the
            engine's ``input_scale``), or None for that of this tensor's own maximum.
        arithmetic: ``WEIGHTS`` for weights and ``ACTIVATIONS`` for activations.

    Raises:
        ValueError: as in :func:`quantize`.
    """
    result: torch.Tensor = _FakeQuantize.apply(x, scale_2, arithmetic)  # type: ignore[no-untyped-call]
    return result


def in_range(x: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Which elements a static global scale does not cut off, those up to ``6 · 448 · scale_2``: bool, of the shape of ``x``.

    The largest of those that the scale was made for is among them.
    """
    return x.abs() <= _per_row(scale_2, x) * COVERED


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes (0 to 15, the sign in bit 3) to a byte, the even one in the low nibble: ``uint8`` ``[..., k / 2]``."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The codes of :func:`pack`: ``uint8`` ``[..., k]``."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def values(codes: torch.Tensor) -> torch.Tensor:
    """The numbers that codes stand for: FP32, of their shape."""
    return torch.tensor(_VALUES_WITH_SIGN, dtype=torch.float32, device=codes.device)[codes.int()]


def magnitudes(scaled: torch.Tensor) -> torch.Tensor:
    """The codes without signs (``uint8``) that are nearest to the numbers' sizes, ties to the even one, saturating."""
    size = scaled.abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, tie_goes_up in (
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (size >= bound) if tie_goes_up else (size > bound)
    return code


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale_2: torch.Tensor | None, arithmetic: Arithmetic
    ) -> torch.Tensor:
        if scale_2 is None:
            ctx.save_for_backward()
            return round_trip(x, None, arithmetic)
        value, inside = round_trip_in_range(x, scale_2, arithmetic)
        ctx.save_for_backward(inside)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        for inside in ctx.saved_tensors:
            gradient = torch.where(inside, gradient, 0)
        return gradient, None, None


def _on_gpu(
    x: torch.Tensor, scale_2: torch.Tensor | None, arithmetic: Arithmetic, inside: torch.Tensor | None = None
) -> torch.Tensor:
    _check(x)
    if scale_2 is None:
        scale_2 = global_scale(blocks.largest_magnitude(x))
    _per_row(scale_2, x)
    from . import nvfp4_kernels

    return nvfp4_kernels.round_trip(x.detach(), scale_2, arithmetic, inside)


def _check(weight: torch.Tensor) -> None:
    blocks.check_weight(weight, (BLOCK,))
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"NVFP4 takes rows of a multiple of {BLOCK} elements, not of {weight.shape[-1]}: engines refuse the "
            f"weight; leave it in BF16"
        )


def _per_row(scale_2: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The global scale, broadcastable over the weight's block scales."""
    if scale_2.dtype != torch.float32:
        raise ValueError(f"the global scale is FP32, not {scale_2.dtype}")
    if tuple(scale_2.shape) != tuple(weight.shape[: scale_2.dim()]):
        raise ValueError(
            f"a global scale of shape {tuple(scale_2.shape)} does not fit a tensor of {tuple(weight.shape)}; give a "
            f"scalar, or one per element of the leading dimensions"
        )
    return scale_2.reshape(tuple(scale_2.shape) + (1,) * (weight.dim() - scale_2.dim()))


def _block_scales(amax: torch.Tensor, g: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    if arithmetic is Arithmetic.WEIGHTS:
        scale = (amax / (_E2M1_MAX * g)).clamp(E4M3_TINIEST, E4M3_MAX)
        scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    else:
        scale = (g.reciprocal() * (amax * (1.0 / _E2M1_MAX))).clamp(max=E4M3_MAX)
    return torch.where(torch.isfinite(amax), scale, torch.nan).to(torch.float8_e4m3fn)


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code; a negative number's sign stays when it rounds to 0."""
    return magnitudes(scaled) | ((scaled < 0).to(torch.uint8) << 3)
