"""Tiny checkpoints of the families with what published configurations have beside, and SGLang goes by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.families.checkpoints import CONFIGS, write_pair

# A vocabulary that SGLang pads on no rank.
_UNPADDED = {"vocab_size": 64, "max_position_embeddings": 256}
_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
# What published configurations have, and SGLang goes by.
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    # Places that SGLang pads on no rank.
    "gemma3-vl": {"vision_config": {**CONFIGS["gemma3-vl"]["vision_config"], "image_size": 64}},
    # GLM-5's are published without YaRN, but SGLang knows no other places for latent attention on a CPU.
    **{
        key: {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_scaling": _YARN,
        }
        for key in ("deepseek_v3", "glm_moe_dsa", "kimi_k25")
    },
}
# The projector's part has a name of its own for the encoder's width.
_CHANGES["kimi_k25"]["vision_config"] = {**CONFIGS["kimi_k25"]["vision_config"], "vt_hidden_size": 16}
# The same of what transformers would not write, or would write in its own way; None takes a key out.
_WRITTEN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "kimi_k25": {"architectures": ["DeepseekV3ForCausalLM"]},
    # SGLang has a name of its own for the groups, and its default is what is published.
    **{
        key: {
            "layers_block_type": None,
            "layer_types": None,
            "mtp_layers_block_type": None,
            "mamba_n_groups": 4,
        }
        for key in ("nemotron_h", "nemotron_h-latent")
    },
    **{
        key: {"full_attention_interval": 2}
        for key in (
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe",
            "qwen3_5_moe-stacked",
            "qwen3_5",
            "qwen3_5_moe-vl",
        )
    },
}


def write_as_published(
    family: str, folder: Path, changes: Mapping[str, Any] | None = None
) -> tuple[str, str]:
    """Two checkpoints of a family, with ``changes`` of its configuration; every tensor of them has other values."""
    changes = _UNPADDED | _CHANGES.get(family, {}) | dict(changes or {})
    # Published biases of routers are in FP32.
    pair = write_pair(family, folder, changes, router_dtype=torch.float32)
    for path in pair:
        file = Path(path) / "config.json"
        keys = json.loads(file.read_text())
        # Beside an image encoder's, those of the language model.
        text = keys.get("text_config", keys)
        text |= _WRITTEN.get(family, {})
        for name in [name for name, value in text.items() if value is None]:
            del text[name]
        file.write_text(json.dumps(keys))
    return pair
