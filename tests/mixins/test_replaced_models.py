"""A worker that builds its model anew, or whose modules get other parameters: the engine gets what is there now."""

from __future__ import annotations

import gc
import time
import weakref
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin
from rlrefit.workers.trainers.megatron.places import Places
from rlrefit.workers.trainers.source_mixin import SourceRefitMixin
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, refit_changed, run_world, whole

SPECS = [TensorSpec("w", (8, 4), torch.float32)]
CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full")


class Worker(SourceRefitMixin):
    """A trainer whose model is its weights."""

    def __init__(self) -> None:
        self.refit_config = CONFIG
        self.model = [SyntheticSource(SPECS, whole(SPECS))]

    def _make_refit_source(self) -> SyntheticSource:
        return self.model[0]


def test_a_source_is_made_anew_for_another_model_and_kept_for_the_same_one() -> None:
    worker = Worker()
    first = worker._prepared_source()
    worker.model = list(worker.model)
    assert worker._prepared_source() is first
    worker.model = [SyntheticSource(SPECS, whole(SPECS))]
    worker._make_refit_source = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        worker._prepared_source()
    del worker._make_refit_source
    assert worker._prepared_source() is worker.model[0], (
        "what could not be made is not taken for the new one's"
    )


def test_a_source_is_made_anew_for_an_engine_of_another_dtype() -> None:
    class Sharded(FSDPRefitMixin):
        refit_config = CONFIG
        model = torch.nn.Linear(4, 3)

    worker = Sharded()
    for dtype in (torch.bfloat16, torch.float16, None):
        worker.refit_dtype = dtype
        source = worker._prepared_source()
        assert {spec.dtype for spec in source.specs()} == {dtype or torch.float32}
        assert worker._prepared_source() is source


def test_a_model_that_is_another_object_at_each_access_is_refused_when_it_is_prepared() -> None:
    class Restless(Worker):
        bridge = property(lambda self: object())

    with pytest.raises(RefitError, match="another object at each access"):
        Restless()._prepared_source()


def test_a_worker_that_has_closed_its_refit_keeps_no_model() -> None:
    worker = Worker()
    old = weakref.ref(worker._prepared_source())
    worker.close_refit()
    worker.model = []
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("prepares", [False, True])
def test_a_refit_of_a_model_that_the_ranks_did_not_meet_with_is_refused_on_all_of_them(
    prepares: bool,
) -> None:
    worker, engine = Worker(), SyntheticDestination(SPECS, whole(SPECS))
    trainer = worker._prepared_source()
    parts = worker._refit_source_of

    def body(rank: int, session: Any, endpoint: Any) -> Any:
        refit_changed(session, endpoint, 1)
        if not session.world.is_source:
            start = time.monotonic()
            with pytest.raises(PeerLost, match="not the one that the ranks met with"):
                session.refit(2)
            assert time.monotonic() - start < CONFIG.timeout_s / 2
            assert endpoint.wrong(1) == []
            return
        worker._refit_session, worker._refit_session_of = session, parts
        worker.model = [SyntheticSource(SPECS, whole(SPECS))]
        if prepares:
            worker.prepare_refit_info()
        with pytest.raises(RefitError, match="not the one that the ranks met with"):
            worker.refit(2)

    assert [error for error in run_world([trainer], [engine], body, CONFIG) if error] == []


@dataclass(frozen=True)
class Task:
    global_param_name: str
    param_weight: Any


def model_and_tasks() -> tuple[torch.nn.Module, list[Task]]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    tasks = [Task(name, parameter) for name, parameter in model.named_parameters()]
    return model, [*tasks, Task("of another stage", None), Task("no parameter", torch.ones(2))]


def test_tasks_follow_parameters_that_modules_replace() -> None:
    model, tasks = model_and_tasks()
    places = Places([model], tasks)
    before = list(tasks)
    assert not places.follow(tasks)
    assert tasks == before
    now = torch.nn.Parameter(torch.full((2, 3), 7.0))
    model[1].weight = now
    assert places.follow(tasks)
    assert tasks[2].param_weight is now
    assert all(one is other for i, (one, other) in enumerate(zip(tasks, before, strict=True)) if i != 2)
    assert not places.follow(tasks)


def test_tasks_follow_a_module_that_is_replaced_with_all_in_it() -> None:
    inner, tasks = model_and_tasks()
    tasks = [replace(task, global_param_name=f"decoder.{task.global_param_name}") for task in tasks]
    model = torch.nn.ModuleDict({"decoder": inner})
    places = Places([model], tasks)
    model["decoder"] = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    assert places.follow(tasks)
    assert [task.param_weight for task in tasks[:3]] == [*model["decoder"].parameters()]
    assert not places.follow(tasks)
    model["decoder"][0] = torch.nn.Identity()
    with pytest.raises(RefitError, match="is there no more"):
        places.follow(tasks)


def test_tasks_follow_buffers_that_a_move_of_the_model_replaces() -> None:
    model, tasks = model_and_tasks()
    # As Megatron's routers have it, with a task of Bridge's.
    model[1].register_buffer("expert_bias", torch.zeros(2))
    tasks.append(Task("1.expert_bias", model[1].expert_bias))
    places = Places([model], tasks)
    model._apply(torch.clone)  # as .cpu() and .cuda() do, which leave parameters the same objects
    assert places.follow(tasks)
    assert tasks[-1].param_weight is model[1].expert_bias
    assert not places.follow(tasks)
    model[1] = deepcopy(model[1])
    assert places.follow(tasks)
    assert tasks[-1].param_weight is model[1].expert_bias


def test_a_tied_parameter_is_followed_in_all_its_places_or_told_to_be_tied_no_more() -> None:
    one, other = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    other.weight = one.weight
    tasks = [Task("tied", one.weight)]
    places = Places([torch.nn.Sequential(one, other)], tasks)
    one.weight = other.weight = torch.nn.Parameter(torch.ones(3, 3))
    assert places.follow(tasks)
    assert tasks[0].param_weight is one.weight
    for module in (one, other):
        module.weight = torch.nn.Parameter(torch.ones(3, 3))
        with pytest.raises(RefitError, match="tied no more"):
            places.follow(tasks)


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (None, "is there no more"),
        (torch.ones(5, 3), r"of shape \[5, 3\] now"),
        (torch.ones(2, 3, dtype=torch.float64), r"is torch\.float64"),
    ],
)
def test_a_parameter_without_a_successor_is_an_error_that_names_it(now: Any, found: str) -> None:
    model, tasks = model_and_tasks()
    places = Places([model], tasks)
    model[1].weight = None if now is None else torch.nn.Parameter(now)
    with pytest.raises(RefitError, match=found) as caught:
        places.follow(tasks)
    assert caught.value.parameter == "1.weight"


@pytest.mark.parametrize("name", ["refit", "nccl_xfer_refit", "broadcast_weights_for_collective"])
def test_a_refit_before_the_ranks_have_met_names_the_call_that_is_missing(name: str) -> None:
    with pytest.raises(RefitError, match="call join_refit"):
        getattr(Worker(), name)(1)


@pytest.mark.parametrize("rank", [-1, 2, "1"])
def test_a_number_that_is_no_rank_is_refused_before_anybody_is_met(rank: Any) -> None:
    worker = Worker()
    rendezvous = worker.open_refit_rendezvous("127.0.0.1", 1, 1)
    with pytest.raises(RefitError, match="is not in the refit world") as caught:
        worker.join_refit(rendezvous, rank)
    assert caught.value.stage == "rendezvous"
    worker.close_refit()
