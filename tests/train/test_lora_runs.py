"""Runs of the recipes that train LoRA: merged on its way to the engine, and the adapter alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.ahead import FoundAhead, Work, keeping_time, of_all_tests

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


def _trained(folder: Path, ray_address: str, trainer: str, name: str, *overrides: str) -> Ran:
    return run("grpo_tiny", folder / name, ray_address, *LORA, *overrides, trainer=trainer)


def _train_alone(folder: Path, ray_address: str, trainer: str) -> dict[str, Ran]:
    """A run with the adapter alone in BF16, and what goes on from its first checkpoint."""
    alone = (*ALONE, "model.dtype=bfloat16")
    ran = {"alone": _trained(folder, ray_address, trainer, "alone", *alone)}
    shutil.copytree(folder / "alone", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "grpo_tiny" / "checkpoints" / f"step_{STEPS:06d}")
    return ran | {"resumed": _trained(folder, ray_address, trainer, "resumed", *alone, "resume=true")}


def _train_merged(folder: Path, ray_address: str, trainer: str) -> dict[str, Ran]:
    return {"merged": _trained(folder, ray_address, trainer, "merged")}


@keeping_time
def train_by_peft(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_alone, folder, "fsdp")


# Ranks of FSDP2 send merged weights after steps in tests/lora.
@of_all_tests
@keeping_time
def train_merged_by_peft(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_merged, folder, "fsdp")


# Its policies train with adapters in tests/megatron_policy, and send them in tests/lora.
@of_all_tests
@keeping_time
def train_by_bridge(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_alone, folder, "megatron")


@of_all_tests
@keeping_time
def train_merged_by_bridge(folder: Path) -> dict[str, Ran]:
    return on_shared_cluster(_train_merged, folder, "megatron")


AHEAD = (train_by_peft, train_merged_by_peft, train_by_bridge, train_merged_by_bridge)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(train_by_peft, id="fsdp"),
        pytest.param(train_by_bridge, id="megatron", marks=pytest.mark.full),
    ],
)
def ran(request: pytest.FixtureRequest, found_ahead: FoundAhead) -> dict[str, Ran]:
    return found_ahead.by(request.param)


def _assert_follows(rows: list[dict[str, Any]], largest_kl: float) -> None:
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    assert max(row["generation_kl"] for row in rows) < largest_kl
    assert rows[0]["train/ref_kl"] < 1e-6 < 1e-4 < rows[-1]["train/ref_kl"]


def test_the_engine_follows_the_adapter_alone_and_the_reference_policy_is_the_model_without_it(
    ran: dict[str, Ran],
) -> None:
    _assert_follows(ran["alone"].rows, 1e-2)


@pytest.mark.full
@pytest.mark.parametrize("work", [train_merged_by_peft, train_merged_by_bridge], ids=["fsdp", "megatron"])
def test_the_engine_follows_the_merged_adapter_and_the_reference_policy_is_the_model_without_it(
    work: Work, found_ahead: FoundAhead
) -> None:
    ran = found_ahead.by(work)["merged"]
    _assert_follows(ran.rows, 1e-6)
    assert ran.rows[-1]["refit/bytes_bulk"] >= _bytes_of_the_model(ran)


def test_the_adapter_alone_is_a_small_part_of_the_weights(ran: dict[str, Ran]) -> None:
    assert 0 < ran["alone"].rows[-1]["refit/bytes_bulk"] < 0.05 * _bytes_of_the_model(ran["alone"])


def test_a_checkpoint_has_the_adapter_alone_and_a_run_goes_on_from_it(ran: dict[str, Ran]) -> None:
    assert f"resuming after step {SAVED}" in ran["resumed"].said
    assert numbers(ran["resumed"].rows) == numbers(ran["alone"].rows)
    saved = ran["alone"].folder / "checkpoints" / f"step_{SAVED:06d}"
    files = [*saved.rglob("*.distcp"), *saved.rglob("rank_*.pt")]
    assert 0 < sum(file.stat().st_size for file in files) < 0.5 * _bytes_of_the_model(ran["alone"])


def _bytes_of_the_model(ran: Ran) -> int:
    """Of all weights in FP32, as a run without a dtype has them on CPUs."""
    [file] = (ran.folder.parent / "models").glob("*/model.safetensors")
    return sum(4 * tensor.numel() for tensor in load_file(file).values())
