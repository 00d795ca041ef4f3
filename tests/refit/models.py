"""Tiny random Hugging Face checkpoints for refit tests; every norm and bias differs from its neutral value."""

from __future__ import annotations

from pathlib import Path

import torch

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def make_model(kind: str, folder: Path, seed: int) -> str:
    """Write a BF16 checkpoint of one of the kinds below and return its folder."""
    import transformers

    config = {
        "qwen3": lambda: transformers.Qwen3Config(**_COMMON, tie_word_embeddings=False),
        "qwen3-four-layers": lambda: transformers.Qwen3Config(
            **{**_COMMON, "num_hidden_layers": 4}, tie_word_embeddings=False
        ),
        "qwen3-odd-vocabulary": lambda: transformers.Qwen3Config(
            **{**_COMMON, "vocab_size": 61}, tie_word_embeddings=False
        ),
        "qwen3-tied": lambda: transformers.Qwen3Config(**_COMMON, tie_word_embeddings=True),
        "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**_COMMON, **_MOE, tie_word_embeddings=False),
    }[kind]()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)
