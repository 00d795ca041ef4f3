"""Which weights of a manifest an engine holds quantized, and which of its modules get nothing else than was asked for.

The answer is the engine's own: a name whose tensor its loader puts into a parameter of codes, with scales beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from .....integration.errors import PlanError
from .....integration.quantize.formats import Format
from .....integration.weights.manifest import TensorSpec, dtype_name
from .....integration.weights.quantizing import wire_specs
from .....integration.weights.routing import SAY_REFIT_DTYPE
from .trace import LoaderTrace, Manifest

logger = logging.getLogger(__name__)

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2})


class HoldsCodes(Protocol):
    """What an engine says of one module that holds weights quantized."""

    @property
    def format(self) -> Format:
        """What a trainer has to make of its weights."""

    @property
    def scales(self) -> Mapping[str, str]:
        """For each parameter of codes the one of its scales."""


def formats_of(
    specs: Sequence[TensorSpec], trace: LoaderTrace, blocks: Mapping[str, HoldsCodes]
) -> dict[str, Format]:
    """The format of each weight of ``specs`` that this rank holds quantized.

    Weights that are in FP8 already are left out, and so is, with a line in the log, what no trainer can make of them.

    Args:
        specs: as the trainer exports them, not quantized.
        trace: of these, by a loader that knows parameters of the weights' names.
        blocks: of the live model, by module.
    """
    formats = {
        f"{module}.{codes.removesuffix(b.format.code_name_end)}": b.format
        for module, b in blocks.items()
        for codes in b.scales
    }
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


def on_the_wire(specs: Sequence[TensorSpec], formats: Mapping[str, Format]) -> list[TensorSpec]:
    """What travels of ``specs``: codes and scales in the place of each weight of ``formats``."""
    wire: list[TensorSpec] = []
    for spec in specs:
        format = formats.get(spec.name)
        wire += [spec] if format is None else wire_specs(spec, format)
    return wire


def promised_modules(
    trace: LoaderTrace, blocks: Mapping[str, HoldsCodes], promised: Mapping[str, Format]
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
            promised.get(name.removesuffix(facts.format.code_name_end)) == facts.format
            for codes in facts.scales
            for name in names.get(f"{module}.{codes}", ())
        )
    )


def require_codes(
    trace: LoaderTrace,
    manifest: Manifest,
    parameters: Mapping[str, torch.Tensor],
    setting: str = "policy.refit.trainer_quantize_fp8=true",
) -> None:
    """Refuse numbers that the loader would cast to FP8 or to integers without a scale.

    Args:
        trace: of ``manifest``.
        manifest: checkpoint name, full shape and dtype of every tensor.
        parameters: of the engine as they are before loading, by name.
        setting: by which the trainer makes FP8 blocks.

    Raises:
        PlanError: names the first weight.
    """
    cast = [
        (name, parameter, dtype)
        for name, _, dtype in manifest
        if dtype.is_floating_point and dtype.itemsize > 1
        for parameter in sorted(trace.touched[name] & parameters.keys())
        if parameters[parameter].dtype in FLOAT8 or not parameters[parameter].dtype.is_floating_point
    ]
    if not cast:
        return
    name, parameter, dtype = cast[0]
    held = parameters[parameter].dtype
    if held is torch.uint8:
        remedy = (
            "Start the engine from a checkpoint that the trainer's own quantization made (docs/nvfp4.md for NVFP4): it has to "
            "leave the same layers out. GPT-OSS's experts in MXFP4 come so with policy.refit.trainer_quantize_mxfp4=true"
        )
    elif dtype is torch.float32:
        remedy = f"No blocks are made of float32. {SAY_REFIT_DTYPE}"
    else:
        remedy = f"Set {setting}, which makes FP8 blocks"
    raise PlanError(
        f"the trainer sends {dtype_name(dtype)} and the engine holds {parameter} as {dtype_name(held)} with a scale; its loader "
        f"would cast the numbers and keep the old scales ({len(cast)} such weights). Nothing was written. {remedy}, or start "
        "the engine without quantization",
        stage="trace",
        parameter=name,
    )
