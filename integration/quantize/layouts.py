"""Where engines want scales otherwise than checkpoints have them.

======================================  =======================================================================
form                                    who wants it
======================================  =======================================================================
FP32 ``[n/128, k/128]``, row-major      checkpoints; vLLM's Triton and CUTLASS kernels; DeepGEMM's weights on
                                        Hopper
:func:`mn_major`                        DeepGEMM on Hopper where there is a scale for each row (activations)
:func:`packed_ue8m0` of                 DeepGEMM's weights on Blackwell, in vLLM
:func:`rows_of_blocks`                  (``deepgemm_post_process_fp8_weight_block``) and SGLang
                                        (``transform_scale_ue8m0``)
:func:`swizzle_128x4`                   cuBLAS, CUTLASS and FlashInfer: MXFP8 and NVFP4 on Blackwell
======================================  =======================================================================

The sources are DeepGEMM's ``csrc/apis/layout.hpp`` (``transform_sf_into_required_layout``) and
``csrc/jit_kernels/impls/smxx_layout.hpp``, and vLLM's ``mxfp8_utils.py`` and ``nvfp4_utils.py``. ``mn`` is the
dimension of rows (of the weight or of the tokens), ``k`` that which is summed over.
"""

from __future__ import annotations

import torch

TMA_BYTES = 16


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


def tma_aligned(mn: int, element_size: int) -> int:
    """``mn`` rounded up so that its elements fill whole units of 16 bytes."""
    unit = TMA_BYTES // element_size
    return -(-mn // unit) * unit


def mn_major(scale: torch.Tensor) -> torch.Tensor:
    """FP32 scales ``[..., mn, k]`` with ``mn`` contiguous and each column on a 16-byte boundary.

    The same values and shape; the gap between columns is zeros. DeepGEMM's ``get_mn_major_tma_aligned_tensor``.
    """
    if scale.dtype != torch.float32:
        raise ValueError(f"MN-major scales are FP32, not {scale.dtype}")
    return _columns(scale)


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


def unpacked_ue8m0(packed: torch.Tensor, k: int) -> torch.Tensor:
    """The FP32 scales ``[..., mn, k]`` that :func:`packed_ue8m0` packed."""
    # A clone, since a single column counts as contiguous whatever its stride is, and could not be seen as bytes.
    raw = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return from_e8m0(raw[..., :k])


def swizzle_128x4(scale: torch.Tensor) -> torch.Tensor:
    """Block scales of one byte in cuBLAS's tiles of 128 rows × 4 columns.

    Within a tile of 512 bytes, row ``r`` and column ``c`` lie at ``(r % 32) · 16 + (r // 32) · 4 + c``; tiles go
    row by row. cuBLAS, *1D block scaling factors layout*.

    Args:
        scale: ``[..., mn, k]``, ``uint8`` or float8.

    Returns:
        The same dtype, contiguous, ``[..., mn to a multiple of 128, k to a multiple of 4]``; what was added is
        0. Flattened, it is what vLLM's ``swizzle_mxfp8_scale`` gives.
    """
    raw = _raw(scale)
    padded = torch.nn.functional.pad(raw, (0, -raw.shape[-1] % 4, 0, -raw.shape[-2] % 128))
    *leading, rows, columns = padded.shape
    tiles = padded.reshape(*leading, rows // 128, 4, 32, columns // 4, 4)
    return tiles.transpose(-4, -2).reshape(padded.shape).view(scale.dtype)


def unswizzle_128x4(swizzled: torch.Tensor, mn: int, k: int) -> torch.Tensor:
    """The block scales ``[..., mn, k]`` that :func:`swizzle_128x4` laid in tiles."""
    raw = _raw(swizzled)
    *leading, rows, columns = raw.shape
    tiles = raw.reshape(*leading, rows // 128, columns // 4, 32, 4, 4)
    plain = tiles.transpose(-4, -2).reshape(raw.shape)
    return plain[..., :mn, :k].contiguous().view(swizzled.dtype)


def _raw(scale: torch.Tensor) -> torch.Tensor:
    if scale.element_size() != 1:
        raise ValueError(f"tiles hold scales of one byte, not {scale.dtype}")
    return scale.view(torch.uint8)


def _columns(scale: torch.Tensor) -> torch.Tensor:
    *leading, mn, k = scale.shape
    room = scale.new_zeros((*leading, k, tma_aligned(mn, scale.element_size())))
    columns = room.transpose(-1, -2)[..., :mn, :]
    columns.copy_(scale)
    return columns
