"""Rollouts by an inference engine with processes of its own: an actor for each replica, whose ranks are the engine's workers."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ...integration.config import RefitConfig
from ...integration.errors import RefitError
from ...workers.checkpoint_folder import checkpoint_folder
from ...workers.engines.common.completion import Completion
from ..config.model import local_hf_config
from ..config.schema import TrainConfig
from ..run.cluster import ActorGroup, GuestGroup, HostActor, RunError, gather
from .base import Calls, RolloutGroup, Sampling, SleepCalls

logger = logging.getLogger(__name__)

_NAME = "generation engine"
# Seconds for an engine's own processes to stop before they are killed.
_CLOSE_S = 30.0


def require_ended(
    reason: str, told: object, tokens: int, sampling: Sampling, engine: str, remedy: str
) -> None:
    """Check that a completion ended by itself or with its last token.

    Args:
        reason: why it ended: ``stop``, ``length`` or something else.
        told: all that the engine tells of its end.
        tokens: that it has.
        sampling: how it was sampled.
        engine: its name.
        remedy: against an early end.

    Raises:
        RefitError: the engine cut it off, as one that was aborted; it would be judged and trained on as a whole one.
    """
    if reason == "stop" or (reason == "length" and tokens >= sampling.max_new_tokens):
        return
    raise RefitError(
        f"{engine} ended a completion after {tokens} of {sampling.max_new_tokens} tokens ({told}), so that it would count as one "
        f"that ran out of tokens. Nothing of this batch is used; {remedy}",
        stage="generate",
    )


class EngineActor(HostActor, SleepCalls):
    """One engine with all its workers, as :class:`EngineRollouts` calls it."""

    @abstractmethod
    def build(self, model_path: str, arguments: dict[str, Any], stop_token_ids: Sequence[int]) -> None:
        """Start the engine with its own keyword arguments; any of the tokens ends a completion."""

    @abstractmethod
    def join_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str
    ) -> list[dict[str, Any]]:
        """Have all workers meet the trainer; ``first_rank`` is the refit rank of the first of them."""

    @abstractmethod
    def refit(self, version: int) -> list[dict[str, Any]]:
        """Have all workers receive the weights; their records."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """One completion for each prompt, in order."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine's own processes, which do not end with the actor at once."""


class EngineRollouts(RolloutGroup):
    """Replicas of an engine; colocated ones share the places of the trainer ranks ``beside``."""

    _actor: type[EngineActor]

    def __init__(
        self,
        config: TrainConfig,
        model_path: str,
        stop_token_ids: Sequence[int],
        gpus: int,
        beside: ActorGroup | None = None,
    ) -> None:
        super().__init__(config, config.generation.tensor_parallel * config.generation.pipeline_parallel)
        self._group = (
            self._own_places(config, gpus)
            if beside is None
            else GuestGroup(
                _NAME,
                self._actor,
                beside,
                self._ranks_per_actor,
                gpus,
                config.ray,
                env=config.ray.generation_env,
                python=config.ray.generation_python,
            )
        )
        self._model_path = model_path
        hf_config = local_hf_config(str(checkpoint_folder(model_path, weights=False)))
        self._build_arguments: list[tuple[Any, ...]] = [
            (model_path, self._arguments(config, hf_config, gpus, replica), stop_token_ids)
            for replica in range(self._replicas)
        ]

    @abstractmethod
    def _arguments(
        self, config: TrainConfig, hf_config: Mapping[str, Any] | None, gpus: int, replica: int
    ) -> dict[str, Any]:
        """Keyword arguments of one replica.

        Args:
            config: with ``model.dtype`` resolved.
            hf_config: the checkpoint's config.json.
            gpus: of each rank; 0 on a machine without.
            replica: its number.
        """

    def _bundles(self, config: TrainConfig) -> int:
        """Places that one engine is spread over."""
        return 1

    def _own_places(self, config: TrainConfig, gpus: int) -> ActorGroup:
        return ActorGroup(
            _NAME,
            self._actor,
            self._replicas,
            gpus * self._ranks_per_actor,
            config.ray,
            cpus=config.ray.cpus_per_rank * self._ranks_per_actor,
            bundles=self._bundles(config),
            env=config.ray.generation_env,
            python=config.ray.generation_python,
        )

    def start(self) -> None:
        self._group.require_model(self._model_path)
        self._building = self._group.submit_each("build", self._build_arguments)

    def shutdown(self) -> None:
        try:
            gather(self._group.submit("close"), _CLOSE_S, if_late="its process is killed")
        except RunError as error:
            # Not raised: it would hide the error of an engine that failed before.
            logger.warning("an engine did not stop in order: %s", error)
        finally:
            self._group.shutdown()

    def _submit_generate(self, replica: int, prompts: list[list[int]], sampling: Sampling) -> Calls:
        actor = self._group.actors[replica]
        return [(f"{_NAME} rank {replica}", actor.generate.remote(prompts, sampling))]
