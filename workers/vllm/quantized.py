"""Which weights of a manifest a vLLM rank holds in FP8 blocks, so that the trainer sends them as codes and scales.

The answer is the engine's own: a name whose tensor the loader puts into a float8 parameter with block scales beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...integration.errors import PlanError
from ...integration.manifest import TensorSpec, dtype_name
from ...integration.quantize.formats import Format, wire_specs
from ..loader_trace.codes import FLOAT8, unscaled_casts
from ..loader_trace.trace import LoaderTrace, Manifest
from .fp8 import BlockFp8, block_fp8, own_quantizer

logger = logging.getLogger(__name__)


def block_modules(model: nn.Module) -> dict[str, BlockFp8]:
    """The modules of ``model`` that hold weights in FP8 blocks, by name."""
    found = {name: block_fp8(module) for name, module in model.named_modules()}
    return {name: blocks for name, blocks in found.items() if blocks is not None}


def formats_of(
    specs: Sequence[TensorSpec], trace: LoaderTrace, blocks: Mapping[str, BlockFp8]
) -> dict[str, Format]:
    """The format of each weight of ``specs`` that this rank holds in FP8 blocks.

    Weights that are in FP8 already are left out, and so is, with a line in the log, what no trainer can make of them.

    Args:
        specs: as the trainer exports them, not quantized.
        trace: of these.
        blocks: of the live model.
    """
    formats = {f"{module}.{codes}": b.format for module, b in blocks.items() for codes in b.scales}
    found: dict[str, Format] = {}
    left: list[Exception] = []
    for spec in specs:
        touched = trace.touched[spec.name]
        wanted = {formats[parameter] for parameter in touched if parameter in formats}
        if not wanted or spec.dtype in FLOAT8:
            continue
        [format, *others] = wanted
        try:
            if others or touched - formats.keys():
                raise ValueError(
                    f"{spec.name} goes into {', '.join(sorted(touched))}, which differ in format"
                )
            wire_specs(spec, format)
        except ValueError as error:
            left.append(error)
        else:
            found[spec.name] = format
    if left:
        logger.warning(
            "the trainer does not quantize %d weights for this engine; first: %s", len(left), left[0]
        )
    return found


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


def promised_modules(
    trace: LoaderTrace, blocks: Mapping[str, BlockFp8], promised: Mapping[str, Format]
) -> frozenset[str]:
    """Those modules of ``blocks`` all of whose codes come in the format that was asked for."""
    names: dict[str, set[str]] = {}
    for name, touched in trace.touched.items():
        for parameter in touched:
            names.setdefault(parameter, set()).add(name)
    return frozenset(
        module
        for module, facts in blocks.items()
        if all(
            promised.get(name) == facts.format
            for codes in facts.scales
            for name in names.get(f"{module}.{codes}", ())
        )
    )
