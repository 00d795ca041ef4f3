"""Runs of a recipe whose Megatron trainer computes a part of every row on each rank."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.ahead import FoundAhead, keeping_time

from .command import numbers
from .shared_cluster import on_shared_cluster
from .test_fsdp_runs import Ran, run

# Training by CP is tested in megatron_policy, what a recipe makes of the key in config.
pytestmark = pytest.mark.full
SAVED, STEPS = 2, 3
WHOLE = ("trainer.ranks=1", "trainer.tensor_parallel=1")
PARTS = ("trainer.ranks=2", "trainer.tensor_parallel=1", "trainer.context_parallel=2")
FEW = (f"algorithm.steps={STEPS}", f"checkpoint.every={SAVED}")


def train_both(recipe: str, folder: Path, ray_address: str, *overrides: str) -> dict[str, Ran]:
    """A run on whole rows, and one on parts of them."""
    return {
        name: run(recipe, folder / name, ray_address, *layout, *FEW, *overrides, trainer="megatron")
        for name, layout in (("whole", WHOLE), ("parts", PARTS))
    }


def _train(folder: Path, ray_address: str) -> dict[str, Ran]:
    """Both, and the latter once more from its first checkpoint."""
    ran = train_both("grpo_tiny", folder, ray_address)
    shutil.copytree(folder / "parts", folder / "again")
    for checkpoint in (folder / "again" / "grpo_tiny" / "checkpoints").glob("step_*"):
        if checkpoint.name != f"step_{SAVED:06d}":
            shutil.rmtree(checkpoint)
    resuming = (*PARTS, *FEW, "resume=true")
    ran["again"] = run("grpo_tiny", folder / "again", ray_address, *resuming, trainer="megatron")
    return ran


@keeping_time  # Ray gives up starting after half a minute
def train_on_parts(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train, folder)


AHEAD = (train_on_parts,)


def assert_alike(ran: dict[str, Ran]) -> None:
    """Parts of rows trained as whole ones did."""
    whole, parts = ran["whole"], ran["parts"]
    assert "trainer 2 ranks (TP1 PP1 EP1 CP2)" in parts.said
    assert [row["weights/version"] for row in parts.rows] == list(range(STEPS))
    assert all(row["refit/bytes_verified"] > 0 for row in parts.rows)
    assert max(row["generation_kl"] for row in (*whole.rows, *parts.rows)) <= 1e-6
    # The same weights and rollouts. Later weights differ by rounding, which may send a token elsewhere.
    first, wanted = (numbers(each.rows)[0] for each in (parts, whole))
    assert first == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    rewards = [[row["reward/mean"] for row in each.rows] for each in (parts, whole)]
    assert rewards[0] == pytest.approx(rewards[1], abs=0.02)


def test_parts_of_rows_train_as_whole_rows_do(found_ahead: FoundAhead) -> None:
    assert_alike(found_ahead.by(train_on_parts))


def test_a_run_on_parts_of_rows_goes_on_bit_for_bit_from_its_checkpoint(found_ahead: FoundAhead) -> None:
    ran = found_ahead.by(train_on_parts)
    assert f"resuming after step {SAVED}" in ran["again"].said
    assert numbers(ran["again"].rows) == numbers(ran["parts"].rows)
