"""Every family that vLLM can build on CPUs, in pairs of checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm_checkpoints import PLAIN_EXPERTS, read_checkpoint

from tests.families.checkpoints import write_checkpoint

_EXPERTS = {"moe_intermediate_size": PLAIN_EXPERTS}
# Family → what its configuration has in published checkpoints, and vLLM goes by; and experts of a size that stays as it is loaded.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-tied": {},
    "qwen3_moe": _EXPERTS,
    "mistral": {},
    "mixtral": {"intermediate_size": PLAIN_EXPERTS},
    "gemma2": {},
    "gemma3": {},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, **_EXPERTS},
    "gpt_oss": {"intermediate_size": PLAIN_EXPERTS},
    "nemotron_h": {},
    "qwen3_next": _EXPERTS,
    "qwen3_5_moe": _EXPERTS,
    "qwen3_5_moe-stacked": _EXPERTS,
}
# A vocabulary that vLLM does not pad on two ranks.
_COMMON = {"vocab_size": 64, "max_position_embeddings": 256}


def write_pair(folder: Path, family: str) -> tuple[str, str]:
    """Two checkpoints of a family; every tensor of them has other values, norms and biases too.

    All is in BF16 but for biases of routers, whose values are FP32 wherever they are published.
    """
    first = write_checkpoint(family, folder / "a", short=True, changes=_COMMON | FAMILIES[family])
    second = str(shutil.copytree(first, folder / "b"))
    for seed, path in enumerate((first, second)):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(tensor.shape, generator=generator).to(
                torch.float32 if name.endswith("e_score_correction_bias") else tensor.dtype
            )
            for name, tensor in read_checkpoint(path).items()
        }
        save_file(tensors, Path(path) / "model.safetensors", {"format": "pt"})
    return first, second
