"""Which parameters of packed NVFP4 layers a refit has to bring, and which it need not.

Their layers are reloaded, which starts from undefined memory: what no tensor brings is computed with all the same, if it is
used. vLLM 0.21 has one method for experts of W4A4 and W4A16; all its backends but Marlin quantize inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptNvFp4FusedMoE,
    ModelOptNvFp4LinearMethod,
    ModelOptNvFp4W4A16LinearMethod,
)

from ..loader_trace.trace import LoaderTrace


def unused_parameters(model: nn.Module) -> frozenset[str]:
    """Names of those that nothing computes with, as they are before vLLM processes them: scales of inputs."""
    return frozenset(parameter for _, unused in _layers(model) for parameter in unused)


def absent_elements(model: nn.Module, trace: LoaderTrace) -> dict[str, int]:
    """By layer, how many elements are not used and no tensor of the traced manifest brings."""
    if trace.unknown:
        return {}
    touched = frozenset().union(*trace.touched.values())
    counted = {
        name: sum(trace.unwritten.get(parameter, 0) for parameter in unused if parameter not in touched)
        for name, unused in _layers(model)
    }
    return {name: count for name, count in counted.items() if count}


def _layers(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Name of each layer, and its parameters that nothing computes with."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        stacks, uses_inputs = [""], True
        if type(method) is ModelOptNvFp4FusedMoE:
            stacks, uses_inputs = ["w13_", "w2_"], method.nvfp4_backend is not NvFp4MoeBackend.MARLIN
        elif type(method) is ModelOptNvFp4W4A16LinearMethod:
            uses_inputs = False
        elif type(method) is not ModelOptNvFp4LinearMethod:
            continue
        yield name, [] if uses_inputs else [f"{name}.{stack}input_scale" for stack in stacks]
