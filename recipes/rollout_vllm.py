"""Rollouts by vLLM: an actor for each replica, whose ranks are vLLM's own workers."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from ..integration.config import RefitConfig
from ..workers.checkpoint_folder import checkpoint_folder
from ..workers.completion import Completion
from .cluster import ActorGroup, GuestGroup, RunError, gather
from .colocated_calls import SleepCalls
from .config_schema import TrainConfig
from .config_surroundings import local_hf_config
from .rollout import Calls, RolloutGroup, Sampling
from .vllm_arguments import engine_arguments, engine_bundles

if TYPE_CHECKING:
    from ..workers.colocated.vllm import VllmSleeper

logger = logging.getLogger(__name__)

_NAME = "generation engine"
# Seconds for vLLM's processes to stop before they are killed.
_CLOSE_S = 30.0
# What vLLM on a CPU reads from the environment and nowhere else: KV cache in GiB, and no pinning of
# threads to cores that the trainer's ranks use too.
_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class VllmActor(SleepCalls):
    """One vLLM engine with all its tensor-parallel workers."""

    _llm: Any = None

    def build(self, model_path: str, arguments: dict[str, Any], eos_token_id: int) -> None:
        """Start the engine; ``arguments`` are those of :func:`~.vllm_arguments.engine_arguments`."""
        if not torch.cuda.is_available():
            os.environ.update(_CPU_ENVIRONMENT)
        from vllm import LLM

        from ..workers.vllm.driver import EXTENSION, VllmDriver

        self._eos = eos_token_id
        self._llm = LLM(model_path, worker_extension_cls=EXTENSION, **arguments)
        self._driver = VllmDriver(self._llm)
        self._sleeper: VllmSleeper | None = None

    def init_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str
    ) -> list[dict[str, Any]]:
        return self._driver.init_refit(rendezvous, first_rank, config, engine)

    def refit(self, engine: str, version: int) -> list[dict[str, Any]]:
        return self._driver.refit(version)

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        from vllm import SamplingParams

        version = self._driver.serving_version()
        parameters = [
            SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                # A seed of its own for each request: the result does not depend on how vLLM batches them.
                seed=sampling.seed * 1_000_003 + index,
                stop_token_ids=[self._eos],
                logprobs=0,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        generated = self._driver.generate([{"prompt_token_ids": p} for p in prompts], parameters)
        return [self._completion(found.output.outputs[0], version) for found in generated]

    @property
    def sleeper(self) -> VllmSleeper:
        """Of this engine, made on first use."""
        from ..workers.colocated.vllm import VllmSleeper

        if self._sleeper is None:
            self._sleeper = VllmSleeper([self._driver])
        return self._sleeper

    def close(self) -> None:
        """Stop vLLM's own processes, which outlive a killed actor for a while."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    def _completion(self, output: Any, version: int) -> Completion:
        tokens = list(output.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
        return Completion(tokens, logprobs, bool(tokens) and tokens[-1] == self._eos, version)


class VllmRollouts(RolloutGroup):
    """Replicas of a vLLM engine; ``beside`` are trainer ranks whose places they share."""

    def __init__(
        self,
        config: TrainConfig,
        model_path: str,
        eos_token_id: int,
        gpus: int,
        beside: ActorGroup | None = None,
    ) -> None:
        super().__init__(config)
        self._ranks = config.generation.tensor_parallel * config.generation.pipeline_parallel
        self._refit_config = config.policy.refit
        self.gen_ranks = self._ranks * self._replicas
        self._group = (
            self._own_places(config, gpus)
            if beside is None
            else GuestGroup(
                _NAME, VllmActor, beside, self._ranks, gpus, config.ray, env=config.ray.generation_env
            )
        )
        hf_config = local_hf_config(str(checkpoint_folder(model_path, weights=False)))
        arguments = engine_arguments(config, hf_config)
        if beside is not None and gpus:
            # vLLM's CPU build has no such mode, and keeps its memory.
            arguments["enable_sleep_mode"] = True
        self._build_arguments = (model_path, arguments, eos_token_id)

    def _own_places(self, config: TrainConfig, gpus: int) -> ActorGroup:
        return ActorGroup(
            _NAME,
            VllmActor,
            self._replicas,
            gpus * self._ranks,
            config.ray,
            cpus=config.ray.cpus_per_rank * self._ranks,
            bundles=engine_bundles(config),
            env=config.ray.generation_env,
        )

    def start(self) -> None:
        self._building = self._group.submit("build", *self._build_arguments)

    def wait_until_built(self) -> None:
        gather(self._building, self._timeout_s)

    def submit_init_refit(self, rendezvous: dict[str, Any], first_rank: int, engine: str) -> Calls:
        return self._group.submit_each(
            "init_refit",
            [
                (rendezvous, first_rank + i * self._ranks, self._refit_config, engine)
                for i in range(self._replicas)
            ],
        )

    def submit_refit(self, engine: str, version: int) -> Calls:
        return self._group.submit("refit", engine, version)

    def shutdown(self) -> None:
        try:
            gather(self._group.submit("close"), _CLOSE_S)
        except RunError as error:
            # Of an engine that failed before: its own error is what the user has to see.
            logger.warning("vLLM did not stop in order: %s", error)
        finally:
            self._group.shutdown()

    def _submit_generate(self, replica: int, prompts: list[list[int]], sampling: Sampling) -> Calls:
        actor = self._group.actors[replica]
        return [(f"generation engine rank {replica}", actor.generate.remote(prompts, sampling))]
