"""Parameters that Transformer Engine keeps in FP8 blocks (``fp8_param`` with the blockwise recipe), sent as they are."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....integration.errors import RefitError
from ....integration.layout import Fragment
from ....integration.quantize import blocks
from ....integration.quantize.formats import Format, Fp8Blockwise
from ....integration.weights.endpoints import storage_key
from .rules import Refused, parameter_like

_CLASS = ("transformer_engine.pytorch.tensor.float8_blockwise_tensor", "Float8BlockwiseQTensor")
_BLOCK = (128, 128)
# Of its metadata: codes and scales by rows, of which Transformer Engine makes those by columns, for the backward pass.
_BY_ROWS = ("rowwise_data", "rowwise_scale_inv")


@dataclass(frozen=True)
class NativeBlocks:
    """What such a parameter is made of; views of its live memory.

    Attributes:
        codes: ``float8_e4m3fn`` ``[n, k]``, contiguous.
        scales: FP32 ``[ceil(n / 128), ceil(k / 128)]``, without the columns that pad them for the GEMM.
        powers_of_two: whether all scales are.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    powers_of_two: bool


def is_native(weight: Any) -> bool:
    """Whether a parameter is kept in FP8 blocks."""
    return weight is not None and (type(weight).__module__, type(weight).__qualname__) == _CLASS


def native_blocks(weight: Any) -> NativeBlocks:
    """The codes and scales of a parameter for which :func:`is_native` holds.

    To be asked anew for every binding, never kept: the optimizer may give the parameter other memory.

    Raises:
        Refused: it is not kept in E4M3 blocks of 128×128, or not by rows.
        RefitError: its memory was freed, as Megatron's offloading does.
    """
    found = weight.get_metadata()
    codes, scales, quantizer = (found[key] for key in (*_BY_ROWS, "quantizer"))
    if codes is None or scales is None:
        raise Refused("FP8 parameter: Transformer Engine keeps it by columns only at the moment")
    if not found["is_2D_scaled"] or quantizer.block_len != _BLOCK[0]:
        raise Refused("FP8 parameter: its scales are not those of blocks of 128 by 128")
    if codes.numel() and not codes.untyped_storage().nbytes():
        raise RefitError(
            f"a parameter of shape {list(codes.shape)} that Transformer Engine keeps in FP8 was offloaded with its storage "
            "freed, and its host copy is not read. Nothing was sent. Bring the parameters back before the refit",
            stage="bind",
        )
    kind = found["fp8_dtype"].name
    if not kind.endswith("E4M3"):
        raise Refused(f"FP8 parameter: its codes are {kind}, and engines take E4M3")
    if codes.dim() != 2 or not codes.is_contiguous():
        raise Refused("FP8 parameter: its codes are no contiguous matrix")
    rows, columns = blocks.scale_shape(codes.shape, _BLOCK)
    if scales.dim() != 2 or scales.shape[0] < rows or scales.shape[1] < columns:
        raise Refused(
            f"FP8 parameter: scales of shape {list(scales.shape)} are not those of {list(codes.shape)}"
        )
    return NativeBlocks(
        codes.view(torch.float8_e4m3fn), scales[:rows, :columns], bool(quantizer.force_pow_2_scales)
    )


def native_storage_key(weights: Iterable[Any]) -> Hashable:
    """As :func:`~rlrefit.integration.weights.endpoints.storage_key`, of parameters' codes and scales, and of which there are."""
    found = [weight.get_metadata()[key] for weight in weights for key in _BY_ROWS]
    return storage_key(part for part in found if part is not None), tuple([part is None for part in found])


def native_state(weight: Any) -> dict[str, torch.Tensor]:
    """All that such a parameter's value is: its live codes and scales by rows, by name."""
    found = weight.get_metadata()
    return {name: found[name] for name in _BY_ROWS}


def follow_native_state(weights: Iterable[Any]) -> None:
    """Have parameters whose :func:`native_state` was written follow it by columns."""
    from megatron.core.fp8_utils import post_all_gather_processing

    post_all_gather_processing(list(weights))


def as_codes(task: Any, native: NativeBlocks) -> Any:
    """A conversion task as if its parameter were its codes, so that rules say where they stand."""
    return replace(task, param_weight=parameter_like(task.param_weight, native.codes))


def with_scales(codes: Fragment, native: NativeBlocks, format: Format) -> list[Fragment]:
    """A fragment of a parameter's codes, and the fragment of their scales.

    Raises:
        Refused: the engine wants another format, or the parameter's blocks are not the weight's.
    """
    if not isinstance(format, Fp8Blockwise) or format.block != _BLOCK:
        raise Refused(f"FP8 parameter: its blocks of 128 by 128 are not the engine's {format.kind}")
    if format.ue8m0 and not native.powers_of_two:
        raise Refused(
            "FP8 parameter: the engine wants scales that are powers of two, and Transformer Engine keeps others (the "
            "recipe's force_pow_2_scales)"
        )
    height, width = native.codes.shape
    first = codes.view.storage_offset() - native.codes.storage_offset()
    at = divmod(first, width)
    aligned = codes.view.dim() == 2 and codes.view.stride() == (width, 1)
    for place, size, local, (start, stop), full in zip(
        at, codes.view.shape, (height, width), codes.box, codes.full_shape, strict=True
    ):
        # A block that ends before 128 must be the last one of the parameter, and of the weight.
        whole = size % 128 == 0 or (place + size == local and stop == full)
        aligned = aligned and place % 128 == 0 and start % 128 == 0 and whole
    if not aligned:
        raise Refused(
            "FP8 parameter: its blocks of 128 by 128 are not the weight's, which begin elsewhere; it is quantized anew"
        )
    rows, columns = (
        slice(place // 128, -(-(place + size) // 128))
        for place, size in zip(at, codes.view.shape, strict=True)
    )
    scales = Fragment(
        codes.name + format.scale_name_end,
        blocks.scale_shape(codes.full_shape, _BLOCK),
        blocks.scale_box(codes.box, _BLOCK),
        native.scales[rows, columns],
    )
    return [codes, scales]
