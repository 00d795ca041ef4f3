"""Tiny Qwen3 checkpoints with random weights, as Hugging Face writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

_COMMON = {
    "vocab_size": 120,  # vLLM pads the vocabulary to a multiple of 64
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def dense_config(
    *, tied: bool = False, kv_heads: int = 2, architectures: list[str] | None = None
) -> Qwen3Config:
    shape = _COMMON | {"num_key_value_heads": kv_heads, "architectures": architectures}
    return Qwen3Config(**shape, intermediate_size=96, tie_word_embeddings=tied)


# A size of experts that no library of vLLM's packs for its CPU kernels, on one rank or two: they take only those of which the rows of
# gate and up on a rank are a multiple of 32 together, and fail as they compute where that is none of 64.
PLAIN_EXPERTS = 24


def moe_config(*, expert_size: int = PLAIN_EXPERTS) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **_COMMON,
        intermediate_size=96,
        tie_word_embeddings=False,
        moe_intermediate_size=expert_size,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )


def write_checkpoint(
    path: Path, config: Qwen3Config | Qwen3MoeConfig, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Save a model with weights of ``seed``; large enough weights that greedy tokens depend on all of them."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(path)
    return path


def quantize_checkpoint(path: Path) -> Path:
    """Turn a checkpoint into FP8 (E4M3) with one scale for each linear weight, as llm-compressor and vLLM name them."""
    tensors = {}
    for name, tensor in read_checkpoint(path).items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
            tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale")] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def read_checkpoint(path: Path | str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by their Hugging Face names, in file order."""
    tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def manifest_of(tensors: dict[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
