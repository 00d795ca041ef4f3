"""Rollouts by SGLang, whose engine is called by blocking methods or by coroutines in its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ...integration.colocated.stages import SleepingEngine
from ...integration.config import RefitConfig
from ...integration.errors import RefitMismatch
from ...workers.checkpoint_folder import copy_own_code
from ...workers.engines.common.awaited import Forwarded
from ...workers.engines.common.completion import Completion
from ...workers.engines.sglang.callers import EngineCaller
from ...workers.engines.sglang.driver import AsyncSglangRefit, SglangRefit
from ..config.schema import TrainConfig
from .arguments import batch_seed, request_seed, sglang_arguments
from .base import Sampling
from .engine import EngineActor, EngineRollouts, require_ended

Outputs = list[dict[str, Any]]


class _BlockingCalls:
    """By ``Engine.generate``, and refits from this thread.

    Attributes:
        refit: the driver; call it by :meth:`do`.
        sleeper: its memory stages, to be called as they are.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.refit = SglangRefit(EngineCaller(engine))
        self.sleeper = self.refit

    def do[Result](self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Do what uses :attr:`refit`."""
        return call(*arguments)

    def generate(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> Outputs:
        """All prompts as one request, and what SGLang tells of each with the log-probabilities of its tokens."""
        outputs: Outputs = self._engine.generate(
            input_ids=prompts, sampling_params=parameters, return_logprob=True
        )
        return outputs


class _AwaitedCalls:
    """By ``Engine.async_generate``, a request for each prompt, and refits from coroutines of the same loop.

    Attributes: as :class:`_BlockingCalls`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._awaited = self._wait(AsyncSglangRefit.open(engine))
        self.refit = self._awaited.blocking
        self.sleeper = Forwarded(self.refit, lambda _, call: self.do(call))

    def do[Result](self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Do what uses :attr:`refit`, while the loop answers it."""
        return self._wait(self._awaited.run(call, *arguments))

    def generate(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> Outputs:
        """As :meth:`_BlockingCalls.generate`."""
        return self._wait(self._generated(prompts, parameters))

    async def _generated(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> Outputs:
        requests = (
            self._engine.async_generate(input_ids=prompt, sampling_params=each, return_logprob=True)
            for prompt, each in zip(prompts, parameters, strict=True)
        )
        return await asyncio.gather(*requests)

    def _wait[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        # SGLang ties an engine to the loop of its first request.
        found: Result = self._engine.loop.run_until_complete(coroutine)
        return found


class SglangActor(EngineActor):
    """One SGLang engine, called by its blocking methods."""

    _engine: Any = None
    _made_calls: type[_BlockingCalls] | type[_AwaitedCalls] = _BlockingCalls

    def build(self, model_path: str, arguments: dict[str, Any], stop_token_ids: Sequence[int]) -> None:
        """As :meth:`EngineActor.build`; ``arguments`` are those of :func:`~.arguments.sglang_arguments`."""
        import sglang

        self._stop = stop_token_ids
        if arguments.get("trust_remote_code"):
            copy_own_code(model_path)
        self._engine = sglang.Engine(model_path=model_path, **arguments)
        self._calls = self._made_calls(self._engine)

    def join_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str
    ) -> list[dict[str, Any]]:
        return self._calls.do(self._calls.refit.join_refit, rendezvous, first_rank, config, engine)

    def refit(self, version: int) -> list[dict[str, Any]]:
        return self._calls.do(self._calls.refit.refit, version)

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        version = self._calls.do(self._served)
        # By the step, so that a run that resumes draws on as one that was not interrupted.
        self._calls.do(self._calls.refit.seed, batch_seed(sampling.seed))
        parameters = [
            {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                # Read where SGLang was started with enable_deterministic_inference.
                "sampling_seed": request_seed(sampling.seed, index) % (1 << 31),
                "stop_token_ids": list(self._stop),
            }
            for index in range(len(prompts))
        ]
        outputs = self._calls.generate(prompts, parameters)
        return [self._completion(output, sampling, version) for output in outputs]

    @property
    def sleeper(self) -> SleepingEngine:
        return self._calls.sleeper

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def _served(self) -> int:
        """The version that the workers serve; a paused engine would keep requests waiting for ever."""
        self._calls.refit.require_servable()
        return self._calls.refit.version

    def _completion(self, output: dict[str, Any], sampling: Sampling, version: int) -> Completion:
        told = output["meta_info"]
        # Of one list, so that no token can have another one's probability.
        sampled = [(int(token), float(logprob)) for logprob, token, *_ in told["output_token_logprobs"]]
        tokens = [token for token, _ in sampled]
        end = told["finish_reason"]
        remedy = "give SGLang a longer context_length or a larger max_total_tokens, and abort no requests"
        require_ended(end["type"], end, len(tokens), sampling, "SGLang", remedy)
        if version >= 0 and told["weight_version"] != str(version):
            raise RefitMismatch(
                f"SGLang says that a completion is of weights {told['weight_version']!r}, and its workers serve version {version}: "
                "something else has changed the engine's weights. Nothing of this batch is used; let nothing but refits do so",
                stage="generate",
            )
        return Completion(
            tokens,
            [logprob for _, logprob in sampled],
            bool(tokens) and tokens[-1] in self._stop,
            version,
        )


class AsyncSglangActor(SglangActor):
    """The same engine, called by its coroutines."""

    _made_calls = _AwaitedCalls


class SglangRollouts(EngineRollouts):
    """Replicas of an SGLang engine."""

    _actor = SglangActor

    def _arguments(
        self, config: TrainConfig, hf_config: Mapping[str, Any] | None, gpus: int, replica: int
    ) -> dict[str, Any]:
        return sglang_arguments(config, hf_config, gpus, replica)


class AsyncSglangRollouts(SglangRollouts):
    """The same, called by coroutines."""

    _actor = AsyncSglangActor
