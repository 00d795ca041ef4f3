"""A rank of SGLang under the contract: its own model, loader and worker refit, without an engine around them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tests.fp8_refits import State, bytes_of, poison
from tests.sglang.models import begin, load_model

from .contract import Seen, SessionContract, SessionEngine, changed_as_it_loads


def show(rank: int, paths: list[str]) -> Seen:
    return SessionContract(rank, begun(rank, paths), paths).run()


def begun(rank: int, paths: list[str]) -> _Rank:
    """A rank of an engine that holds the first checkpoint."""
    begin(rank, paths[0])
    return _Rank(rank, paths)


class _Rank(SessionEngine):
    guards_sleep = False  # SGLang's scheduler releases memory; the driver asks it what sleeps

    def __init__(self, rank: int, paths: list[str]) -> None:
        from rlrefit.workers.engines.sglang.destination import SglangDestination
        from rlrefit.workers.engines.sglang.worker_refit import WorkerRefit

        self.destination = SglangDestination
        self._paths = paths
        self._runner: Any = load_model(paths[0])
        self._runner.device = "cpu"
        self._runner.forward = lambda batch: None
        self.worker = WorkerRefit.of(self._runner)

    def held(self) -> State:
        return bytes_of(dict(self._runner.model.named_parameters()))

    def loaded(self, index: int) -> State:
        return bytes_of(dict(load_model(self._paths[index]).model.named_parameters()))

    def poison(self) -> None:
        poison(self._runner.model.parameters())

    def step(self) -> None:
        self._runner.forward("a batch")

    def sleep(self) -> None:
        self.worker.discard("a sleep discarded the weights")
        self.poison()

    def computing(self, name: str) -> AbstractContextManager[None]:
        return changed_as_it_loads(type(self._runner.model), name)
