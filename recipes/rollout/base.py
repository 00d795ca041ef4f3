"""The interface of the rollout engines: generate completions, take part in refits, sleep and wake."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from ...integration.colocated.memory import ProcessMemory
from ...integration.colocated.stages import SleepingEngine
from ...workers.engines.common.completion import Completion
from ..config.schema import TrainConfig
from ..run.cluster import ActorGroup, RunError, gather

Calls = list[tuple[str, ray.ObjectRef]]


@dataclass(frozen=True)
class Sampling:
    """How to sample: ``temperature`` 0 is greedy; equal seeds and weights give equal completions, where the engine reads the seed."""

    max_new_tokens: int
    temperature: float
    seed: int


class RolloutGroup(ABC):
    """All replicas of a generation engine, with the actors that they run in.

    Args:
        config: the recipe.
        ranks_per_actor: engine ranks of one actor.

    Attributes:
        gen_ranks: ranks of all replicas together, as the refit counts them.
    """

    _group: ActorGroup
    _building: Calls

    def __init__(self, config: TrainConfig, ranks_per_actor: int) -> None:
        self._timeout_s = config.ray.timeout_s
        self._replicas = config.generation.replicas
        self._refit_config = config.policy.refit
        self._ranks_per_actor = ranks_per_actor
        self.gen_ranks = config.generation.ranks

    @abstractmethod
    def start(self) -> None:
        """Begin to start the engines."""

    def wait_until_built(self) -> None:
        """Wait for the engines that :meth:`start` began to start."""
        gather(self._building, self._timeout_s)

    def submit_join_refit(self, rendezvous: dict[str, Any], first_rank: int, engine: str) -> Calls:
        """Have all ranks meet the trainer over the named engine; ``first_rank`` is the refit rank of the first of them."""
        ranks = range(first_rank, first_rank + self.gen_ranks, self._ranks_per_actor)
        return self._group.submit_each(
            "join_refit", [(rendezvous, rank, self._refit_config, engine) for rank in ranks]
        )

    def submit_refit(self, version: int) -> Calls:
        """Have all ranks receive the weights; each call yields a list of records."""
        return self._group.submit("refit", version)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all processes of the engines, e.g. one of :class:`SleepCalls`."""
        return self._group.call(method, *arguments)

    def submit(self, method: str, *arguments: Any) -> Calls:
        """The same without waiting."""
        return self._group.submit(method, *arguments)

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engines."""

    @abstractmethod
    def _submit_generate(self, replica: int, prompts: list[list[int]], sampling: Sampling) -> Calls:
        """Have one replica generate; every call yields the same completions."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion for each prompt, in order; the prompts are dealt out to the replicas.

        Raises:
            RunError: an engine fails, or the ranks of one engine do not agree on what they generated.
        """
        share = -(-len(prompts) // self._replicas)
        parts = [[list(p) for p in prompts[i * share : (i + 1) * share]] for i in range(self._replicas)]
        calls: list[Calls] = [
            # Another seed for each replica, or equal prompts would get equal completions.
            self._submit_generate(
                i, part, Sampling(sampling.max_new_tokens, sampling.temperature, sampling.seed + i)
            )
            for i, part in enumerate(parts)
            if part
        ]
        results = gather([call for replica in calls for call in replica], self._timeout_s)
        completions: list[Completion] = []
        position = 0
        for replica in calls:
            answers = results[position : position + len(replica)]
            position += len(replica)
            self._require_agreement(replica, answers)
            completions.extend(answers[0])
        return completions

    def _require_agreement(self, calls: Calls, answers: list[list[Completion]]) -> None:
        for (name, _), answer in zip(calls[1:], answers[1:], strict=True):
            if [c.token_ids for c in answer] != [c.token_ids for c in answers[0]]:
                raise RunError(
                    f"{name} sampled other tokens than {calls[0][0]} of the same tensor-parallel engine, so their "
                    "weights or random states differ; the completions can't be trusted"
                )


class SleepCalls(ABC):
    """The methods of an engine's actor that :class:`~...workers.engines.common.called.CalledEngine` calls."""

    @property
    @abstractmethod
    def sleeper(self) -> SleepingEngine:
        """This process's engine, or its part of one."""

    def sleep(self, level: int) -> None:
        self.sleeper.sleep(level)

    def wake(self, tags: list[str]) -> None:
        self.sleeper.wake(tags)

    def asleep(self) -> frozenset[str]:
        return self.sleeper.asleep()

    def empty_cache(self) -> None:
        self.sleeper.empty_cache()

    def memory(self, restart: bool) -> list[ProcessMemory]:
        return list(self.sleeper.memory(restart=restart))
