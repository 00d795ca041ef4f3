"""Shard to shard in verl, by verl's own manager, actors and vLLM servers, on CPUs."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.verl.on_cpus import named_vllm
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from tests.ahead import FoundAhead, keeping_time
from tests.spawn import PATIENT_S, run_alone
from tests.vllm_processes import vllm_processes
from tests.warm_python import OF_WORKERS, warm_python

TIMEOUT_S = 120.0
SECONDS = "timing_s/update_weights_"
# What the fleet's processes would load for ten seconds each.
LOADED = (
    *OF_WORKERS,
    "tests.verl_adapter.fsdp_actor",
    "tests.verl_adapter.probe",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    # Of each actor, which would load them as it builds its model.
    "verl.workers.engine",
    "transformers.models.qwen3.modeling_qwen3",
    "rlrefit.workers.frameworks.verl.engine",
)


@dataclass
class Seen:
    """What the updates left in the engines, by version and replica, and what was told of them."""

    held: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    expected: dict[int, dict[str, str]] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    # Tokens, logprobs and verl's version: by when, version and replica; "afresh" is without the caches.
    handed_over: Any = None
    answers: dict[tuple[str, int, int], Any] = field(default_factory=dict)
    error: str = ""
    seconds_to_error: float = 0.0
    # Of an update in turns: what was told, and what of the trainer's was not given back.
    error_in_turn: str = ""
    kept_after_it: list[str] = field(default_factory=list)


@keeping_time  # Ray gives a cluster half a minute to come up
def updates(folder: Path) -> Seen:
    """Thirteen updates of a fleet: one replica, two, one of them killed, the other alone, by our manager, then as one on the
    actors' GPUs."""
    checkpoint = make_checkpoint("qwen3", folder / "model")
    path = [named_vllm(folder), str(Path(__file__).resolve().parents[2])]
    own = {
        "VERL_USE_EXTERNAL_MODULES": "examples.verl.cpu_platform",
        "VERL_PLATFORM": "cpu",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",  # numbers that Ray hands out
    }
    seen = run_alone(
        _drive, folder, checkpoint, path, environment=own, timeout_s=PATIENT_S, made_by=vllm_processes
    )
    assert isinstance(seen, Seen)
    return seen


def _drive(folder: Path, checkpoint: Path, path: list[str]) -> Seen:
    sys.path[:0] = path
    env = {"PYTHONPATH": os.pathsep.join(path)}
    with warm_python(vllm_processes, LOADED) as python:
        return _update(folder, checkpoint, env, str(python))


def _update(folder: Path, checkpoint: Path, env: dict[str, str], python: str) -> Seen:
    import ray
    from verl.workers.rollout.replica import RolloutMode

    from examples.verl.on_cpus import CPU
    from rlrefit.workers.frameworks.verl.manager import RefitCheckpointManager
    from tests.verl_adapter.fleet import expected, shard_fleet

    rollout = "actor_rollout_ref.rollout"
    delta = "checkpoint_engine.engine_kwargs.nccl_xfer_shards.delta=always"
    plain = (
        *(f"{rollout}.free_cache_engine=false", f"+{rollout}.enable_sleep_mode=false"),
        f"+{rollout}.{delta}",
    )
    seen = Seen()
    with shard_fleet(folder, checkpoint, env | CPU, 2, 2, plain, python) as fleet:
        manager = fleet.manager(0)

        def update(version: int) -> None:
            ranks = [replica.replica_rank for replica in manager.replicas]
            for rank in ranks if version in (2, 10, 12) else []:
                seen.answers["before", version, rank] = fleet.generate(rank)
            seen.metrics[version] = fleet.update(manager, version)
            for rank in ranks:
                seen.held[version, rank] = fleet.held(rank)
                seen.answers["after", version, rank] = fleet.generate(rank)
                ray.get(fleet.replicas[rank].server_handle.clear_kv_cache.remote())
                seen.answers["afresh", version, rank] = fleet.generate(rank)
            seen.expected[version] = expected(checkpoint, version)

        fleet.hand_over(1, checkpoint)
        seen.handed_over = fleet.generate(1)
        # Two with all weights changed, into spoiled engines, and three of what else had changed alone.
        for version in range(1, 6):
            update(version)
        manager.add_replicas([fleet.replicas[1]])
        update(6)
        fleet.call(fleet.replicas[0], "probe_die_in_the_next_refit")
        start = time.monotonic()
        try:
            fleet.update(manager, 7)
        except Exception as error:
            seen.error = str(error)
        seen.seconds_to_error = time.monotonic() - start
        manager.remove_replicas([fleet.replicas[0]])
        update(8)
        manager = RefitCheckpointManager(manager.config, fleet.actors, manager.replicas)
        update(9)
        update(10)
        # As a replica on the actors' GPUs: the server has no sleep mode here, so its turns are all that differs.
        fleet.replicas[1].rollout_mode = RolloutMode.HYBRID
        manager = RefitCheckpointManager(manager.config, fleet.actors, manager.replicas)
        update(11)
        update(12)
        fleet.call(fleet.replicas[1], "probe_die_in_the_next_refit")
        try:
            fleet.update(manager, 13)
        except Exception as error:
            seen.error_in_turn, seen.kept_after_it = str(error), getattr(error, "__notes__", [])
        seen.sent, seen.received = fleet.records("trainer"), fleet.records("generation")
    return seen


AHEAD = (updates,)


@pytest.fixture(scope="module")
def seen(found_ahead: FoundAhead) -> Seen:
    return found_ahead.by(updates)


def test_two_changed_updates_land_in_the_live_parameters_bit_for_bit(seen: Seen) -> None:
    # With the sixth comes a replica that was added.
    for version, replica in ((1, 0), (2, 0), (6, 0), (6, 1)):
        served = {"parameters": seen.expected[version], "version": {"version": version}}
        assert seen.held[version, replica] == served
    assert [(record["version"], record["epoch"]) for record in seen.sent[:2]] == [(1, 1), (2, 1)]
    assert all(record["bytes_bulk"] == record["bytes_verified"] > 0 for record in seen.received)
    assert all(record["bytes_misc"] == 0 for record in seen.sent + seen.received)
    assert seen.metrics[12]["checkpoint_engine/epoch"] == seen.sent[-1]["epoch"]
    assert seen.metrics[12]["checkpoint_engine/payload_mbytes"] == seen.sent[-1]["bytes_bulk"] / (1 << 20)


def test_three_updates_of_what_changed_alone_leave_the_same_bytes_and_tell_how_little_travelled(
    seen: Seen,
) -> None:
    sparse = [record for record in seen.sent if record["changed_share"] is not None]
    assert [(record["version"], record["epoch"]) for record in sparse] == [(3, 1), (4, 1), (5, 1)]
    for version, record in zip((3, 4, 5), sparse, strict=True):
        assert seen.held[version, 0] == {
            "parameters": seen.expected[version],
            "version": {"version": version},
        }
        assert 0.01 < record["changed_share"] < 0.03
        assert record["bytes_wire"] < 0.1 * record["bytes_bulk"]
        assert seen.metrics[version]["checkpoint_engine/changed_share"] == record["changed_share"]
        assert seen.metrics[version]["checkpoint_engine/wire_mbytes"] == record["bytes_wire"] / (1 << 20)
    assert "checkpoint_engine/changed_share" not in seen.metrics[2]


def test_a_killed_vllm_worker_ends_the_update_and_the_rest_goes_on(seen: Seen) -> None:
    # verl raises what reaches it first: the actors' error, or that of the server whose worker has died.
    assert "PeerLost" in seen.error or "collective_rpc method failed" in seen.error
    assert seen.seconds_to_error < TIMEOUT_S
    assert seen.held[8, 1] == {"parameters": seen.expected[8], "version": {"version": 8}}
    assert [record["version"] for record in seen.sent[:7]] == [1, 2, 3, 4, 5, 6, 8]
    assert len({record["epoch"] for record in seen.sent[:7]}) == 3


@pytest.mark.parametrize(
    ("versions", "stages"),
    [
        pytest.param((9, 10), {"prepare", "abort", "refit", "drop_caches", "resume"}, id="own_gpus"),
        pytest.param((11, 12), {"prepare", "refit", "drop_caches"}, id="the_actors_gpus"),
    ],
)
def test_our_manager_reaches_the_live_parameters_over_one_group_and_tells_where_the_time_goes(
    seen: Seen, versions: tuple[int, int], stages: set[str]
) -> None:
    for version in versions:
        assert seen.held[version, 1] == {
            "parameters": seen.expected[version],
            "version": {"version": version},
        }
    sent = {record["version"]: record for record in seen.sent}
    assert sent[versions[0] - 1]["epoch"] < sent[versions[0]]["epoch"] == sent[versions[1]]["epoch"]
    # Where sleep mode is off, no memory wakes; only the first of both meets.
    first, second = (
        {name.removeprefix(SECONDS) for name in seen.metrics[version] if name.startswith(SECONDS)}
        for version in versions
    )
    assert (first, second) == (stages | {"meet"}, stages)
    told = seen.metrics[versions[1]]
    assert 0 < told["checkpoint_engine/seconds"] < told[f"{SECONDS}refit"]


def test_a_killed_worker_on_the_actors_gpus_ends_the_update_and_the_trainer_gives_its_memory_back(
    seen: Seen,
) -> None:
    assert "PeerLost" in seen.error_in_turn
    assert seen.kept_after_it == []
    assert seen.sent[-1]["version"] == 12


def test_after_each_update_engines_answer_from_its_weights_and_from_no_older_cache(seen: Seen) -> None:
    after = {at[1:]: answer for at, answer in seen.answers.items() if at[0] == "after"}
    assert after.keys() == {(version, 0) for version in range(1, 7)} | {
        (version, 1) for version in (6, 8, 9, 10, 11, 12)
    }
    for at, answer in after.items():
        assert answer == seen.answers["afresh", *at]
        assert answer[2] == at[0]
    for when, *at in seen.answers:
        if when == "before":
            _, logprobs, version = seen.answers[when, *at]
            assert version == at[0] - 1
            assert logprobs != after[tuple(at)][1]
    assert after[6, 0] == after[6, 1]
    tokens, logprobs, _ = seen.handed_over  # of a whole model, by verl
    assert len(tokens) == len(logprobs) == 1
