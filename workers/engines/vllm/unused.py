"""Which parameters of packed layers (NVFP4, INT4, INT8) a refit need not bring, because nothing computes with them.

Their layers are reloaded, which starts from undefined memory: what no tensor brings is computed with all the same, if it is
used. Read in vLLM 0.21, for each method by its exact type.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (
    CompressedTensorsWNA16MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin import (
    CompressedTensorsWNA16MarlinMoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptNvFp4FusedMoE,
    ModelOptNvFp4W4A16LinearMethod,
)

from ..common.loader_trace.trace import LoaderTrace

# By name, since later vLLMs have none of them: there nothing of a GPTQ layer is known to be unused.
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_GPTQ_EXPERTS = f"{_QUANTIZATION}.gptq_marlin.GPTQMarlinMoEMethod"
_GPTQ_LINEAR = (
    f"{_QUANTIZATION}.gptq.GPTQLinearMethod",
    f"{_QUANTIZATION}.gptq_marlin.GPTQMarlinLinearMethod",
)
_INPUT_SCALES = ("w13_input_scale", "w2_input_scale")
# Post-load processing sorts the groups of an activation order itself, so that no checkpoint has these.
_SORTED = ("w13_g_idx_sort_indices", "w2_g_idx_sort_indices")
_CT_GROUPS = ("w13_weight_g_idx", "w2_weight_g_idx")
_GPTQ_GROUPS = ("w13_g_idx", "w2_g_idx")


def unused_parameters(model: nn.Module) -> frozenset[str]:
    """Names of those that nothing computes with, as they are before vLLM processes them."""
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
    """Name of each layer that has parameters which nothing computes with, and these."""
    for name, module in model.named_modules():
        unused = _unused(getattr(module, "quant_method", None))
        if unused:
            yield name, [f"{name}.{parameter}" for parameter in unused]


def _unused(method: object) -> tuple[str, ...]:
    kind = type(method)
    # One method has experts of W4A4 and W4A16; all its backends but Marlin quantize inputs.
    if kind is ModelOptNvFp4FusedMoE:
        return _INPUT_SCALES if method.nvfp4_backend is NvFp4MoeBackend.MARLIN else ()
    if kind is ModelOptNvFp4W4A16LinearMethod:
        return ("input_scale",)
    # Registered whether or not the checkpoint has an activation order; without one, kernels get empty tensors or none.
    if kind is CompressedTensorsWNA16MoEMethod:
        return _CT_GROUPS + _SORTED
    if kind is CompressedTensorsWNA16MarlinMoEMethod:
        return _SORTED if method.actorder == "group" else _CT_GROUPS + _SORTED
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == _GPTQ_EXPERTS:
        return _SORTED if method.quant_config.desc_act else _GPTQ_GROUPS + _SORTED
    if name in _GPTQ_LINEAR:
        return () if method.quant_config.desc_act else ("g_idx",)
    return ()
