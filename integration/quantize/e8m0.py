"""Scales that are powers of two (E8M0, one byte each), and how DeepGEMM wants them on Blackwell.

Checkpoints, and most kernels, have a block's scale as an FP32 number in a row-major matrix. DeepGEMM on Blackwell, in vLLM
(``deepgemm_post_process_fp8_weight_block``) and SGLang (``transform_scale_ue8m0``), wants :func:`packed_ue8m0` of
:func:`rows_of_blocks`. The sources are DeepGEMM's ``csrc/apis/layout.hpp`` (``transform_sf_into_required_layout``) and
``csrc/jit_kernels/impls/smxx_layout.hpp``. ``mn`` is the dimension of rows (of the weight or of the tokens), ``k`` that which
is summed over.
"""

from __future__ import annotations

import torch

_TMA_BYTES = 16


def to_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """The E8M0 bytes (``uint8``, bias 127) of FP32 scales that are powers of two; 255 for NaN and infinities.

    Waits for the device.

    Raises:
        ValueError: a scale is not a power of two that E8M0 has; dropping its mantissa would change the weights.
    """
    if scale.dtype != torch.float32:
        raise ValueError(
            f"scales of {scale.dtype} are not FP32; give the scales that the weights were quantized with"
        )
    byte = scale.to(torch.float8_e8m0fnu)
    back = byte.float()
    wrong = torch.isfinite(scale) & (back != scale)
    if bool(wrong.any()):
        raise ValueError(
            f"{int(wrong.sum())} of {scale.numel()} scales are not powers of two, the first {scale[wrong][0].item()!r}: "
            f"as E8M0 they would be others and so would the weights; quantize with ScaleFormat.UE8M0"
        )
    return torch.where(torch.isfinite(scale), byte.view(torch.uint8), 255).to(torch.uint8)


def from_e8m0(byte: torch.Tensor) -> torch.Tensor:
    """FP32 scales of E8M0 bytes (``uint8``); NaN for 255."""
    return byte.view(torch.float8_e8m0fnu).float()


def rows_of_blocks(scale: torch.Tensor, mn: int, block: int = 128) -> torch.Tensor:
    """A scale for each row ``[..., mn, k]`` from one for ``block`` rows ``[..., ceil(mn / block), k]``.

    Raises:
        ValueError: the scales are not those of ``mn`` rows.
    """
    if scale.shape[-2] != -(-mn // block):
        raise ValueError(f"{scale.shape[-2]} scales are not those of {mn} rows in blocks of {block}")
    row = torch.arange(mn, device=scale.device)
    return scale.index_select(-2, row // block)


def packed_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Scales that are powers of two ``[..., mn, k]`` as E8M0, four along ``k`` to an ``int32``, MN-major.

    DeepGEMM's ``get_mn_major_tma_aligned_packed_ue8m0_tensor``: ``int32`` ``[..., mn, ceil(k / 4)]``, the first
    scale in the lowest byte, missing ones 0, ``mn`` contiguous, each column on a 16-byte boundary. Waits for
    the device.

    Raises:
        ValueError: a scale is not a power of two (DeepGEMM would drop its mantissa).
    """
    byte = to_e8m0(scale)
    padded = torch.nn.functional.pad(byte, (0, -byte.shape[-1] % 4)).contiguous()
    return _columns(padded.view(torch.int32))


def _columns(scale: torch.Tensor) -> torch.Tensor:
    """The same values with ``mn`` contiguous, and each column on a boundary that TMA needs; zeros fill the gaps."""
    *leading, mn, k = scale.shape
    unit = _TMA_BYTES // scale.element_size()
    room = scale.new_zeros((*leading, k, -(-mn // unit) * unit))
    columns = room.transpose(-1, -2)[..., :mn, :]
    columns.copy_(scale)
    return columns
