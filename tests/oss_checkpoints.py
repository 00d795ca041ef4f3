"""Tiny GPT-OSS checkpoints of random weights: in MXFP4, as OpenAI's are, and the same weights in BF16 beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlrefit.integration.quantize import mxfp4

Tensors = dict[str, torch.Tensor]


def write_oss(folder: Path, sizes: tuple[int, int], seed: int, **more: Any) -> Path:
    """Write a checkpoint in MXFP4, and one in BF16 that :func:`unpacked` finds.

    Args:
        folder: of both.
        sizes: hidden and intermediate size.
        seed: of the weights.
        more: of the configuration.
    """
    import transformers

    hidden, intermediate = sizes
    small = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    config = transformers.GptOssConfig(
        hidden_size=hidden, intermediate_size=intermediate, **{**small, **more}
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    path = folder / f"oss-{hidden}-{intermediate}-{seed}"
    model.save_pretrained(unpacked(path))
    path.mkdir()
    save_file(packed(read(unpacked(path))), path / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((unpacked(path) / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(told))
    return path


def unpacked(path: Path) -> Path:
    """The checkpoint in BF16 of the same weights."""
    return path.with_name(f"{path.name}-bf16")


def packed(weights: Tensors) -> Tensors:
    """A checkpoint's tensors with the experts in MXFP4, under the names that OpenAI's have."""
    found: Tensors = {}
    for name, weight in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scales = mxfp4.quantize(weight.transpose(1, 2))
            found[f"{name}_blocks"] = codes.view(*scales.shape, 16)
            found[f"{name}_scales"] = scales
        else:
            found[name] = weight
    return found


def read(path: Path) -> Tensors:
    return load_file(path / "model.safetensors")
