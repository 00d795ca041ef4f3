"""Rollout engines behind one small interface: generate completions, and take part in refits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

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
    """All replicas of a generation engine; colocated, each rank of one sits beside a trainer's.

    Attributes:
        gen_ranks: ranks of all replicas together, as the refit counts them.
    """

    gen_ranks: int
    _group: ActorGroup

    def __init__(self, config: TrainConfig) -> None:
        self._timeout_s = config.ray.timeout_s
        self._replicas = config.generation.replicas

    @abstractmethod
    def start(self) -> None:
        """Begin to start the engines."""

    @abstractmethod
    def wait_until_built(self) -> None:
        """Wait for the engines, whose start began with :meth:`start`."""

    @abstractmethod
    def submit_init_refit(self, rendezvous: dict[str, Any], first_rank: int, engine: str) -> Calls:
        """Have all ranks meet the trainer; ``first_rank`` is the refit rank of the first of them."""

    @abstractmethod
    def submit_refit(self, engine: str, version: int) -> Calls:
        """Have all ranks receive the weights; each call yields a list of records."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all processes of the engines; those of :class:`~.colocated_calls.SleepCalls` where they take turns."""
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
