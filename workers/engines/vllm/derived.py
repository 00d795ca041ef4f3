"""State that vLLM derives from weights outside the modules that own them, brought up to date in place."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

# The absorbed projections of multi-head latent attention, made from kv_b_proj (MLAAttention of vLLM 0.21).
_MLA_DERIVED = ("W_UV", "W_UK_T", "W_K", "W_K_scale", "W_V", "W_V_scale")


def refresh_derived_state(model: nn.Module, dtype: torch.dtype) -> None:
    """Recompute what layers of ``model`` hold of weights beside their parameters.

    Multi-head latent attention does: its absorbed projections are views of ``kv_b_proj`` where that is unquantized in
    ``dtype``, and copies otherwise. And FP8 experts: see :func:`refresh_expert_scales`.
    """
    for module in model.modules():
        if isinstance(module, MLAAttention):
            refresh_absorbed_projections(module, dtype)
        elif isinstance(getattr(module, "quant_method", None), Fp8MoEMethod):
            refresh_expert_scales(module)


def refresh_expert_scales(layer: nn.Module) -> None:
    """Give the kernel of one FP8 experts layer the scales (and biases) of its parameters.

    The kernel keeps the tensors that it was made with. Those are the parameters, until vLLM reloads the layer: then they
    are temporaries of the reload, equal to the parameters only until these are written in place.
    """
    method = layer.quant_method
    config = method.moe_quant_config
    if config is None:
        return
    for held, name in (
        (config.w1_scale, f"w13_{method.weight_scale_name}"),
        (config.w2_scale, f"w2_{method.weight_scale_name}"),
        (config.w1_bias, "w13_bias"),
        (config.w2_bias, "w2_bias"),
    ):
        parameter = getattr(layer, name, None)
        if held is None or parameter is None:
            continue
        if held.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            held.copy_(parameter)


def refresh_absorbed_projections(layer: nn.Module, dtype: torch.dtype) -> None:
    """Update one latent attention layer's copies of ``kv_b_proj``, without moving them.

    CUDA graphs hold the addresses of the copies, so new values go into the old storage. Views of the
    live weight already show the new values and are left alone, and so are calibrated KV-cache scales.
    """
    weights = {p.untyped_storage()._cdata for p in layer.kv_b_proj.parameters()}
    before = {
        name: value for name in _MLA_DERIVED if isinstance(value := getattr(layer, name, None), torch.Tensor)
    }
    if all(value.untyped_storage()._cdata in weights for value in before.values()):
        return
    scales = {
        name: getattr(layer, name).clone() for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
    }
    floats = {f"{name}_float": getattr(layer, f"{name}_float") for name in scales}
    layer.process_weights_after_loading(dtype)
    for name, value in before.items():
        value.copy_(getattr(layer, name))
        setattr(layer, name, value)
    for name, value in scales.items():
        getattr(layer, name).copy_(value)
    for name, value in floats.items():
        setattr(layer, name, value)
