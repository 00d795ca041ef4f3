"""Rollouts by vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...integration.config import RefitConfig
from ...workers.checkpoint_folder import copy_own_code
from ...workers.engines.common.completion import Completion
from ..config.schema import TrainConfig
from ..run.cluster import ActorGroup
from .arguments import batch_seed, engine_seed, request_seed, vllm_arguments, vllm_bundles
from .base import Sampling
from .engine import EngineActor, EngineRollouts, require_ended

if TYPE_CHECKING:
    from ...workers.engines.vllm.colocated import VllmSleeper

# What vLLM on a CPU reads from the environment and nowhere else: KV cache in GiB, no pinning of threads to cores that
# the trainer's ranks use too, and products in NVFP4 without a GPU's kernels.
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NVFP4_GEMM_BACKEND": "emulation",
}


class VllmActor(EngineActor):
    """One vLLM engine with all its tensor-parallel workers."""

    _llm: Any = None

    def build(
        self,
        model_path: str,
        arguments: dict[str, Any],
        stop_token_ids: Sequence[int],
        seed_per_request: bool = False,
    ) -> None:
        """As :meth:`EngineActor.build`; ``arguments`` are those of :func:`~.arguments.vllm_arguments`."""
        if not torch.cuda.is_available():
            os.environ.update(_CPU_ENVIRONMENT)
        from vllm import LLM

        from ...workers.engines.vllm.driver import EXTENSION, VllmDriver

        self._stop, self._seeded = stop_token_ids, seed_per_request
        if arguments.get("trust_remote_code"):
            copy_own_code(model_path)
        self._llm = LLM(model_path, worker_extension_cls=EXTENSION, **arguments)
        self._driver = VllmDriver(self._llm)
        self._sleeper: VllmSleeper | None = None

    def join_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str
    ) -> list[dict[str, Any]]:
        return self._driver.join_refit(rendezvous, first_rank, config, engine)

    def refit(self, version: int) -> list[dict[str, Any]]:
        return self._driver.refit(version)

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        from vllm import SamplingParams

        version = self._driver.serving_version()
        if not self._seeded:
            # By the step, so that a run that resumes draws on, and not what it drew at first.
            self._driver.seed(batch_seed(sampling.seed))
        parameters = [
            SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                seed=request_seed(sampling.seed, index) if self._seeded else None,
                stop_token_ids=list(self._stop),
                logprobs=0,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        generated = self._driver.generate([{"prompt_token_ids": p} for p in prompts], parameters)
        return [self._completion(found.output.outputs[0], sampling, version) for found in generated]

    @property
    def sleeper(self) -> VllmSleeper:
        """Of this engine, made on first use."""
        from ...workers.engines.vllm.colocated import VllmSleeper

        if self._sleeper is None:
            self._sleeper = VllmSleeper([self._driver])
        return self._sleeper

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()

    def _completion(self, output: Any, sampling: Sampling, version: int) -> Completion:
        tokens = list(output.token_ids)
        remedy = "look for the cause in vLLM's log, and abort no requests"
        require_ended(output.finish_reason, output.finish_reason, len(tokens), sampling, "vLLM", remedy)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
        return Completion(tokens, logprobs, bool(tokens) and tokens[-1] in self._stop, version)


class VllmRollouts(EngineRollouts):
    """Replicas of a vLLM engine."""

    _actor = VllmActor

    def __init__(
        self,
        config: TrainConfig,
        model_path: str,
        stop_token_ids: Sequence[int],
        gpus: int,
        beside: ActorGroup | None = None,
    ) -> None:
        super().__init__(config, model_path, stop_token_ids, gpus, beside)
        seeded = config.generation.vllm.seed_per_request
        self._build_arguments = [(*arguments, seeded) for arguments in self._build_arguments]

    def _arguments(
        self, config: TrainConfig, hf_config: Mapping[str, Any] | None, gpus: int, replica: int
    ) -> dict[str, Any]:
        arguments = vllm_arguments(config, hf_config) | {"seed": engine_seed(config.seed, replica)}
        if config.generation.colocated.enabled and gpus:
            # vLLM's CPU build has no such mode, and keeps its memory.
            arguments["enable_sleep_mode"] = True
        return arguments

    def _bundles(self, config: TrainConfig) -> int:
        return vllm_bundles(config)
