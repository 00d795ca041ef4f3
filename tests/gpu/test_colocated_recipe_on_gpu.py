"""Whole runs of a recipe whose trainer and vLLM take turns on one GPU, or on two, by the command line as a user gives it.

Where vLLM has its packages in folders of its own, ENGINE_PATH is the PYTHONPATH of the engine's processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.recipes.run.files import read_json_lines
from rlrefit.recipes.tiny.checkpoints import KINDS
from rlrefit.recipes.tiny.make_tokenizer import load_tokenizer

from .needs import needs

pytestmark = [
    *needs("ray", "hydra", "datasets", "transformers", "vllm"),
    pytest.mark.timeout(540),
]

STEPS = 3
# What the recipe is run with, and what its trainer's processes import.
MEGATRON = needs("megatron", "transformer_engine")
FP8 = ("generation.weight_dtype=fp8", "policy.refit.trainer_quantize_fp8=true", "model.dtype=bfloat16")
CASES = [
    pytest.param(("trainer=fsdp",), id="fsdp"),
    pytest.param(("trainer=megatron",), id="megatron", marks=MEGATRON),
    # Not w4a4, since vLLM quantizes inputs on Blackwell alone.
    pytest.param(("trainer=fsdp", "policy.qat=w4a16"), id="nvfp4"),
    pytest.param(("trainer=fsdp", "policy.qat=w4a16", "model.path=tiny:qwen3-moe"), id="nvfp4 experts"),
    pytest.param(("trainer=megatron", "trainer.fp8_param=true", *FP8), id="fp8 parameters", marks=MEGATRON),
    pytest.param(("trainer=fsdp", *FP8), id="fp8 blocks"),
]
# One engine over two GPUs that two trainer ranks share.
EXPERTS = ("model.path=tiny:qwen3-moe", "generation.tensor_parallel=2")
WHOLE_EXPERTS = (*EXPERTS, "generation.vllm.enable_expert_parallel=true")
SPREAD = [
    pytest.param(("trainer=fsdp", "generation.tensor_parallel=2"), id="tensors"),
    pytest.param(("trainer=fsdp", "generation.pipeline_parallel=2"), id="stages"),
    pytest.param(("trainer=fsdp", *WHOLE_EXPERTS), id="experts"),
    pytest.param(
        (
            "trainer=megatron",
            "trainer.fp8_param=true",
            "trainer.tensor_parallel=2",
            "trainer.expert_parallel=2",
            *EXPERTS,
            *FP8,
        ),
        id="fp8 parameters of experts",
        marks=MEGATRON,
    ),
]
# Of a GPU, by their number, for an engine whose model has a few megabytes: the rest of it is KV cache. The memory of two is not compared, and less of
# it wakes sooner.
UTILIZATION = {1: 0.8, 2: 0.3}
BEGIN = ["sleep", "load_trainer"]
STEP = [
    *("offload_trainer", "wake_weights", "refit", "free_trainer", "wake_kv_cache"),
    *("generate", *BEGIN, "train", "train"),
]


def run(root: Path, overrides: tuple[str, ...], gpus: int) -> tuple[int, str]:
    """Exit code and output of the recipe on so many GPUs."""
    kind = "qwen3-moe" if EXPERTS[0] in overrides else "qwen3"
    engine_path = os.environ.get("ENGINE_PATH")
    arguments = (
        "recipe=grpo_tiny_vllm",
        "trainer.tensor_parallel=1",
        *overrides,
        *([f"model.path={of_whole_blocks(root / 'model', kind)}"] if FP8[0] in overrides else []),
        "name=run",
        f"run_root={root}",
        f"trainer.ranks={gpus}",
        "generation.colocated.enabled=true",
        f"generation.vllm.gpu_memory_utilization={UTILIZATION[gpus]}",
        f"algorithm.steps={STEPS}",
        "validation.every=0",
        "checkpoint.every=0",
        "policy.refit.verify=full",
        "ray.timeout_s=400",
        *([f"ray.generation_env.PYTHONPATH={engine_path}"] if engine_path else []),
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:gpus]
    done = subprocess.run(
        [sys.executable, "-m", "rlrefit.recipes.cli", "train", *arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        env={**os.environ, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ",".join(visible)},
    )
    return done.returncode, done.stdout


def of_whole_blocks(folder: Path, kind: str) -> Path:
    """A checkpoint whose queries, keys and values are whole FP8 blocks, as those of models of a true size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    if "moe_intermediate_size" in KINDS[kind]:
        sizes["moe_intermediate_size"] = 256
    config = AutoConfig.for_model(**KINDS[kind] | sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("overrides", CASES)
def test_three_steps_in_turns_on_one_gpu_follow_the_policy_and_give_the_memory_back(
    overrides: tuple[str, ...], tmp_path: Path, tell: Callable[[str], None]
) -> None:
    stages, refits = _followed(tmp_path, overrides, 1, tell)
    assert all(record["stage_peaks"]["wake_weights"] > 0 for record in refits)
    total = stages[-1]["processes"][0]["device_total"]
    assert min(_used(stages, "generate")) > 0.9 * UTILIZATION[1] * total
    assert max(_used(stages, "sleep")) < 0.2 * total
    assert max(_used(stages, "refit")) < 0.2 * total
    # In the last step, since the first refit makes buffers that stay.
    trained, weights_alone = _of_trainer(stages, "train")[-3], _of_trainer(stages, "offload_trainer")[-1]
    assert trained > weights_alone > _of_trainer(stages, "free_trainer")[-1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("overrides", SPREAD)
def test_three_steps_in_turns_with_an_engine_over_two_gpus_follow_the_policy(
    overrides: tuple[str, ...], tmp_path: Path, tell: Callable[[str], None]
) -> None:
    _, refits = _followed(tmp_path, overrides, 2, tell)
    assert len({record["rank"] for record in refits if record["role"] == "generation"}) == 2


def _followed(
    folder: Path, overrides: tuple[str, ...], gpus: int, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records of the stages and refits of a run whose engine generated with the policy's weights in each step."""
    code, output = run(folder, overrides, gpus)
    assert code == 0, output
    rows, stages, refits = (
        read_json_lines(folder / "run" / f"{name}.jsonl") for name in ("metrics", "stages", "refits")
    )
    _tell(tell, overrides, stages, refits)

    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    quantized = FP8[0] in overrides
    assert max(row["generation_kl"] for row in rows) <= (2e-2 if quantized else 1e-3)
    assert len({row["train/grad_norm"] for row in rows}) == STEPS

    assert {record["engine"] for record in refits} == {"colocated_ipc"}
    assert {record["transport"] for record in refits} <= {"ipc", "pull"}
    # In NVFP4 what is not quantized weighs more.
    packed = any(override.startswith("policy.qat") for override in overrides)
    assert all(record["bytes_misc"] < record["bytes_bulk"] / (2 if packed else 50) for record in refits)
    assert all(record["bytes_verified"] > 0 for record in refits if record["role"] == "generation")

    assert [record["move"] for record in stages] == BEGIN + STEP * STEPS
    assert not any(record["failed"] for record in stages)
    assert len({process["device"] for record in stages for process in record["processes"]}) == gpus
    return stages, refits


def _used(stages: list[dict[str, Any]], move: str) -> list[int]:
    """Bytes in use on the GPU after each such move."""
    return [max(p["device_used"] for p in each["processes"]) for each in stages if each["move"] == move]


def _of_trainer(stages: list[dict[str, Any]], move: str) -> list[int]:
    """Bytes that the trainer's tensors take on the GPU after each such move."""
    return [
        process["allocated"]
        for each in stages
        for process in each["processes"]
        if each["move"] == move and process["process"].startswith("trainer")
    ]


def _tell(
    tell: Callable[[str], None],
    overrides: tuple[str, ...],
    stages: list[dict[str, Any]],
    refits: list[dict[str, Any]],
) -> None:
    told = {
        move: {
            "s": [round(each["seconds"], 3) for each in stages if each["move"] == move],
            "peak GiB": round(max(each["device_peak"] for each in stages if each["move"] == move) / 2**30, 2),
        }
        for move in dict.fromkeys(each["move"] for each in stages)
    }
    carried = sorted({record["transport"] for record in refits})
    paths = {path: sorted({record[f"bytes_{path}"] for record in refits}) for path in ("bulk", "misc")}
    tell(json.dumps({"run": overrides, "transport": carried, "bytes": paths, "stages": told}))
