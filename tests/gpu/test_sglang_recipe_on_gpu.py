"""GRPO with SGLang as the engine, by the command line: in turns with the trainer on one GPU, and on a GPU of its own.

Where SGLang has its packages in folders of its own, ENGINE_PATH is the PYTHONPATH of the engine's processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sglang.recipe_run import STEPS, records, run

from .needs import needs

pytestmark = [
    *needs("ray", "hydra", "datasets", "megatron", "transformer_engine", "transformers", "sglang"),
    pytest.mark.timeout(560),
]

# Keys and values of 2 layers, 2 heads, 32 numbers of BF16: 8.2 GB, beside which the model and what it computes are small.
TOKENS = 16_000_000
KV_BYTES = TOKENS * 2 * 2 * 2 * 32 * 2
WAKE = {"true": ["wake_weights", "wake_kv_cache"], "false": ["wake_all"]}
# What the bare package has.
_ENGINE = (
    "generation.sglang.attention_backend=triton",
    f"generation.sglang.server_args={{sampling_backend: pytorch, max_total_tokens: {TOKENS}}}",
)


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the test is for."""
    needed = request.param
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names[:needed]))


def _require_steps(rows: list[dict[str, Any]], verified: str) -> None:
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert max(row["generation_kl"] for row in rows) < 1e-2
    assert len({row["train/grad_norm"] for row in rows}) == STEPS
    assert all(row["refit/bytes_verified"] > 0 for row in rows)
    assert all(row[verified] > 0 for row in rows)


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize(
    ("asynchronous", "trainer", "in_stages"),
    [("false", "megatron", "true"), ("true", "fsdp", "true"), ("true", "megatron", "false")],
    ids=["blocking", "awaited", "awaited, all at once"],
)
def test_two_steps_in_turns_on_one_gpu_follow_the_policy_and_tell_the_peak_of_each_stage(
    gpus: None,
    tmp_path: Path,
    tell: Callable[[str], None],
    asynchronous: str,
    trainer: str,
    in_stages: str,
) -> None:
    rows = run(
        tmp_path,
        "turns",
        *_ENGINE,
        f"trainer={trainer}",
        f"generation.sglang.asynchronous={asynchronous}",
        "generation.colocated.enabled=true",
        f"generation.colocated.multi_stage_wake_up={in_stages}",
        timeout_s=500,
    )
    _tell(tell, asynchronous=asynchronous, trainer=trainer, in_stages=in_stages, rows=rows)
    _require_steps(rows, "refit/bytes_bulk")
    peaks = [
        {move: row[f"stage/peak_bytes/{move}"] for move in (*WAKE[in_stages], "refit", "generate", "train")}
        for row in rows
    ]
    for found in peaks:
        # The cache is there as the engine generates, gone as the trainer works, and not there yet as weights move in stages.
        assert found["generate"] - found["train"] > KV_BYTES // 2
        assert (found["generate"] - found["refit"] > KV_BYTES // 2) == (in_stages == "true")
    moves = records(tmp_path, "turns", "stages.jsonl")
    assert not any(record["failed"] for record in moves)
    assert len({process["device"] for record in moves for process in record["processes"]}) == 1
    # SGLang's memory saver lets nobody map the weights.
    refits = records(tmp_path, "turns", "refits.jsonl")
    assert {(record["engine"], record["transport"]) for record in refits} == {("colocated_ipc", "pull")}


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "CUDA graphs"])
def test_two_steps_in_turns_with_an_engine_over_two_gpus_follow_the_policy(
    gpus: None, tmp_path: Path, tell: Callable[[str], None], graphs: bool
) -> None:
    rows = run(
        tmp_path,
        "turns",
        *_ENGINE,
        # Its kernels are not in the bare package; and few batches to capture.
        "+generation.sglang.server_args.disable_custom_all_reduce=true",
        "+generation.sglang.server_args.cuda_graph_max_bs_decode=4",
        f"generation.sglang.disable_cuda_graph={str(not graphs).lower()}",
        "generation.sglang.mem_fraction_static=0.85",
        "trainer=fsdp",
        "trainer.ranks=2",
        "generation.tensor_parallel=2",
        "generation.colocated.enabled=true",
        timeout_s=500,
    )
    _tell(tell, graphs=str(graphs), rows=rows)
    _require_steps(rows, "refit/bytes_bulk")
    moves = records(tmp_path, "turns", "stages.jsonl")
    assert not any(record["failed"] for record in moves)
    assert len({process["device"] for record in moves for process in record["processes"]}) == 2
    refits = records(tmp_path, "turns", "refits.jsonl")
    assert {(record["engine"], record["transport"]) for record in refits} == {("colocated_ipc", "pull")}


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_an_fp8_cache_with_scales_of_the_last_step_follows_the_policy(
    gpus: None, tmp_path: Path, tell: Callable[[str], None], trainer: str
) -> None:
    rows = run(
        tmp_path,
        "cache",
        *_ENGINE,
        f"trainer={trainer}",
        "generation.colocated.enabled=true",
        "generation.sglang.kv_cache_dtype=fp8",
        "policy.refit.kv_scales=true",
        timeout_s=500,
    )
    _tell(tell, trainer=trainer, rows=rows)
    # The second step's with the scales of the first one.
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert all(0 <= row["generation_kl"] < 5e-2 for row in rows)
    assert all(row["refit/bytes_verified"] > 0 for row in rows)


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.parametrize(
    ("asynchronous", "shards"),
    [("false", "true"), ("true", "false")],
    ids=["blocking, shard to shard", "awaited, conventional"],
)
def test_two_steps_with_an_engine_on_a_gpu_of_its_own_follow_the_policy(
    gpus: None, tmp_path: Path, tell: Callable[[str], None], asynchronous: str, shards: str
) -> None:
    rows = run(
        tmp_path,
        "apart",
        *_ENGINE,
        f"policy.nccl_xfer_refit={shards}",
        f"generation.sglang.asynchronous={asynchronous}",
        timeout_s=500,
    )
    _tell(tell, asynchronous=asynchronous, shards=shards, rows=rows)
    _require_steps(rows, "refit/bytes_bulk" if shards == "true" else "refit/bytes_misc")


def _tell(tell: Callable[[str], None], *, rows: list[dict[str, Any]], **of: str) -> None:
    """A line of JSON: KL, seconds, and the peaks of the stages."""
    names = ("generation_kl", "reward/mean", "refit/seconds", "time/generate", "time/step")
    steps = [
        {name: value for name, value in row.items() if name in names or "stage/" in name} for row in rows
    ]
    tell(json.dumps({**of, "steps": steps}))
