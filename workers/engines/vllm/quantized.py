"""Which modules of a vLLM model hold FP8 blocks, which hold another FP8, and which weights must not come as they are."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from ....integration.errors import PlanError
from ....integration.weights.manifest import dtype_name
from ..common.loader_trace.codes import unscaled_casts
from ..common.loader_trace.trace import LoaderTrace, Manifest
from .fp8 import BlockFp8, block_fp8, own_quantizer

logger = logging.getLogger(__name__)


def block_modules(model: nn.Module) -> dict[str, BlockFp8]:
    """The modules of ``model`` that hold weights in FP8 blocks, by name."""
    found = {name: block_fp8(module) for name, module in model.named_modules()}
    return {name: blocks for name, blocks in found.items() if blocks is not None}


def tell_of_own_quantizers(model: nn.Module) -> None:
    """Log, once for each method, that modules hold FP8 which the trainer does not make."""
    modules: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        method = own_quantizer(module)
        if method:
            modules.setdefault(method, []).append(name)
    for method, names in modules.items():
        logger.warning(
            "policy.refit.trainer_quantize_fp8 does not serve %d modules of this engine, %s first: %s makes or takes "
            "another FP8 than blocks with the names of a block-FP8 checkpoint, so they get the trainer's own dtype. Start "
            "vLLM with load_format='dummy' and hf_overrides={'quantization_config': {'quant_method': 'fp8', "
            "'activation_scheme': 'dynamic', 'weight_block_size': [128, 128]}} for the trainer to quantize",
            len(names),
            names[0],
            method,
        )


def require_codes(trace: LoaderTrace, manifest: Manifest, parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse numbers that the engine's loader would cast to FP8 or integers without a scale.

    Args:
        trace: of ``manifest``.
        manifest: checkpoint name, full shape and dtype of every tensor.
        parameters: of the twin, by name.

    Raises:
        PlanError: names the first weight.
    """
    cast = unscaled_casts(trace, manifest, parameters)
    if not cast:
        return
    name, parameter, dtype = cast[0]
    remedy = (
        "Start the engine from a checkpoint that the trainer's own quantization made (docs/nvfp4.md for NVFP4): it has to "
        "leave the same layers out"
        if parameters[parameter].dtype is torch.uint8
        else "Set policy.refit.trainer_quantize_fp8=true, which serves FP8 in blocks"
    )
    raise PlanError(
        f"the trainer sends {dtype_name(dtype)} and the engine holds {parameter} as "
        f"{dtype_name(parameters[parameter].dtype)}, to be scaled; its loader would cast the numbers and keep the old scales "
        f"({len(cast)} such weights). {remedy}, or start the engine without quantization",
        stage="trace",
        parameter=name,
    )
