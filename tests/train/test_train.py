"""Runs of the recipes through the command line, from start to exit code."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from .command import SHORT, curve, finish, kill_rank, metrics, ray_processes_of, rlrefit, run, wait_for_step

KEYS = {
    "step",
    "reward/mean",
    "val/reward",
    "generation_kl",
    "loss",
    "time/step",
    "refit/seconds",
    "refit/bytes_bulk",
    "refit/bytes_misc",
    "refit/kept_gb_per_s",
}


@pytest.mark.timeout(400)
def test_the_demo_learns_and_its_validation_reward_rises_with_it(tmp_path: Path) -> None:
    code, output = run("train", "recipe=grpo_tiny", "algorithm.steps=40", cwd=tmp_path)
    assert code == 0, output
    folder = tmp_path / "runs" / "grpo_tiny"
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert all(row.keys() >= KEYS for row in rows)
    first, last = (sum(r["reward/mean"] for r in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last >= 2 * first
    # The form alone earns 0.2; beyond it the answers are right.
    assert last > 0.3
    validated = [row["val/reward"] for row in rows if row["val/reward"] is not None]
    assert validated[-1] >= 2 * max(validated[0], 0.1)
    assert max(row["generation_kl"] for row in rows) <= 1e-3
    assert all(row["weights/version"] == row["refit/version"] == row["step"] - 1 for row in rows)
    assert all(row["refit/bytes_verified"] > 0 for row in rows)
    assert (folder / "report.png").stat().st_size > 20_000
    assert "grpo_tiny: 40 steps" in output


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps that saved a checkpoint after the second and the fourth."""
    cwd = tmp_path_factory.mktemp("whole")
    code, output = run(
        "train", "recipe=grpo_tiny", "name=whole", "algorithm.steps=4", "checkpoint.every=2", *SHORT, cwd=cwd
    )
    assert code == 0, output
    return cwd


@pytest.mark.timeout(600)
def test_a_run_resumes_from_the_last_good_checkpoint_with_the_same_curve(
    four_steps: Path, tmp_path: Path
) -> None:
    shutil.copytree(four_steps / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "whole"
    newest = folder / "checkpoints" / "step_000004"
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    arguments = ["train", "recipe=grpo_tiny", "name=whole", "algorithm.steps=4", "checkpoint.every=0", *SHORT]
    code, output = run(*arguments, cwd=tmp_path)
    assert code == 1
    assert "resume=true" in output
    code, output = run(*arguments, "resume=true", cwd=tmp_path)
    assert code == 0, output
    assert "step_000004 is skipped" in output
    assert largest.name in output
    assert "resuming after step 2" in output
    assert curve(metrics(folder)) == curve(metrics(four_steps / "runs" / "whole"))


@pytest.mark.timeout(400)
def test_an_interrupt_finishes_the_step_saves_it_and_leaves_no_process(
    four_steps: Path, tmp_path: Path
) -> None:
    process = rlrefit("train", "recipe=grpo_tiny", "name=stopped", "algorithm.steps=50", *SHORT, cwd=tmp_path)
    wait_for_step(process, 1)
    ranks = ray_processes_of(process)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "which is saved; resume=true goes on" in output
    folder = tmp_path / "runs" / "stopped"
    rows = metrics(folder)
    assert (folder / "checkpoints" / f"step_{rows[-1]['step']:06d}" / "manifest.json").exists()
    assert curve(rows) == curve(metrics(four_steps / "runs" / "whole"))[: len(rows)]
    _require_gone(ranks)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("actor", ["TransformersActor"])
def test_the_death_of_a_rank_ends_the_run_with_its_name_and_leaves_no_process(
    actor: str, tmp_path: Path
) -> None:
    process = rlrefit("train", "recipe=grpo_tiny", "name=died", "algorithm.steps=200", *SHORT, cwd=tmp_path)
    wait_for_step(process, 1)
    ranks = ray_processes_of(process)
    kill_rank(process, actor)
    start = time.monotonic()
    code, output = finish(process, timeout_s=90)
    assert code == 1, output
    assert "rank" in output
    assert "died" in output or "failed" in output
    assert time.monotonic() - start < 60
    assert all(
        json.loads(line) for line in (tmp_path / "runs" / "died" / "metrics.jsonl").read_text().splitlines()
    )
    _require_gone(ranks)


@pytest.mark.timeout(400)
def test_dapo_trains_a_mixture_of_experts_whose_router_takes_the_misc_path(tmp_path: Path) -> None:
    code, output = run(
        "train",
        "recipe=dapo_tiny",
        "model.path=tiny:qwen3-moe",
        "trainer.expert_parallel=2",
        "algorithm.steps=2",
        "algorithm.max_sampling_rounds=2",
        *SHORT,
        cwd=tmp_path,
    )
    assert code == 0, output
    rows = metrics(tmp_path / "runs" / "dapo_tiny")
    assert all(row["refit/bytes_misc"] > 0 for row in rows)
    assert all(row["sampling/generated"] >= 16 * 8 for row in rows)
    assert max(row["generation_kl"] for row in rows) <= 1e-3


@pytest.mark.timeout(500)
def test_two_grpo_steps_with_vllm_keep_the_generation_kl_below_a_thousandth_in_bf16(tmp_path: Path) -> None:
    code, output = run("train", "recipe=grpo_tiny_vllm", "algorithm.steps=3", *SHORT, cwd=tmp_path)
    assert code == 0, output
    rows = metrics(tmp_path / "runs" / "grpo_tiny_vllm")
    # The first step samples from the checkpoint's weights, the others from trained and refitted ones.
    assert [row["weights/version"] for row in rows] == [0, 1, 2]
    assert max(row["generation_kl"] for row in rows) <= 1e-3
    assert rows[0]["refit/bytes_misc"] == 0


def _require_gone(processes: list) -> None:
    deadline = time.monotonic() + 20
    while (
        left := [p for p in processes if p.is_running() and p.status() != "zombie"]
    ) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"still running: {[p.cmdline()[:1] for p in left]}"
