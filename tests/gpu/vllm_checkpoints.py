"""Tiny Qwen3 checkpoints whose sizes vLLM's GPU kernels take, in BF16, block-quantized FP8, MXFP8 or INT4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlrefit.integration.quantize import int4, mxfp8
from rlrefit.integration.quantize.fp8_blockwise import BLOCK, ScaleFormat, quantize

_COMMON = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_checkpoint(
    path: Path,
    seed: int,
    *,
    fp8: bool,
    experts: bool = False,
    width: int = 256,
    scale: ScaleFormat = ScaleFormat.FP32,
) -> str:
    """Save a model with weights of ``seed``, and return its folder; FP8 of the same weights as BF16 without it. ``width``: of experts."""
    import transformers

    config: transformers.PretrainedConfig = transformers.Qwen3Config(**_COMMON)
    if experts:
        config = transformers.Qwen3MoeConfig(
            **_COMMON,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=width,
            decoder_sparse_step=1,
        )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(path)
    if fp8:
        quantize_in_blocks(path, scale)
    return str(path)


def read_checkpoint(path: str) -> dict[str, torch.Tensor]:
    return load_file(Path(path) / "model.safetensors")


def quantize_in_blocks(path: Path, scale: ScaleFormat = ScaleFormat.FP32) -> None:
    """Turn a Qwen3 checkpoint into FP8 blocks, as those of the hub have it."""
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": [
            "lm_head",
            *(f"model.layers.{layer}.mlp.gate" for layer in range(layers)),
        ],
    }
    _quantize(path, ("", "_scale_inv"), lambda weight: quantize(weight, scale=scale), config)


def quantize_to_mxfp8(path: Path, config: dict[str, Any], scales: str = "_scale") -> None:
    """Turn a Qwen3 checkpoint into one whose decoder layers' matrices are MXFP8.

    Args:
        path: of the checkpoint.
        config: its ``quantization_config``.
        scales: what the scales' names have behind the weights'.
    """
    _quantize(path, ("", scales), mxfp8.quantize, config)


def quantize_to_int4(path: Path, config: dict[str, Any], scale_rule: str = int4.BY_HALF_RANGE) -> None:
    """Turn a checkpoint into one whose decoder layers' matrices are INT4, as compressed-tensors packs them.

    Args:
        path: of the checkpoint.
        config: its ``quantization_config``, whose ``ignore`` list is heeded. Beside an image encoder it is the language model's.
        scale_rule: by which scales are made.
    """
    group = config["config_groups"]["group_0"]["weights"]["group_size"]

    def packed(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *int4.quantize(weight, group, scale_rule), torch.tensor(weight.shape)

    _quantize(path, ("_packed", "_scale", "_shape"), packed, config, config["ignore"])


def mxfp8_of_modelopt() -> dict[str, Any]:
    """``quantization_config`` as ModelOpt writes it."""
    return {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}


def _quantize(
    path: Path,
    ends: Sequence[str],
    by: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    config: dict[str, Any],
    ignored: Sequence[str] = (),
) -> None:
    patterns = [pattern.removeprefix("re:") for pattern in ignored if pattern.startswith("re:")]
    tensors = {}
    for name, tensor in read_checkpoint(str(path)).items():
        module = name.removesuffix(".weight")
        if module.endswith(("_proj", "_proj_with_mqa")) and not any(
            re.match(pattern, module) for pattern in patterns
        ):
            tensors |= zip([name + end for end in ends], by(tensor), strict=True)
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((path / "config.json").read_text())
    told.get("text_config", told)["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(told))
