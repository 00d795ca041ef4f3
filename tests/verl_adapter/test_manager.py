"""The manager for shared GPUs when an update fails, over doubles of the workers: who is waited for, told and given back."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutMode

from rlrefit.integration.errors import PeerLost, RefitError, RefitTimeout
from rlrefit.workers.frameworks.verl import manager as manager_module
from rlrefit.workers.frameworks.verl.engine import ShardCheckpointEngine
from rlrefit.workers.frameworks.verl.manager import RefitCheckpointManager

NEVER = object()
UPDATE = ["prepare", "wake_up weights", "init_process_group", "update_weights", "refit_as_ordered"]
ENDED = ["finalize", "release", "clear_kv_cache", "set_global_steps 7", "wake_up kv_cache"]


class Workers:
    """Two actors and a replica's server; notes what is asked of all and answers as told."""

    world_size = 2

    def __init__(self) -> None:
        self.asked: list[str] = []
        # By what is asked: an answer of each worker, an exception to raise, or NEVER.
        self.answers: dict[str, list[Any]] = {
            "prepare": [
                {"protocol": ShardCheckpointEngine.protocol, "held": None, "address": ("h", 1, 1)},
                {"protocol": ShardCheckpointEngine.protocol, "held": None, "address": None},
            ],
            "update_weights": [{"checkpoint_engine/epoch": 1.0}, {}],
        }
        handle = SimpleNamespace(
            **{
                method: SimpleNamespace(remote=self._server(method))
                for method in ("wake_up", "clear_kv_cache", "set_global_steps", "collective_rpc")
            }
        )
        self.replica = SimpleNamespace(
            rollout_mode=RolloutMode.HYBRID,
            config=SimpleNamespace(free_cache_engine=True, data_parallel_size=1),
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

    def _server(self, method: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Future[Any]:
            more = {"wake_up": kwargs.get("tags"), "set_global_steps": [str(kwargs.get("global_steps"))]}
            what = args[0] if method == "collective_rpc" else " ".join([method, *more.get(method, [])])
            return self._told(what, 1)[0]

        return remote

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


def _wait(refs: Sequence[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    assert num_returns == len(refs)
    over = wait(refs, timeout).done
    return [ref for ref in refs if ref in over], [ref for ref in refs if ref not in over]


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def manager(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> RefitCheckpointManager:
    monkeypatch.setattr(manager_module, "ray", SimpleNamespace(wait=_wait, get=Future.result))
    config = CheckpointEngineConfig(
        backend="nccl_xfer_shards", engine_kwargs={"nccl_xfer_shards": {"timeout_s": 60.0}}
    )
    made = RefitCheckpointManager(config, workers, [workers.replica])
    assert made._limit_s == 150.0
    made._limit_s = 0.2
    return made


SECTIONS = "checkpoint_engine.engine_kwargs"


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (None, f"{SECTIONS}: null stands for a whole section; give its keys, {SECTIONS}.KEY"),
        ([1], rf"{SECTIONS}: \[1\] stands for a whole section"),
        ({"nccl_xfer_shards": None}, f"{SECTIONS}.nccl_xfer_shards: null stands for a whole section"),
        (
            {"nccl_xfer_shards": ["verify"]},
            rf"{SECTIONS}.nccl_xfer_shards: \['verify'\] stands for a whole section",
        ),
        ({"nccl_xfer_shards": {"verify": True}}, f"{SECTIONS}.nccl_xfer_shards.verify: True is not a string"),
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


def test_an_update_gives_the_trainers_memory_back_before_the_kv_cache_wakes(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    assert manager.update_weights(7) == {"checkpoint_engine/epoch": 1.0}
    assert workers.asked == UPDATE + ENDED


def test_a_failed_update_gives_the_trainers_memory_back_and_the_next_one_meets_anew(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    fine = workers.answers["update_weights"]
    workers.answers["update_weights"] = [PeerLost("rank 2 has gone"), PeerLost("rank 2 has gone")]
    with pytest.raises(PeerLost, match="rank 2 has gone") as error:
        manager.update_weights(7)
    assert workers.asked == [*UPDATE, "release"]
    assert not hasattr(error.value, "__notes__")
    workers.asked.clear()
    workers.answers["update_weights"] = fine
    manager.update_weights(7)
    assert workers.asked == UPDATE + ENDED


@pytest.mark.parametrize(
    ("what", "answers", "named", "asked"),
    [
        ("wake_up weights", [NEVER], "the server of replica 4 did not answer wake_up", UPDATE[:2]),
        ("refit_as_ordered", [NEVER], "the server of replica 4 did not answer update_weights", UPDATE),
    ],
)
def test_a_server_that_does_not_answer_is_named_in_time_and_the_trainers_memory_given_back(
    workers: Workers,
    manager: RefitCheckpointManager,
    what: str,
    answers: list[Any],
    named: str,
    asked: list[str],
) -> None:
    workers.answers[what] = answers
    with pytest.raises(RefitTimeout, match=named):
        manager.update_weights(7)
    assert workers.asked == [*asked, "release"]


def test_an_actor_that_does_not_answer_is_named_with_what_the_others_tell_and_is_not_waited_for_again(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    workers.answers["update_weights"] = [RefitError("rank 1 is late"), NEVER]
    with pytest.raises(RefitTimeout, match="actor rank 1 did not answer update_weights within") as error:
        manager.update_weights(7)
    assert workers.asked == UPDATE
    assert error.value.__notes__ == [
        "Another one answered: rank 1 is late",
        "the trainer's memory was not given back: not all actors are there and answer",
    ]


def test_what_fails_after_the_first_error_is_a_note_of_it(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    workers.answers["update_weights"] = [{}, RefitError("the first")]
    workers.answers["release"] = [None, RuntimeError("the second")]
    with pytest.raises(RefitError, match="the first") as error:
        manager.update_weights(7)
    assert error.value.__notes__ == ["the trainer's memory was not given back: RuntimeError: the second"]


def test_an_actor_that_has_ended_is_not_asked_for_its_memory(
    workers: Workers, manager: RefitCheckpointManager
) -> None:
    workers.answers["update_weights"] = [{}, RayActorError()]
    with pytest.raises(RayActorError) as error:
        manager.update_weights(7)
    assert workers.asked == UPDATE
    assert "not all actors are there" in error.value.__notes__[0]
