"""Updates by verl's own CheckpointEngineManager on Ray, with the backend ``nccl_xfer``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from rlrefit.integration.errors import RefitError
from tests.odd_weights import SPECS
from tests.ray_cluster import warm_cluster
from tests.spawn import free_port
from tests.verl_adapter.workers import Actor, Replica, RolloutWorker

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30.0
LOADED = ("tests.verl_adapter.workers", "rlrefit.workers.frameworks.verl.full_tensors")


@dataclass(frozen=True)
class Fleet:
    """Two actors, and three replicas of one worker each."""

    config: CheckpointEngineConfig
    actors: RayWorkerGroup
    replicas: list[Replica]
    records_dir: Path

    def manager(self, *replicas: int) -> CheckpointEngineManager:
        return CheckpointEngineManager(self.config, self.actors, [self.replicas[i] for i in replicas])

    def update(self, manager: CheckpointEngineManager, version: int) -> dict[str, float]:
        """Change all weights, and update by ``manager``."""
        self.actors.train(version)
        return manager.update_weights(version)

    def wrong(self, replica: int, version: int) -> list[str]:
        return self.ask(replica, "wrong", version)

    def ask(self, replica: int, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.replicas[replica].workers[0], method).remote(*args), timeout=60)

    def records(self, role: str) -> list[dict[str, Any]]:
        """Of rank 0 of a role, in order."""
        lines = (self.records_dir / f"refits-{role}-0.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    records_dir = tmp_path_factory.mktemp("records")
    config = CheckpointEngineConfig(
        backend="nccl_xfer",
        update_weights_bucket_megabytes=1,
        custom_backend_module="rlrefit.workers.frameworks.verl.full_tensors",
        engine_kwargs={
            "nccl_xfer": {"timeout_s": TIMEOUT_S, "verify": "full", "records_dir": str(records_dir)}
        },
    )
    rollout = RolloutConfig(name="vllm", checkpoint_engine=config, tensor_model_parallel_size=1)
    with warm_cluster(LOADED, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, num_cpus=5):
        actor, worker = ray.remote(num_cpus=1)(Actor), ray.remote(num_cpus=1)(RolloutWorker)
        port = free_port()
        handles = [actor.remote(config, place(rank, 2, port)) for rank in range(2)]
        workers = [worker.remote(rollout, place(0, 1, free_port())) for _ in range(3)]
        actors = RayWorkerGroup(worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls=actor))
        replicas = [Replica(rank, rollout, worker) for rank, worker in enumerate(workers)]
        yield Fleet(config, actors, replicas, records_dir)


def place(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment that verl gives to a worker."""
    env = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in env.items()}


def test_two_changed_updates_arrive_bit_for_bit_over_one_group(fleet: Fleet) -> None:
    manager = fleet.manager(0, 1)
    for version in (1, 2):
        metrics = fleet.update(manager, version)
        assert [fleet.wrong(replica, version) for replica in (0, 1)] == [[], []]
        assert [fleet.ask(replica, "version") for replica in (0, 1)] == [version, version]
    sent, received = fleet.records("trainer"), fleet.records("generation")
    assert [(record["version"], record["epoch"]) for record in sent] == [(1, 1), (2, 1)]
    assert all(record["bytes_misc"] == record["bytes_verified"] > 4 << 20 for record in received)
    assert metrics["checkpoint_engine/payload_mbytes"] == sent[-1]["bytes_misc"] / (1 << 20)
    assert fleet.replicas[0].asked == ["abort", "release", "restore", "resume"] * 2


def test_adding_and_removing_a_replica_starts_a_new_epoch(fleet: Fleet) -> None:
    manager = fleet.manager(0, 1)
    manager.add_replicas([fleet.replicas[2]])
    fleet.update(manager, 3)
    assert [fleet.wrong(replica, 3) for replica in (0, 1, 2)] == [[], [], []]
    manager.remove_replicas([fleet.replicas[0]])
    fleet.update(manager, 4)
    assert [fleet.wrong(replica, 4) for replica in (1, 2)] == [[], []]
    assert fleet.wrong(0, 4) == list(SPECS)  # it got nothing more
    manager.remove_replicas([fleet.replicas[2]])  # the last ones: those that stay hold their old ranks
    fleet.update(manager, 5)
    assert fleet.wrong(1, 5) == []
    epochs = [record["epoch"] for record in fleet.records("trainer")][-3:]
    assert len(set(epochs)) == 3


def test_a_rollout_worker_killed_in_an_update_ends_it_and_the_rest_goes_on(fleet: Fleet) -> None:
    manager = fleet.manager(1, 2)
    fleet.update(manager, 6)
    asked = len(fleet.replicas[2].asked)
    exported = fleet.actors.exported()
    fleet.ask(1, "die_at", "model.layers.0.self_attn.q_proj.weight")
    start = time.monotonic()
    with pytest.raises((RayActorError, RayTaskError)):
        fleet.update(manager, 7)
    # The actors answer again once their export is over: none of them waits for the other in it.
    assert fleet.actors.exported() == [count + len(SPECS) for count in exported]
    assert time.monotonic() - start < TIMEOUT_S
    assert fleet.ask(2, "version") == 6
    assert fleet.replicas[2].asked[asked:] == ["abort", "release"]  # it does not generate

    manager.remove_replicas([fleet.replicas[1]])
    fleet.update(manager, 8)
    assert fleet.wrong(2, 8) == []
    assert fleet.ask(2, "version") == 8


def test_actors_whose_adapter_no_engine_would_get_say_so_and_update_nothing(fleet: Fleet) -> None:
    manager = fleet.manager(2)
    fleet.actors.adapt(merge=False)
    start = time.monotonic()
    with pytest.raises(RefitError, match=r"lora\.merge=true"):
        fleet.update(manager, 9)
    assert time.monotonic() - start < TIMEOUT_S
    assert fleet.wrong(2, 9) == list(SPECS)
    assert fleet.ask(2, "version") == 8
    fleet.actors.adapt(merge=True)
    fleet.update(manager, 10)
    assert fleet.wrong(2, 10) == []
