"""vLLM's Model Runner V2, which later releases take by themselves: a live engine with it, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.families.checkpoints import write_checkpoint
from tests.gpu.vllm_checkpoints import read_checkpoint
from tests.spawn import run_together
from tests.vllm_cpu import HAS_RUNNER_V2

from .runner_v2 import BEFORE, TOKENS

ROOT = Path(__file__).parents[2]
# Heads of a size that the CPU's attention takes.
SIZES = {"vocab_size": 128, "max_position_embeddings": 64, "head_dim": 32}


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_RUNNER_V2, reason="needs vLLM 0.32's Model Runner V2 for CPUs: make test-engines")
def test_a_live_engine_with_model_runner_v2_takes_refits_while_requests_run(tmp_path: Path) -> None:
    paths = []
    for seed in range(2):
        path = write_checkpoint("qwen3", tmp_path / str(seed), short=True, changes=SIZES)
        draw = torch.Generator().manual_seed(seed)
        tensors = {
            name: (torch.randn(tensor.shape, generator=draw) * 0.2).to(tensor.dtype)
            for name, tensor in read_checkpoint(path).items()
        }
        save_file(tensors, Path(path) / "model.safetensors", {"format": "pt"})
        paths.append(path)
    found, *loaded = run_together(
        lambda: run("1", *paths), lambda: run("0", paths[0]), lambda: run("0", paths[1])
    )
    assert found["runner"].startswith("vllm.v1.worker.cpu.")
    assert all(engine["runner"] == "vllm.v1.worker.cpu_model_runner" for engine in loaded)
    assert found["refused"] == "EngineDirty"
    assert found["misc"] == 0
    first, second = (engine["loaded"] for engine in loaded)
    assert first != second
    assert (found["first"], found["second"], found["again"]) == (first, second, first)
    # What a running request has goes on with the new weights.
    assert found["crossed"][:BEFORE] == first[:BEFORE]
    assert found["crossed"][BEFORE:] == found["continued"]
    assert len(found["crossed"]) == TOKENS


def run(runner: str, *paths: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.runner_v2", runner, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
