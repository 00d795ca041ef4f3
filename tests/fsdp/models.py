"""Tiny Hugging Face checkpoints of FP32 weights, and transformers' own account of what a model is saved as."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 62,  # no multiple of four ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
# Over four ranks, two of the experts on three, and none on the last.
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
KINDS = ("qwen3", "qwen3-tied", "qwen3-moe")


def smallest(**changes: Any) -> Any:
    """A Qwen3 of one layer and no size of note; ``changes`` of its configuration."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = {
        "vocab_size": 12,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    return AutoModelForCausalLM.from_config(Qwen3Config(**{**config, **changes}))


def make_model(kind: str, folder: Path) -> str:
    """Write a checkpoint and return its folder."""
    import transformers

    tied = kind == "qwen3-tied"
    if kind == "qwen3-moe":
        config: Any = transformers.Qwen3MoeConfig(**_COMMON, **_MOE, tie_word_embeddings=False)
    else:
        config = transformers.Qwen3Config(**_COMMON, tie_word_embeddings=tied)
    torch.manual_seed(len(kind))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def save_whole(
    checkpoint: str, state: Mapping[str, torch.Tensor], dtype: torch.dtype, folder: Path
) -> dict[str, torch.Tensor]:
    """Save gathered tensors through an unsharded model of transformers, and return what it wrote."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(dict(state))
    model.to(dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")
