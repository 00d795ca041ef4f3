"""What the configuration of a block-FP8 checkpoint says, for engines that are to hold another one's weights so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...integration.quantize.fp8_blockwise import BLOCK
from ..config.surroundings import EXPERT_KEYS


def block_fp8(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of the same model in E4M3 blocks: the decoder layers' matrices, but for the routers.

    Args:
        hf_config: config.json of a checkpoint that is not quantized.
    """
    text = hf_config.get("text_config", hf_config)
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(text.get("num_hidden_layers", 0))]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head", *(routers if has_experts(hf_config) else [])],
    }


def has_experts(hf_config: Mapping[str, Any]) -> bool:
    """Whether a model of this config.json is a mixture of experts."""
    text = hf_config.get("text_config", hf_config)
    return any(text.get(key) for key in EXPERT_KEYS)


def quantization_of(hf_config: Mapping[str, Any]) -> Any:
    """What config.json says of a checkpoint that is quantized; falsy of others."""
    text = hf_config.get("text_config", hf_config)
    return hf_config.get("quantization_config") or text.get("quantization_config")
