"""Runs of the recipes that train LoRA: merged on its way to the engine, and the adapter alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.ahead import FoundAhead, keeping_time, of_all_tests

from .command import numbers
from .shared_cluster import on_shared_cluster
from .test_fsdp_runs import Ran, run

SAVED, STEPS = 2, 4
LORA = (
    *("trainer.lora.rank=4", "trainer.lora.alpha=32", "trainer.optimizer.lr=0.01"),
    *("algorithm.kl_coef=0.01", "algorithm.minibatches=1", "algorithm.prompts_per_step=8"),
    *(f"algorithm.steps={STEPS}", f"checkpoint.every={SAVED}", "checkpoint.keep=3"),
)
ALONE = ("policy.refit.lora=adapter", "generation.tensor_parallel=1")


def _train_adapters(folder: Path, ray_address: str, trainer: str) -> dict[str, Ran]:
    """A run with merged weights, one with the adapter alone in BF16, and what goes on from that one's first checkpoint."""
    alone = (*LORA, *ALONE, "model.dtype=bfloat16")

    def trained(name: str, *overrides: str) -> Ran:
        return run("grpo_tiny", folder / name, ray_address, *overrides, trainer=trainer)

    ran = {"merged": trained("merged", *LORA), "alone": trained("alone", *alone)}
    shutil.copytree(folder / "alone", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "grpo_tiny" / "checkpoints" / f"step_{STEPS:06d}")
    ran["resumed"] = trained("resumed", *alone, "resume=true")
    return ran


@keeping_time
def train_by_peft(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_adapters, folder, "fsdp")


# Its policies train with adapters in tests/megatron_policy, and send them in tests/lora.
@of_all_tests
@keeping_time
def train_by_bridge(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_adapters, folder, "megatron")


AHEAD = (train_by_peft, train_by_bridge)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(train_by_peft, id="fsdp"),
        pytest.param(train_by_bridge, id="megatron", marks=pytest.mark.full),
    ],
)
def ran(request: pytest.FixtureRequest, found_ahead: FoundAhead) -> dict[str, Ran]:
    return found_ahead.by(request.param)


@pytest.mark.parametrize(("name", "largest_kl"), [("merged", 1e-6), ("alone", 1e-2)])
def test_the_engine_follows_the_adapter_and_the_reference_policy_is_the_model_without_it(
    name: str, largest_kl: float, ran: dict[str, Ran]
) -> None:
    rows = ran[name].rows
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert max(row["generation_kl"] for row in rows) < largest_kl
    assert rows[0]["train/ref_kl"] < 1e-6 < 1e-4 < rows[-1]["train/ref_kl"]


def test_the_adapter_alone_is_a_small_part_of_the_weights(ran: dict[str, Ran]) -> None:
    merged, alone = (ran[name].rows[-1]["refit/bytes_bulk"] for name in ("merged", "alone"))
    assert 0 < alone < 0.05 * merged


def test_a_checkpoint_has_the_adapter_alone_and_a_run_goes_on_from_it(ran: dict[str, Ran]) -> None:
    assert f"resuming after step {SAVED}" in ran["resumed"].said
    assert numbers(ran["resumed"].rows) == numbers(ran["alone"].rows)
    saved = ran["alone"].folder / "checkpoints" / f"step_{SAVED:06d}"
    files = [*saved.rglob("*.distcp"), *saved.rglob("rank_*.pt")]
    assert 0 < sum(file.stat().st_size for file in files) < 0.5 * ran["merged"].rows[-1]["refit/bytes_bulk"]
