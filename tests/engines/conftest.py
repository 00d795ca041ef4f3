"""The checkpoints that engines are refitted with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.families.checkpoints import write_checkpoint
from tests.gpu.vllm_checkpoints import read_checkpoint
from tests.vllm_cpu import PACKS_EXPERTS

# Sizes that no padding is needed for. Kernels take experts as they are loaded, but of a vLLM that packs all of them on CPUs.
SIZES = {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 64 if PACKS_EXPERTS else 48,
}


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints of experts, all tensors of which differ."""
    found = []
    for seed in range(2):
        path = write_checkpoint("qwen3_moe", tmp_path_factory.mktemp("moe"), short=True, changes=SIZES)
        draw = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(tensor.shape, generator=draw).to(tensor.dtype)
            for name, tensor in read_checkpoint(path).items()
        }
        save_file(tensors, Path(path) / "model.safetensors", {"format": "pt"})
        found.append(path)
    return found
