"""Runs of the recipes with ``trainer=fsdp``."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.refits import Refits
from rlrefit.recipes.run.files import read_json_lines
from rlrefit.recipes.train import train
from tests.ahead import FoundAhead, keeping_time, of_all_tests

from .command import SHORT, metrics, numbers
from .delta_runs import DIGESTS, DigestedRefits, digests
from .shared_cluster import on_shared_cluster

SAVED, STEPS = 2, 4


@dataclass(frozen=True)
class Ran:
    """A run that went to its end: the lines of its metrics, and what it printed."""

    folder: Path
    rows: list[dict[str, Any]]
    said: str


def run(
    recipe: str,
    root: Path,
    ray_address: str,
    *overrides: str,
    trainer: str = "fsdp",
    refits: type[Refits] | None = None,
) -> Ran:
    said = io.StringIO()
    common = (
        f"trainer={trainer}",
        f"run_root={root}",
        f"ray.address={ray_address}",
        "validation.every=2",
        *SHORT,
    )
    config = load_config(recipe, [*common, *overrides])
    folder = train(config, Console(file=said, width=200), refits)
    return Ran(folder, metrics(folder), said.getvalue())


OF_ALL_RUNS = (
    *(f"algorithm.steps={STEPS}", "algorithm.prompts_per_step=8"),
    *(f"checkpoint.every={SAVED}", "checkpoint.keep=3"),
)


def _train_and_resume(folder: Path, ray_address: str) -> dict[str, Ran]:
    """A run shard to shard, and what goes on from its first checkpoint otherwise."""
    first = (*OF_ALL_RUNS, "policy.refit.transport=p2p")
    ran = {"shards": run("grpo_tiny", folder / "shards", ray_address, *first, refits=DigestedRefits)}
    by_mask = ("policy.refit.delta=always", "policy.refit.delta_base=optimizer")
    others: dict[str, tuple[tuple[str, ...], type[Refits] | None]] = {
        "turns": (("generation.colocated.enabled=true",), None),
        "sparse": (by_mask, DigestedRefits),
    }
    for name, (other, refits) in others.items():
        shutil.copytree(folder / "shards", folder / name)
        for checkpoint in (folder / name / "grpo_tiny" / "checkpoints").glob("step_*"):
            if checkpoint.name != f"step_{SAVED:06d}":
                shutil.rmtree(checkpoint)
        (folder / name / "grpo_tiny" / DIGESTS).unlink()
        ran[name] = run(
            "grpo_tiny", folder / name, ray_address, *OF_ALL_RUNS, *other, "resume=true", refits=refits
        )
    return ran


def _train_by_golden(folder: Path, ray_address: str) -> dict[str, Ran]:
    """A run shard to shard, and the same one by the golden path."""
    return {
        way: run("grpo_tiny", folder / way, ray_address, *OF_ALL_RUNS, f"policy.refit.transport={way}")
        for way in ("p2p", "golden")
    }


def _train_experts(folder: Path, ray_address: str) -> Ran:
    overrides = (
        "trainer.tensor_parallel=2",
        "model.path=tiny:qwen3-moe",
        "algorithm.steps=2",
        "algorithm.max_sampling_rounds=2",
    )
    return run("dapo_tiny", folder, ray_address, *overrides)


def _train_in_fp8(folder: Path, ray_address: str) -> Ran:
    fp8 = (
        "policy.refit.trainer_quantize_fp8=true",
        "generation.weight_dtype=fp8",
        "policy.refit.verify=full",
    )
    return run("grpo_tiny", folder, ray_address, "algorithm.steps=2", *fp8)


@keeping_time  # Ray gives up starting after half a minute
def train_and_resume(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_and_resume, folder)


# The same ranks and transports move weights bit for bit in tests/fsdp and tests/colocated.
@of_all_tests
@keeping_time
def train_by_golden(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_by_golden, folder)


# Policies of experts train so in tests/fsdp_policy, send them so in tests/fsdp, and DAPO trains experts in test_withheld_refit.
@of_all_tests
@keeping_time
def train_experts(folder: Path) -> Ran:
    return on_shared_cluster(_train_experts, folder)


@keeping_time
def train_in_fp8(folder: Path) -> Ran:
    return on_shared_cluster(_train_in_fp8, folder)


AHEAD = (train_and_resume, train_by_golden, train_experts, train_in_fp8)


def test_resumed_runs_in_turns_and_with_sparse_refits_give_the_curve_of_shard_to_shard_bit_for_bit(
    found_ahead: FoundAhead,
) -> None:
    ran = found_ahead.by(train_and_resume)
    rows, said = ran["shards"].rows, ran["shards"].said
    assert "trainer 2 ranks (FSDP2), transformers 1 x TP2" in said
    assert "refit: shard to shard; 25 weights bulk, 0 misc, 0 unused by the engine" in said
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert all(row["refit/bytes_verified"] > 0 for row in rows)
    assert max(row["generation_kl"] for row in rows) <= 1e-3
    assert len({row["train/grad_norm"] for row in rows}) == STEPS

    for again in (ran["turns"], ran["sparse"]):
        assert f"resuming after step {SAVED}" in again.said
        assert numbers(again.rows) == numbers(rows)
        assert again.rows[SAVED:] != rows[SAVED:]  # but for the seconds
    assert "transformers 1 x TP2, colocated" in ran["turns"].said
    # In FP32 an optimizer step changes nearly all elements; the first refit of an epoch is dense.
    shares = [row.get("refit/changed_share") for row in ran["sparse"].rows]
    assert shares[: SAVED + 1] == [None] * (SAVED + 1)
    assert all(0.5 < share < 1 for share in shares[SAVED + 1 :])
    held, again = (digests(ran[name].folder) for name in ("shards", "sparse"))
    assert again == {version: held[version] for version in range(SAVED, STEPS)}
    assert len({str(of_ranks) for of_ranks in held.values()}) == STEPS
    stages = read_json_lines(ran["turns"].folder / "stages.jsonl")
    assert [row["move"] for row in stages[:2]] == ["sleep", "load_trainer"]
    assert {row["step"] for row in stages} == set(range(SAVED + 1, STEPS + 1))


@pytest.mark.full
def test_shard_to_shard_gives_the_curve_of_the_golden_path_bit_for_bit(found_ahead: FoundAhead) -> None:
    ran = found_ahead.by(train_by_golden)
    assert numbers(ran["p2p"].rows) == numbers(ran["golden"].rows)
    assert len(ran["p2p"].rows) == STEPS
    assert ran["golden"].rows != ran["p2p"].rows  # but for the seconds


@pytest.mark.full
def test_dapo_trains_a_mixture_of_experts_under_tensor_parallelism(found_ahead: FoundAhead) -> None:
    ran = found_ahead.by(train_experts)
    assert "trainer 2 ranks (FSDP1 TP2)" in ran.said
    assert [row["weights/version"] for row in ran.rows] == [0, 1]
    assert max(row["generation_kl"] for row in ran.rows) <= 1e-3


def test_a_trainer_that_quantizes_serves_fp8_rollouts(found_ahead: FoundAhead) -> None:
    ran = found_ahead.by(train_in_fp8)
    # Codes and scales of 14 matrices, also of those of which each rank has 64 rows, half a block.
    assert "refit: shard to shard; 39 weights bulk, 0 misc, 0 unused by the engine" in ran.said
    # What FP8 changes, beside less than 1e-3 in BF16.
    assert all(1e-6 < row["generation_kl"] < 0.02 for row in ran.rows)
    assert all(row["refit/bytes_verified"] > 0 for row in ran.rows)
