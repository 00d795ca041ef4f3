"""A worker that builds its model anew, or whose modules get other parameters: the engine gets what is there now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.integration.manifest import TensorSpec
from rlrefit.workers.megatron.places import Places
from rlrefit.workers.source_mixin import SourceRefitMixin
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, refit_changed, run_world

SPECS = [TensorSpec("w", (8, 4), torch.float32)]
WHOLE: Any = {"w": [((0, 8), (0, 4))]}
CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full")


class Worker(SourceRefitMixin):
    """A trainer whose model is its weights."""

    def __init__(self) -> None:
        self.refit_config = CONFIG
        self.model = [SyntheticSource(SPECS, WHOLE)]

    def _make_refit_source(self) -> SyntheticSource:
        return self.model[0]


def test_a_source_is_made_anew_for_another_model_and_kept_for_the_same_one() -> None:
    worker = Worker()
    first = worker._prepared_source()
    worker.model = list(worker.model)
    assert worker._prepared_source() is first
    worker.model = [SyntheticSource(SPECS, WHOLE)]
    assert worker._prepared_source() is worker.model[0]


def test_a_refit_of_a_model_that_the_ranks_did_not_meet_with_is_refused_before_anything_is_written() -> None:
    worker, engine = Worker(), SyntheticDestination(SPECS, WHOLE)
    trainer = worker._prepared_source()

    def body(rank: int, session: Any, endpoint: Any) -> Any:
        refit_changed(session, endpoint, 1)
        if not session.world.is_source:
            session.refit(2)
            return None
        worker._refit_session = session
        worker.model = [SyntheticSource(SPECS, WHOLE)]
        with pytest.raises(RefitError, match="not the one that the ranks met with"):
            worker.nccl_xfer_refit(2)
        worker.model = [trainer]
        worker.nccl_xfer_refit(2)
        return None

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


@pytest.mark.parametrize(("now", "found"), [(None, "has none now"), (torch.ones(5, 3), r"shape \[5, 3\]")])
def test_a_parameter_without_a_successor_is_an_error_that_names_it(now: Any, found: str) -> None:
    model, tasks = model_and_tasks()
    places = Places([model], tasks)
    model[1].weight = None if now is None else torch.nn.Parameter(now)
    with pytest.raises(RefitError, match=found) as caught:
        places.follow(tasks)
    assert caught.value.parameter == "1.weight"
