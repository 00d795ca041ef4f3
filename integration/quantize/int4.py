"""INT4 weights (W4A16): eight codes to an ``int32`` along the last dimension, one scale in the weight's dtype for a group of a row.

``w ≈ (code - 8) · scale``: ``weight_packed`` (``int32`` ``[n, k / 8]``, the first code in the lowest bits) and ``weight_scale``
(``[n, k / group]``), as compressed-tensors' ``pack-quantized`` checkpoints have them and vLLM loads them. Beside them a checkpoint has
``weight_shape``, the constant ``[n, k]``.

There are two rules for scales, and any kernel computes with the codes of both:

- ``amax/7.5``, compressed-tensors 0.15's by round-to-nearest with its min-max observer, symmetric (``calculate_qparams``, ``quantize``
  and ``pack_to_int32``). Each operation rounds to the weight's dtype: ``scale = amax / 7.5``, the dtype's epsilon where that is 0; then
  ``w / scale``, limited to -8 and 7, to the nearest integer, ties to the even one;
- ``amax/7``, Megatron-Bridge 0.6.2's (``quantize_to_int4``), in FP32: ``scale = amax / 7``, 1e-10 at least; then ``w / scale``, to the
  nearest integer in the same way, from -7 to 7. The scale is rounded to the weight's dtype after that. It gives back codes and scales
  that it made of BF16, of what they stand for in BF16.

Codes have no NaN, so a group that holds a NaN or an infinity gets the scale NaN, with the codes of zeros: it is NaN as a whole.
(compressed-tensors has codes of no meaning there.)
"""

from __future__ import annotations

import torch

from ..config import INT4_SCALES
from . import blocks, nvfp4

PER_ITEM = 8
GROUPS = (32, 64, 128)
BY_HALF_RANGE, BY_LARGEST = INT4_SCALES
_ZERO = 8
_LEAST, _MOST = -8, 7
_HALF_RANGE = 7.5
_LEAST_SCALE = 1e-10


def quantize(
    weight: torch.Tensor, group: int, scale_rule: str = BY_HALF_RANGE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight, or a shard that cuts no group.

    Args:
        weight: ``[..., k]``, BF16, FP16 or FP32, any strides; ``k`` a multiple of the group.
        group: elements of a row that share a scale, one of :data:`GROUPS`.
        scale_rule: for scales, one of :data:`..config.INT4_SCALES`.

    Returns:
        Codes (``int32`` ``[..., k / 8]``) and scales (``[..., k / group]`` in the weight's dtype), contiguous.

    Raises:
        ValueError: the weight cannot be quantized, or ``k`` is not a multiple of the group.
    """
    _check(weight, group)
    dtype, weight = weight.dtype, weight.detach()
    if scale_rule == BY_LARGEST:
        weight = weight.float()
    amax = blocks.block_amax(weight, (group,)).to(weight.dtype)
    finite = torch.isfinite(amax)
    # Of a Python number GPUs would multiply by the reciprocal.
    if scale_rule == BY_LARGEST:
        scales = (amax / amax.new_full((), _MOST)).clamp(min=_LEAST_SCALE)
    else:
        scales = amax / amax.new_full((), _HALF_RANGE)
        scales = torch.where(scales == 0, torch.finfo(amax.dtype).eps, scales)
    scaled = weight / blocks.spread(scales, weight.shape, (group,))
    scaled = torch.where(blocks.spread(finite, weight.shape, (group,)), scaled, 0)
    codes = (torch.round(scaled.clamp(_LEAST, _MOST)) + _ZERO).to(torch.uint8)
    return (
        nvfp4.pack(codes)
        .flatten()
        .view(torch.int32)
        .reshape(*weight.shape[:-1], weight.shape[-1] // PER_ITEM),
        torch.where(finite, scales, torch.nan).to(dtype).contiguous(),
    )


def dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``(code - 8) · scale`` in the scales' dtype; NaN where the scale is.

    Args:
        packed: ``int32`` ``[..., k / 8]``, contiguous.
        scales: ``[..., k / group]``.
    """
    codes = nvfp4.unpack(packed.view(torch.uint8))
    group = codes.shape[-1] // scales.shape[-1]
    return (codes.to(scales.dtype) - _ZERO) * blocks.spread(scales, codes.shape, (group,))


def round_trip(weight: torch.Tensor, group: int, scale_rule: str = BY_HALF_RANGE) -> torch.Tensor:
    """What a weight is for an engine that has its codes: :func:`dequantize` of :func:`quantize`, in its dtype; on a GPU in one pass.

    Args:
        weight: as in :func:`quantize`.
        group: as there.
        scale_rule: as there.

    Raises:
        ValueError: as in :func:`quantize`.
    """
    if not weight.is_cuda:
        return dequantize(*quantize(weight, group, scale_rule))
    _check(weight, group)
    from . import int4_kernels

    return int4_kernels.round_trip(weight.detach(), group, scale_rule)


def check_group(group: int) -> None:
    """Raises ValueError for a group of another size than engines' kernels take."""
    if group not in GROUPS:
        raise ValueError(f"INT4 has groups of {', '.join(map(str, GROUPS))} elements, not of {group}")


def _check(weight: torch.Tensor, group: int) -> None:
    check_group(group)
    blocks.check_weight(weight, (group,))
    if weight.shape[-1] % group:
        raise ValueError(
            f"INT4 in groups of {group} takes rows of a multiple of that, not of {weight.shape[-1]} elements; leave the weight in "
            "BF16"
        )
