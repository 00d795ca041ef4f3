"""Rollouts by transformers: an actor for each tensor-parallel rank of each replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ...integration.config import RefitConfig
from ...workers.engines.common.completion import Completion
from ..config.schema import TrainConfig
from ..run.cluster import ActorGroup, GuestGroup
from ..run.rank import RankActor, join_worlds
from .base import Calls, RolloutGroup, Sampling, SleepCalls

if TYPE_CHECKING:
    from ...workers.engines.transformers.colocated import TransformersSleeper


class TransformersActor(RankActor, SleepCalls):
    """One rank of a transformers engine."""

    def build(
        self,
        model_path: str,
        dtype: str,
        tp_size: int,
        fp8: bool,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        trust_remote_code: bool,
    ) -> None:
        from ...workers.engines.transformers.engine import TransformersEngine

        self._engine = TransformersEngine(
            model_path, getattr(torch, dtype), tp_size, fp8=fp8, trust_remote_code=trust_remote_code
        )
        self._sleeper: TransformersSleeper | None = None
        self._special = {"stop_token_ids": stop_token_ids, "pad_token_id": pad_token_id}

    def join_refit(
        self, rendezvous: dict[str, Any], rank: int, config: RefitConfig, engine: str
    ) -> dict[str, Any]:
        return self._engine.join_refit(rendezvous, rank, asdict(config), engine)

    def refit(self, version: int) -> list[dict[str, Any]]:
        return [self._engine.refit(version)]

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        return self._engine.generate(prompts, **asdict(sampling), **self._special)

    @property
    def sleeper(self) -> TransformersSleeper:
        """Of this rank, made on first use."""
        from ...workers.engines.transformers.colocated import TransformersSleeper

        if self._sleeper is None:
            self._sleeper = TransformersSleeper(self._engine)
        return self._sleeper


class TransformersRollouts(RolloutGroup):
    """Replicas of a tensor-parallel transformers model; colocated ones share the places of the trainer ranks ``beside``."""

    def __init__(
        self,
        config: TrainConfig,
        model_path: str,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        gpus: int,
        beside: ActorGroup | None = None,
    ) -> None:
        super().__init__(config, 1)
        self._tp = config.generation.tensor_parallel
        name, env, python = "generation", config.ray.generation_env, config.ray.generation_python
        self._group = (
            ActorGroup(name, TransformersActor, self.gen_ranks, gpus, config.ray, env=env, python=python)
            if beside is None
            else GuestGroup(name, TransformersActor, beside, 1, gpus, config.ray, env=env, python=python)
        )
        self._model_path = model_path
        fp8 = config.generation.weight_dtype == "fp8"
        self._build_arguments = (
            *(model_path, config.model.dtype, self._tp, fp8, stop_token_ids, pad_token_id),
            config.model.trust_remote_code,
        )

    def start(self) -> None:
        self._group.require_model(self._model_path)
        join_worlds(self._group, self._tp, self._timeout_s, always=False)
        self._building = self._group.submit("build", *self._build_arguments)

    def shutdown(self) -> None:
        self._group.shutdown()

    def _submit_generate(self, replica: int, prompts: list[list[int]], sampling: Sampling) -> Calls:
        ranks = range(replica * self._tp, (replica + 1) * self._tp)
        return [
            (f"generation rank {rank}", self._group.actors[rank].generate.remote(prompts, sampling))
            for rank in ranks
        ]
