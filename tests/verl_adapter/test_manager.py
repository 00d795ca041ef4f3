"""What the manager asks of actors and servers, over doubles of them, and when an update fails who is waited for and told."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutMode

from rlrefit.integration.errors import PeerLost, RefitError, RefitTimeout
from rlrefit.workers.frameworks.verl.engine import ShardCheckpointEngine
from rlrefit.workers.frameworks.verl.manager import RefitCheckpointManager

NEVER = object()
LIMIT_S = 0.2
WARM = ["begin", "wake_up weights", "update_weights", "refit_as_ordered"]
UPDATE = [*WARM[:2], "init_process_group", *WARM[2:]]
ENDED = ["clear_kv_cache", "set_global_steps 7", "wake_up kv_cache"]
# Of replicas on GPUs of their own, which neither sleep nor wake.
APART = ["begin", "abort_all_requests", "init_process_group", "update_weights", "refit_as_ordered"]
RESUMED = ["clear_kv_cache", "set_global_steps 7", "resume_generation"]


class Workers:
    """Two actors and a replica's server; notes what is asked of all and answers as told."""

    world_size = 2

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.orders: list[dict[str, Any]] = []
        # By what is asked: an answer of each worker, an exception to raise, or NEVER.
        report = {"protocol": ShardCheckpointEngine.protocol, "held": None, "ready": False}
        self.answers: dict[str, list[Any]] = {
            "begin": [report | {"address": ("h", 1, 1)}, report | {"address": None}],
            "update_weights": [{"checkpoint_engine/epoch": 1.0}, {}],
            "refit": [{"checkpoint_engine/epoch": 1.0}, {}],
        }
        asked = ("wake_up", "clear_kv_cache", "set_global_steps", "collective_rpc", "abort_all_requests")
        asked += ("resume_generation",)
        handle = SimpleNamespace(**{m: SimpleNamespace(remote=partial(self._server, m)) for m in asked})
        self.replica = SimpleNamespace(
            rollout_mode=RolloutMode.HYBRID,
            config=SimpleNamespace(
                name="vllm",
                free_cache_engine=True,
                data_parallel_size=1,
                disaggregation=SimpleNamespace(enabled=False),
            ),
            world_size=1,
            replica_rank=4,
            servers=[handle],
            server_handle=handle,
        )

    def execute_checkpoint_engine(self, method: list[str], **kwargs: Any) -> list[Future[Any]]:
        assert all(len(values) == self.world_size for values in (method, *kwargs.values()))
        return self._told(method[0], self.world_size)

    def update_weights(self, global_steps: int, mode: str) -> list[Future[Any]]:
        return self._told("update_weights", self.world_size)

    def _server(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        more = {"wake_up": kwargs.get("tags"), "set_global_steps": [str(kwargs.get("global_steps"))]}
        if method == "collective_rpc":
            self.orders += kwargs["args"]
        what = args[0] if method == "collective_rpc" else " ".join([method, *more.get(method, [])])
        return self._told(what, 1)[0]

    def _told(self, what: str, size: int) -> list[Future[Any]]:
        self.asked.append(what)
        refs: list[Future[Any]] = []
        for answer in self.answers.get(what, [None] * size):
            refs.append(Future())
            if isinstance(answer, Exception):
                refs[-1].set_exception(answer)
            elif answer is not NEVER:
                refs[-1].set_result(answer)
        return refs


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def manager(workers: Workers) -> RefitCheckpointManager:
    config = CheckpointEngineConfig(
        backend="nccl_xfer_shards", engine_kwargs={"nccl_xfer_shards": {"timeout_s": 60.0}}
    )
    made = RefitCheckpointManager(config, workers, [workers.replica])
    assert made._limit_s == 150.0
    made._limit_s = LIMIT_S
    return made


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (None, "engine_kwargs: null stands for a whole section"),
        ([1], r"engine_kwargs: \[1\] stands for a whole section"),
        ({"nccl_xfer_shards": None}, "nccl_xfer_shards: null stands for a whole section"),
        ({"nccl_xfer_shards": ["verify"]}, "nccl_xfer_shards: .* stands for a whole section"),
        ({"nccl_xfer_shards": {"verify": True}}, "nccl_xfer_shards.verify: True is not a string"),
    ],
)
def test_options_that_are_none_are_told_with_all_else_that_is_wrong(
    workers: Workers, sections: Any, told: str
) -> None:
    workers.replica.config.data_parallel_size = 2
    config = CheckpointEngineConfig(
        backend="nccl_xfer_shards", engine_kwargs=sections, update_weights_bucket_megabytes=0
    )
    with pytest.raises(RefitError, match=told) as error:
        RefitCheckpointManager(config, workers, [workers.replica])
    assert str(error.value).count("whole section") == told.count("whole section")
    assert "update_weights_bucket_megabytes leaves no room" in str(error.value)
    assert "data_parallel_size is above 1" in str(error.value)


def test_an_update_gives_the_trainers_memory_back_before_the_kv_cache_wakes_and_after_a_failed_one_too(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    found = manager.update_weights(7)
    assert found.pop("checkpoint_engine/epoch") == 1.0
    stages = ("prepare", "wake_weights", "meet", "refit", "drop_caches", "wake_kv_cache")
    assert found.keys() == {f"timing_s/update_weights_{stage}" for stage in stages}
    assert all(0 <= seconds < 60 for seconds in found.values())
    assert workers.asked == UPDATE + ENDED
    workers.asked.clear()
    fine = workers.answers["update_weights"]
    workers.answers["update_weights"] = [PeerLost("rank 2 has gone"), PeerLost("rank 2 has gone")]
    with pytest.raises(PeerLost) as error:
        manager.update_weights(7)
    assert workers.asked == [*UPDATE, "release"]
    assert not hasattr(error.value, "__notes__")
    workers.asked.clear()
    workers.answers["update_weights"] = fine
    manager.update_weights(7)  # which meets anew
    assert workers.asked == UPDATE + ENDED


@pytest.mark.parametrize(
    ("mode", "awake"), [(RolloutMode.STANDALONE, True), (RolloutMode.HYBRID, False)], ids=["apart", "shared"]
)
def test_an_engine_hears_whether_it_keeps_its_memory_between_updates(
    workers: Workers, manager: RefitCheckpointManager, mode: RolloutMode, awake: bool
) -> None:
    workers.replica.rollout_mode = mode
    manager.update_weights(7)
    assert [order["stays_awake"] for order in workers.orders] == [awake]


def test_workers_that_still_hold_the_last_epoch_do_not_meet_again(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    manager.update_weights(7)
    name = manager._held[0]
    for rank, report in enumerate(workers.answers["begin"]):
        report["held"] = name, rank
    workers.asked.clear()
    manager.update_weights(7)
    assert workers.asked == WARM + ENDED
    # Nor does verl's update prepare an export, where it has nothing else to do either.
    for report in workers.answers["begin"]:
        report["ready"] = True
    workers.asked.clear()
    assert manager.update_weights(7)["checkpoint_engine/epoch"] == 1.0
    assert workers.asked == [WARM[0], WARM[1], "refit", WARM[3], *ENDED]
    # One of them has been restarted.
    workers.answers["begin"][1]["held"] = None
    workers.asked.clear()
    manager.update_weights(7)
    assert workers.asked == UPDATE + ENDED


def test_replicas_on_gpus_of_their_own_hold_requests_until_the_caches_are_dropped_and_no_memory_sleeps(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    workers.replica.rollout_mode = RolloutMode.STANDALONE
    found = manager.update_weights(7)
    stages = ("prepare", "abort", "meet", "refit", "drop_caches", "resume")
    assert {name for name in found if name.startswith("timing_s")} == {
        f"timing_s/update_weights_{stage}" for stage in stages
    }
    assert workers.asked == APART + RESUMED
    # Held on after a failure, until an update has succeeded.
    workers.asked.clear()
    workers.answers["update_weights"], fine = [PeerLost("gone")] * 2, workers.answers["update_weights"]
    with pytest.raises(PeerLost):
        manager.update_weights(7)
    assert workers.asked == [*APART, "release"]
    workers.asked.clear()
    workers.answers["update_weights"] = fine
    manager.update_weights(7)
    assert workers.asked == APART + RESUMED


@dataclass(frozen=True)
class Failure:
    """What workers answer, what is told of it and in its notes, and what they were asked."""

    answers: dict[str, list[Any]]
    error: type[Exception]
    told: str
    asked: list[str]
    notes: tuple[str, ...] = ()


KEPT = "the trainer's memory was not given back"
FAILURES = {
    "a server does not wake": Failure(
        {"wake_up weights": [NEVER]},
        RefitTimeout,
        "replica 4 did not answer wake_weights",
        [*UPDATE[:3], "release"],
    ),
    "a server does not refit": Failure(
        {"refit_as_ordered": [NEVER]},
        RefitTimeout,
        "replica 4 did not answer refit",
        [*UPDATE, "release"],
    ),
    # It is not waited for again.
    "an actor does not answer": Failure(
        {"update_weights": [RefitError("rank 1 is late"), NEVER]},
        RefitTimeout,
        "actor rank 1 did not answer refit",
        UPDATE,
        ("rank 1 is late", KEPT),
    ),
    "an actor has ended": Failure(
        {"update_weights": [{}, RayActorError()]}, RayActorError, "", UPDATE, (KEPT,)
    ),
    "one error after another": Failure(
        {"update_weights": [{}, RefitError("the first")], "release": [None, RuntimeError("the second")]},
        RefitError,
        "the first",
        [*UPDATE, "release"],
        ("the second",),
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_who_fails_first_is_named_in_time_and_the_trainers_memory_given_back_where_all_answer(
    workers: Workers, manager: RefitCheckpointManager, case: str
) -> None:
    failure = FAILURES[case]
    workers.answers |= failure.answers
    with pytest.raises(failure.error, match=failure.told) as error:
        manager.update_weights(7)
    assert workers.asked == failure.asked
    for note, told in zip(getattr(error.value, "__notes__", ()), failure.notes, strict=True):
        assert told in note


def test_engines_that_validation_wakes_have_the_version_of_the_update_before(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    for step in (7, None):
        manager.update_weights(step)
        assert workers.asked == UPDATE + ENDED  # which tell the servers step 7
        workers.asked.clear()


def test_replicas_that_verl_updates_itself_have_the_version_of_the_update_before_too(
    workers: Workers, manager: RefitCheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.replica.rollout_mode = RolloutMode.STANDALONE
    workers.replica.config.data_parallel_size = 2
    told = []

    async def by_verl(self: CheckpointEngineManager, global_steps: int | None = None) -> dict[str, float]:
        told.append(global_steps)
        return {}

    monkeypatch.setattr(CheckpointEngineManager, "update_weights", by_verl)
    for step in (7, None):
        manager.update_weights(step)
    assert told == [7, 7]
