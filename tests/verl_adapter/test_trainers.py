"""verl's own ``main_ppo`` on CPUs, with a trainer that shares its GPU with the engine: steps of GRPO, shard to shard."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from examples.verl.on_cpus import CPU, PLATFORM, named_vllm
from tests.ahead import FoundAhead, Work, keeping_time, of_all_tests
from tests.ray_cluster import patient_ray
from tests.spawn import PATIENT_S, run_alone
from tests.verl_adapter.test_shards import LOADED
from tests.vllm_processes import vllm_processes
from tests.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "verl"
TRAINERS = "rlrefit.workers.frameworks.verl.trainers"
STEPS = 2
UPDATE = "timing_s/update_weights"
OF_TWO_STEPS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=-1",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl_xfer_shards.verify=full",
)
SMALL = (
    *OF_TWO_STEPS,
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=tests.verl_adapter.probe.ShardProbe",
)


@dataclass(frozen=True)
class Run:
    """What verl logged by step, and the records of both sides."""

    logged: list[dict[str, Any]]
    sent: list[dict[str, Any]]
    received: list[dict[str, Any]]


@keeping_time  # Ray gives a cluster half a minute to come up
def train_sync(folder: Path) -> Run:
    """By verl's ``sync``."""
    return _grpo(folder, "rlrefit_sync")


# It differs in when verl generates: before the update that its steps end with.
@of_all_tests
@keeping_time
def train_colocate_async(folder: Path) -> Run:
    """By verl's ``colocate_async``."""
    return _grpo(folder, "rlrefit_colocate_async")


# By verl's keys alone, beside engines on GPUs of their own. verl starts it by another script.
@of_all_tests
@keeping_time
def train_one_step_off_policy(folder: Path) -> Run:
    """By verl's ``one_step_off_policy``."""
    return _grpo(folder, "one_step_off_policy")


def _grpo(folder: Path, way: str) -> Run:
    """Two steps by the example's configuration."""
    path = [named_vllm(folder), str(ROOT), str(EXAMPLES)]
    metrics = folder / "metrics.jsonl"
    own = {
        **CPU,
        "VERL_USE_EXTERNAL_MODULES": f"{PLATFORM},{TRAINERS}",
        "CUDA_VISIBLE_DEVICES": "0,1",  # numbers that Ray hands out
        "RLREFIT_VERL_DATA": str(folder),
        "RLREFIT_VERL_EXAMPLES": str(EXAMPLES),
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": ":".join(path),
    }
    run_alone(_drive, folder, way, path, environment=own, timeout_s=PATIENT_S, made_by=vllm_processes)

    def lines(file: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in file.read_text().splitlines()]

    refits = folder / "refits"
    return Run(
        lines(metrics), lines(refits / "refits-trainer-0.jsonl"), lines(refits / "refits-generation-0.jsonl")
    )


def _drive(folder: Path, way: str, path: Sequence[str]) -> None:
    sys.path[:0] = path
    import ray
    import verl
    from hydra import compose, initialize_config_dir
    from verl.experimental.one_step_off_policy.main_ppo import OneStepTaskRunner
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    example = import_module("compare")
    import_module("arithmetic").write(folder)
    with (
        patient_ray(),
        warm_python(vllm_processes, LOADED) as python,
        initialize_config_dir(str(EXAMPLES), version_base=None),
    ):
        config = compose(
            "grpo_arithmetic",
            [
                f"hydra.searchpath=[file://{Path(verl.__file__).parent}/trainer/config]",
                *example.WAYS[way],
                *example._ON_CPUS,
                f"+ray_kwargs.ray_init.runtime_env.py_executable={python}",
                *SMALL,
            ],
        )
        try:
            run_ppo(config, TaskRunnerV1 if config.trainer.use_v1 else OneStepTaskRunner)
        finally:
            ray.shutdown()


AHEAD = (train_sync, train_colocate_async, train_one_step_off_policy)


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(train_sync, id="sync"),
        pytest.param(train_colocate_async, id="colocate_async", marks=pytest.mark.full),
        pytest.param(train_one_step_off_policy, id="one_step_off_policy", marks=pytest.mark.full),
    ],
)
def test_a_trainer_of_verls_updates_the_engine_shard_to_shard_at_each_step(
    found_ahead: FoundAhead, train: Work
) -> None:
    run = found_ahead.by(train)
    assert [line["step"] for line in run.logged if UPDATE in line["data"]] == [1, 2]
    for records in (run.sent, run.received):
        # Before the first step, and at the end of each.
        assert [record["version"] for record in records] == list(range(STEPS + 1))
        assert len({record["epoch"] for record in records}) == 1
        assert all(record["bytes_bulk"] > 0 == record["bytes_misc"] for record in records)
    assert all(record["bytes_bulk"] == record["bytes_verified"] for record in run.received)


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(train_sync, id="sync"),
        pytest.param(train_colocate_async, id="colocate_async", marks=pytest.mark.full),
    ],
)
def test_a_default_trainer_by_another_name_tells_where_the_time_went_and_how_far_the_engine_is_off(
    found_ahead: FoundAhead, train: Work
) -> None:
    for line in found_ahead.by(train).logged:
        # The engine's log-probabilities beside the actor's, in BF16.
        assert line["data"]["training/rollout_probs_diff_mean"] < 0.01
        stages = [line["data"][f"timing_s/update_weights_{stage}"] for stage in ("refit", "drop_caches")]
        assert 0 < line["data"]["checkpoint_engine/seconds"] < sum(stages) < line["data"][UPDATE]
