"""A run of a recipe whose policy trains for a vLLM that holds its weights in NVFP4."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.ahead import FoundAhead, keeping_time

from .shared_cluster import on_shared_cluster
from .test_fsdp_runs import Ran, run

SAVED, STEPS = 2, 3
QAT = (
    *(
        "policy.qat=w4a4",
        "generation.vllm.enforce_eager=true",
        "validation.every=0",
        "trainer.optimizer.lr=0.01",
    ),
    *(f"checkpoint.every={SAVED}", "checkpoint.keep=3", "policy.refit.verify=full"),
)


def _train_for_nvfp4(folder: Path, ray_address: str) -> dict[str, Ran]:
    """A run up to its checkpoint, and what goes on from there."""
    ran = {}
    for name, more in (
        ("first", (f"algorithm.steps={SAVED}",)),
        ("resumed", (f"algorithm.steps={STEPS}", "resume=true")),
    ):
        if ran:
            shutil.copytree(folder / "first", folder / name)
        ran[name] = run("grpo_tiny_vllm", folder / name, ray_address, *QAT, *more)
    return ran


@keeping_time
def train_for_nvfp4(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_for_nvfp4, folder)


AHEAD = (train_for_nvfp4,)
pytestmark = pytest.mark.timeout(600)  # the first test to ask waits for the engine's start, twice


def test_the_engine_generates_with_the_packed_weights_that_the_policy_trains_with(
    found_ahead: FoundAhead,
) -> None:
    rows = found_ahead.by(train_for_nvfp4)["first"].rows
    assert [row["weights/version"] for row in rows] == list(range(SAVED))
    # The engine began with random weights. Both round inputs to four bits, of sums that differ in their last bits.
    assert max(row["generation_kl"] for row in rows) < 0.05
    # Most weights travel in four bits and a half.
    assert rows[-1]["refit/bytes_misc"] > rows[-1]["refit/bytes_bulk"]


def test_scales_of_inputs_are_in_the_checkpoint_and_a_run_goes_on_with_them(found_ahead: FoundAhead) -> None:
    ran = found_ahead.by(train_for_nvfp4)["resumed"]
    assert f"resuming after step {SAVED}" in ran.said
    assert [row["step"] for row in ran.rows] == list(range(1, STEPS + 1))
    assert ran.rows[-1]["generation_kl"] < 0.05
