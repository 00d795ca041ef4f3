"""Runs of a recipe whose policy trains for a vLLM that holds its weights in NVFP4, under FSDP2 and Megatron."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlrefit.recipes.refits import Refits
from tests.ahead import FoundAhead, Work, keeping_time, of_all_tests
from tests.qat.vllm_side import ENVIRONMENT, digests_of, loaded_digests
from tests.spawn import run_alone
from tests.vllm_processes import vllm_processes
from tests.warm_python import ENGINE, warm_python

from .shared_cluster import on_shared_cluster
from .test_fsdp_runs import Ran, run

STEPS = 2
# The version of the second refit, behind the first step: other weights, and other scales of inputs.
SECOND = 1
QAT = (
    "policy.qat=w4a4",
    "policy.refit.verify=full",
    f"algorithm.steps={STEPS}",
    "trainer.optimizer.lr=0.01",
    "generation.vllm.enforce_eager=true",
    "validation.every=0",
    "checkpoint.every=0",
    # Or it would take no function to its workers.
    "ray.generation_env.VLLM_ALLOW_INSECURE_SERIALIZATION='1'",
)
HELD, WRITTEN = "held.json", "written"


@dataclass(frozen=True)
class Trained:
    """A run, and digests of parameters: the engine's after the second refit, and vLLM's own of that version's checkpoint."""

    ran: Ran
    held: dict[str, str]
    loaded: dict[str, str]


class CheckedRefits(Refits):
    """Notes what the engine holds after the second refit, and has the trainer write that version as a checkpoint."""

    def run(self, version: int) -> Any:
        summary = super().run(version)
        if version == SECOND:
            (engine,) = self._engines._group.actors
            [held] = ray.get(engine.__ray_call__.remote(_held))
            self._records.with_name(HELD).write_text(json.dumps(held))
            folder = str(self._records.with_name(WRITTEN))
            ray.get([rank.__ray_call__.remote(_write, folder) for rank in self._trainers._group.actors])
        return summary


def _held(actor: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = actor._llm.apply_model(digests_of)
    return found


def _write(actor: Any, folder: str) -> None:
    from rlrefit.workers.trainers.fsdp.source import FSDPSource
    from rlrefit.workers.trainers.megatron.source import MegatronSource
    from rlrefit.workers.trainers.qat.checkpoint import write_checkpoint

    policy = actor._policy
    chunks = isinstance(policy.model, list)
    source = (
        MegatronSource(policy.bridge, policy.model) if chunks else FSDPSource(policy.model, torch.bfloat16)
    )
    write_checkpoint(folder, policy.config.model_path, source, policy.qat)


def _train(folder: Path, ray_address: str, trainer: str) -> Ran:
    with warm_python(vllm_processes, ENGINE) as python:
        warm = f"ray.generation_env.WARM_PYTHON={python.with_name('socket')}"
        return run(
            "grpo_tiny_vllm",
            folder,
            ray_address,
            *QAT,
            warm,
            trainer=trainer,
            refits=CheckedRefits,
        )


def _trained(folder: Path, trainer: str) -> Trained:
    return with_what_vllm_loads(on_shared_cluster(_train, folder, trainer))


def with_what_vllm_loads(ran: Ran) -> Trained:
    """A run with :class:`CheckedRefits`, and what vLLM makes of the checkpoint that it wrote."""
    written, held = str(ran.folder / WRITTEN), json.loads((ran.folder / HELD).read_text())
    loaded = run_alone(loaded_digests, written, environment=ENVIRONMENT, made_by=vllm_processes)
    return Trained(ran, held, loaded)


@keeping_time
def train_fsdp_for_nvfp4(folder: Path) -> Trained:
    """Over two ranks."""
    return _trained(folder, "fsdp")


# Its ranks train, send and write checkpoints in tests/qat, and train for a vLLM in test_train.
@of_all_tests
@keeping_time
def train_megatron_for_nvfp4(folder: Path) -> Trained:
    """In TP2."""
    return _trained(folder, "megatron")


AHEAD = (train_fsdp_for_nvfp4, train_megatron_for_nvfp4)
pytestmark = pytest.mark.parametrize(
    "train",
    [
        pytest.param(train_fsdp_for_nvfp4, id="fsdp"),
        pytest.param(train_megatron_for_nvfp4, id="megatron", marks=pytest.mark.full),
    ],
)


def test_the_engine_holds_bit_for_bit_what_vllm_loads_from_the_policys_checkpoint(
    found_ahead: FoundAhead, train: Work
) -> None:
    found = found_ahead.by(train)
    assert any(name.endswith(("input_scale", "weight_scale")) for name in found.loaded)
    assert found.held == found.loaded


def test_the_engine_generates_with_the_packed_weights_that_the_policy_trains_with(
    found_ahead: FoundAhead, train: Work
) -> None:
    rows = found_ahead.by(train).ran.rows
    assert [row["weights/version"] for row in rows] == list(range(STEPS))
    # The engine began with random weights. Both round inputs to four bits, of sums that differ in their last bits: 5e-4 was the
    # most that was seen.
    assert max(row["generation_kl"] for row in rows) < 5e-3
    # All that is packed lands in place.
    assert rows[-1]["refit/bytes_misc"] == 0
