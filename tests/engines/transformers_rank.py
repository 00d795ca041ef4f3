"""A rank of the transformers engine, under the contract."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from rlrefit.workers.engines.transformers.colocated import TransformersSleeper
from rlrefit.workers.engines.transformers.destination import TransformersDestination
from rlrefit.workers.engines.transformers.engine import TransformersEngine
from tests.fp8_refits import State, bytes_of, poison

from .contract import RANKS, Seen, SessionContract, SessionEngine


def show(rank: int, paths: list[str]) -> Seen:
    return SessionContract(rank, _Rank(paths), paths).run()


class _Rank(SessionEngine):
    destination = TransformersDestination
    guards_sleep = False

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self.worker = TransformersEngine(paths[0], torch.bfloat16, RANKS)
        self._sleeper = TransformersSleeper(self.worker)

    def held(self) -> State:
        return bytes_of(self.worker.model.state_dict())

    def loaded(self, index: int) -> State:
        return bytes_of(TransformersEngine(self._paths[index], torch.bfloat16, RANKS).model.state_dict())

    def poison(self) -> None:
        poison(self.worker.model.parameters())

    def step(self) -> None:
        self.worker.generate(
            [[5, 7]], max_new_tokens=1, temperature=0.0, seed=0, stop_token_ids=[], pad_token_id=0
        )

    def sleep(self) -> None:
        self._sleeper.sleep(2)

    def wake(self) -> None:
        self._sleeper.wake(["weights", "kv_cache"])

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """A style of transformers' plan that nobody knows."""
        model = self.worker.model
        module = re.sub(r"\.\d+\.", ".*.", name).rpartition(".")[0]
        plan = {**model.tp_plan, module: "made up"}
        with mock.patch.object(type(model), "tp_plan", plan):
            yield
