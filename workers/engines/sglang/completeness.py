"""Does a manifest reach all of an SGLang worker's weights, in numbers that its parameters can hold?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from ....integration.errors import PlanError
from ....integration.weights.manifest import dtype_name
from ....integration.weights.routing import SAY_REFIT_DTYPE
from ..common.loader_trace.codes import unscaled_casts
from ..common.loader_trace.trace import LoaderTrace, Manifest
from ..common.loader_trace.unreached import REMEDY, in_words, stale_parameters

if TYPE_CHECKING:  # it needs SGLang, which nothing here does
    from .layouts import ModuleLayout


def check_loadable(
    trace: LoaderTrace, owners: Mapping[str, frozenset[str]], layouts: Mapping[str, ModuleLayout]
) -> None:
    """Refuse weights that neither bytes in place nor SGLang's loader can bring to their modules.

    Raises:
        PlanError: names the first weight and the module.
    """
    for name, touched in trace.touched.items():
        for module in sorted({module for parameter in touched for module in owners[parameter]}):
            layout, reason = layouts[module], layouts[module].reason
            if layout.placed:
                if name not in trace.misc_reasons:
                    continue
                reason = f"layer {module} is written in place alone, and this weight can't be: {trace.misc_reasons[name]}"
            if not layout.loadable:
                raise PlanError(
                    f"{reason}. SGLang's loader writes such a module as if it had not been processed, and the "
                    "engine would compute with a mixture. Nothing was written; start SGLang without the kernel that does "
                    "so, or update this engine from disk",
                    stage="trace",
                    parameter=name,
                )


def check_codes(trace: LoaderTrace, manifest: Manifest, parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse numbers that the loader would cast to FP8 or integers without a scale.

    Raises:
        PlanError: names the first weight.
    """
    cast = unscaled_casts(trace, manifest, parameters)
    if cast:
        name, parameter, dtype = cast[0]
        remedy = (
            f"No blocks are made of float32. {SAY_REFIT_DTYPE}"
            if dtype == torch.float32
            else "Set policy.refit.trainer_quantize_fp8=true (of a SglangSender, trainer_quantize_fp8=True), which serves FP8 in "
            "blocks"
        )
        raise PlanError(
            f"the trainer sends {dtype_name(dtype)} and SGLang holds {parameter} as "
            f"{dtype_name(parameters[parameter].dtype)}, to be scaled; its loader would cast the numbers and keep the old "
            f"scales ({len(cast)} such weights). Nothing was written. {remedy}, or start SGLang without quantization",
            stage="trace",
            parameter=name,
        )


def check_complete(trace: LoaderTrace, parameters: Iterable[str]) -> None:
    """Refuse a manifest that leaves a part of a parameter with the weights of an earlier version.

    Raises:
        PlanError: names the first parameter.
    """
    stale = stale_parameters(trace, parameters)
    if stale:
        raise PlanError(
            f"{in_words(trace, stale)}; they would keep old weights and the engine would serve a mixture. {REMEDY}",
            stage="trace",
            parameter=next(iter(stale)),
        )
