"""Runs of the recipes with ``trainer=fsdp``."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlrefit.recipes.config import load_config
from rlrefit.recipes.run_files import read_json_lines
from rlrefit.recipes.train import train

from .command import SHORT, curve, metrics

pytestmark = pytest.mark.timeout(600)

SAVED, STEPS = 2, 4


def run(recipe: str, root: Path, ray_address: str, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """The lines of a run's metrics, and what it printed."""
    said = io.StringIO()
    common = ("trainer=fsdp", f"run_root={root}", f"ray.address={ray_address}", "validation.every=2", *SHORT)
    config = load_config(recipe, [*common, *overrides])
    folder = train(config, Console(file=said, width=200))
    return metrics(folder), said.getvalue()


def results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What of a curve must not depend on how the weights travelled."""
    moved = ("refit/", "stage/")
    return [{key: value for key, value in row.items() if not key.startswith(moved)} for row in curve(rows)]


def test_shard_to_shard_gives_the_curve_of_the_golden_path_bit_for_bit_and_so_do_resumed_runs(
    tmp_path: Path, ray_address: str
) -> None:
    steps = (f"algorithm.steps={STEPS}", f"checkpoint.every={SAVED}")
    rows, said = run("grpo_tiny", tmp_path / "shards", ray_address, *steps, "policy.refit.transport=p2p")
    assert "trainer 2 ranks (FSDP2), transformers 1 x TP2" in said
    assert "refit: shard to shard; 25 weights bulk, 0 misc, 0 unused by the engine" in said
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert all(row["refit/bytes_verified"] > 0 for row in rows)
    assert max(row["generation_kl"] for row in rows) <= 1e-3
    assert len({row["train/grad_norm"] for row in rows}) == STEPS

    others = {"golden": "policy.refit.transport=golden", "turns": "generation.colocated.enabled=true"}
    for name, other in others.items():
        shutil.copytree(tmp_path / "shards", tmp_path / name)
        shutil.rmtree(tmp_path / name / "grpo_tiny" / "checkpoints" / f"step_{STEPS:06d}")
        again, said = run("grpo_tiny", tmp_path / name, ray_address, *steps, other, "resume=true")
        assert f"resuming after step {SAVED}" in said
        assert results(again) == results(rows)
        assert again[SAVED:] != rows[SAVED:]  # but for the seconds
    assert "transformers 1 x TP2, colocated" in said
    stages = read_json_lines(tmp_path / "turns" / "grpo_tiny" / "stages.jsonl")
    assert [row["move"] for row in stages[:2]] == ["sleep", "load_trainer"]
    assert {row["step"] for row in stages} == set(range(SAVED + 1, STEPS + 1))


def test_dapo_trains_a_mixture_of_experts_under_tensor_parallelism(tmp_path: Path, ray_address: str) -> None:
    rows, said = run(
        "dapo_tiny",
        tmp_path,
        ray_address,
        "trainer.tensor_parallel=2",
        "model.path=tiny:qwen3-moe",
        "algorithm.steps=2",
        "algorithm.max_sampling_rounds=2",
    )
    assert "trainer 2 ranks (FSDP1 TP2)" in said
    assert [row["weights/version"] for row in rows] == [0, 1]
    assert max(row["generation_kl"] for row in rows) <= 1e-3


def test_a_trainer_that_quantizes_serves_fp8_rollouts(tmp_path: Path, ray_address: str) -> None:
    fp8 = (
        "policy.refit.trainer_quantize_fp8=true",
        "generation.weight_dtype=fp8",
        "policy.refit.verify=full",
    )
    rows, said = run("grpo_tiny", tmp_path, ray_address, "algorithm.steps=2", *fp8)
    # Codes and scales of 14 matrices, also of those of which each rank has 64 rows, half a block.
    assert "refit: shard to shard; 39 weights bulk, 0 misc, 0 unused by the engine" in said
    # What FP8 changes, beside less than 1e-3 in BF16.
    assert all(1e-6 < row["generation_kl"] < 0.02 for row in rows)
    assert all(row["refit/bytes_verified"] > 0 for row in rows)
