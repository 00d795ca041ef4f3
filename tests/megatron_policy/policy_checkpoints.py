"""Tiny Hugging Face checkpoints, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 64
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def write_checkpoint(folder: Path, kind: str, **changes: Any) -> Path:
    """A bfloat16 checkpoint of ``qwen3``, ``qwen3_moe`` or ``llama`` with random weights; returns the folder."""
    import torch
    import transformers

    from tests.policy_scenes import spread

    shape = {**_SHAPE, **changes}
    if kind == "qwen3":
        config = transformers.Qwen3Config(**shape)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        )
    else:
        config = transformers.LlamaConfig(**shape)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    spread(model, 2.0)
    model.save_pretrained(folder)
    return folder


def transformers_logprobs(folder: Path, input_ids: Any, temperature: float = 1.0) -> Any:
    """Log-probabilities ``[N, S]`` by the transformers model in float32 arithmetic; column 0 is 0."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids).logits[:, :-1] / temperature
    picked = torch.log_softmax(logits, -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(picked, (1, 0))
