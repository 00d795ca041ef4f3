"""Does a manifest reach all of an SGLang worker's weights, in numbers that its parameters can hold?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...integration.errors import PlanError
from ...integration.manifest import dtype_name
from ..loader_trace.blocks import may_be_reached
from ..loader_trace.codes import unscaled_casts
from ..loader_trace.trace import LoaderTrace, Manifest

if TYPE_CHECKING:  # it needs SGLang, which nothing here does
    from .layouts import ModuleLayout


def check_loadable(
    trace: LoaderTrace, owners: Mapping[str, frozenset[str]], layouts: Mapping[str, ModuleLayout]
) -> None:
    """Refuse modules that neither bytes in place nor SGLang's loader can bring new weights.

    Raises:
        PlanError: names the first weight and the module.
    """
    for name, touched in trace.touched.items():
        for module in sorted({module for parameter in touched for module in owners[parameter]}):
            if not layouts[module].loadable:
                raise PlanError(
                    f"{layouts[module].reason}. SGLang's loader writes such a module as if it had not been processed, and the "
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
        raise PlanError(
            f"the trainer sends {dtype_name(dtype)} and SGLang holds {parameter} as "
            f"{dtype_name(parameters[parameter].dtype)}, to be scaled; its loader would cast the numbers and keep the old "
            f"scales ({len(cast)} such weights). Start SGLang without quantization, or send codes and scales",
            stage="trace",
            parameter=name,
        )


def check_complete(trace: LoaderTrace, parameters: Sequence[str]) -> None:
    """Refuse a manifest that leaves a part of a parameter with the weights of an earlier version.

    A tensor that could not be followed may reach what looks unwritten; it excuses what
    :func:`~..loader_trace.blocks.may_be_reached` says.

    Raises:
        PlanError: names the first parameter.
    """
    misc = {parameter for name in trace.misc_reasons for parameter in trace.touched[name]}
    stale = [
        name
        for name in parameters
        if name not in misc and trace.unwritten.get(name) and not may_be_reached(name, trace.unknown)
    ]
    if stale:
        raise PlanError(
            f"no tensor of the manifest reaches {trace.unwritten[stale[0]]} elements of {stale[0]}, nor a part of "
            f"{len(stale) - 1} other parameters; they would keep old weights and the engine would serve a mixture. Give the "
            "trainer's whole manifest, in checkpoint names that SGLang's loader knows",
            stage="trace",
            parameter=stale[0],
        )
