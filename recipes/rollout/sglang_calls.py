"""How an SGLang engine of this process is called: by its blocking methods, or by its coroutines in its one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ...integration.colocated.memory import ProcessMemory
from ...workers.engines.sglang.async_driver import AsyncSglangRefit
from ...workers.engines.sglang.callers import EngineCaller
from ...workers.engines.sglang.driver import SglangRefit

Outputs = list[dict[str, Any]]


class BlockingCalls:
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


class AwaitedCalls:
    """By ``Engine.async_generate``, a request for each prompt, and refits from coroutines of the same loop.

    Attributes: as :class:`BlockingCalls`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._awaited = self._wait(AsyncSglangRefit.open(engine))
        self.refit = self._awaited.blocking
        self.sleeper = AwaitedSleeper(self)

    def do[Result](self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Do what uses :attr:`refit`, while the loop answers it."""
        return self._wait(self._awaited.run(call, *arguments))

    def generate(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> Outputs:
        """As :meth:`BlockingCalls.generate`."""
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


class AwaitedSleeper:
    """The memory stages of an engine whose loop has to answer them; a :class:`~..integration.stages.SleepingEngine`."""

    def __init__(self, calls: AwaitedCalls) -> None:
        self._calls = calls

    def sleep(self, level: int) -> None:
        """As the driver's."""
        self._calls.do(self._calls.refit.sleep, level)

    def wake(self, tags: Sequence[str]) -> None:
        """As the driver's."""
        self._calls.do(self._calls.refit.wake, tags)

    def asleep(self) -> frozenset[str]:
        """As the driver's."""
        return self._calls.do(self._calls.refit.asleep)

    def empty_cache(self) -> None:
        """As the driver's."""
        self._calls.do(self._calls.refit.empty_cache)

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """As the driver's."""
        return self._calls.do(lambda: self._calls.refit.memory(restart=restart))
