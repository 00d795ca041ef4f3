"""A running vLLM behind one synchronous face: the ``LLM`` of a script, or the ``AsyncLLM`` of a server."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
from rlrefit.workers.engines.vllm.colocated import AwaitedVllmSleeper, VllmSleeper
from rlrefit.workers.engines.vllm.driver import Generated, PauseMode, VllmDriver
from rlrefit.workers.engines.vllm.plugin import transfer_config
from tests.megatron_trainers import CONFIG, RANKS
from tests.vllm_cpu import PACKS_EXPERTS

# The last one fills whole blocks of the KV cache, so that its prefix is kept for the next request.
PROMPTS = [[5, 17, 33, 90], [101, 7, 8, 9, 10, 11], [64], [3 + i % 100 for i in range(160)]]
TOKENS = 8
GEN_RANKS = 2


@dataclass(frozen=True)
class Sampled:
    """What one request gave: tokens, the log-probability of each, and the version that it came from."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    cached: int
    reason: str

    def values(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs


def _sampled(found: Generated) -> Sampled:
    [completion], [versions] = found.output.outputs, found.versions
    logprobs = [e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
    cached = found.output.num_cached_tokens or 0
    return Sampled(
        list(completion.token_ids), logprobs, list(versions), cached, str(completion.finish_reason)
    )


def _parameters(tokens: int = TOKENS) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)


def _arguments(path: str) -> dict[str, Any]:
    return {
        "model": path,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "tensor_parallel_size": GEN_RANKS,
        "worker_extension_cls": "vllm_probe.ProbeExtension",
        # As recipes start engines with experts; later vLLMs refuse it on CPUs, which have one backend only.
        "moe_backend": "auto" if PACKS_EXPERTS else "triton",
    }


class Engine:
    """What both have; ``driver`` is rlrefit's."""

    driver: Any

    def done(self, found: Any) -> Any:
        """What a call gave, or what it is awaited for."""
        return found

    def call(self, method: str, *args: Any) -> list[Any]:
        """The result of every worker, by rank."""
        raise NotImplementedError

    def generate(self, prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS) -> list[Sampled]:
        return self.generate_through(lambda count: None, prompts, tokens)

    def generate_through(
        self, meanwhile: Callable[[int], None], prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS
    ) -> list[Sampled]:
        """Generate, and call ``meanwhile`` as it goes on with a number that grows."""
        raise NotImplementedError

    def init(self, rendezvous: dict[str, Any], delta: str = "off") -> None:
        self.done(self.driver.join_refit(rendezvous, RANKS, RefitConfig(**CONFIG, delta=delta)))

    def refit(self, version: int, mode: PauseMode = "keep") -> list[dict[str, Any]]:
        return self.done(self.driver.refit(version, mode))

    def version(self) -> int:
        return self.done(self.driver.serving_version())

    def close_refit(self) -> None:
        self.done(self.driver.close_refit())


class ScriptEngine(Engine):
    """``vllm.LLM``, started with rlrefit as its weight-transfer backend."""

    def __init__(self, path: str, **more: Any) -> None:
        from vllm import LLM

        self.llm = LLM(**_arguments(path) | more, weight_transfer_config=transfer_config())
        self.driver = VllmDriver(self.llm)
        self.sleep, self.wake_up = self.llm.sleep, self.llm.wake_up
        self.shutdown = self.llm.llm_engine.engine_core.shutdown

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def generate_through(
        self, meanwhile: Callable[[int], None], prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS
    ) -> list[Sampled]:
        """Calls it with the number of the step after each of them."""
        steps = itertools.count()
        found = self.driver.generate(
            [{"prompt_token_ids": p} for p in prompts], _parameters(tokens), lambda: meanwhile(next(steps))
        )
        return [_sampled(f) for f in found]

    def sleeper(self) -> VllmSleeper:
        return VllmSleeper([self.driver])

    def replace_utility(self, patch: pytest.MonkeyPatch, utility: str, error: Exception) -> None:
        """Have the engine's core raise when it is asked for ``utility``."""
        core = self.llm.llm_engine.engine_core
        asked = core.call_utility

        def ask(method: str, *args: Any) -> Any:
            if method == utility:
                raise error
            return asked(method, *args)

        patch.setattr(core, "call_utility", ask)


class ServerEngine(Engine):
    """``AsyncLLM`` in an event loop of its own."""

    def __init__(self, path: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._requests = itertools.count()
        self.done(self._start(path))

    async def _start(self, path: str) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**_arguments(path)))
        self.driver = AsyncVllmDriver(self.engine)

    def done(self, found: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(found, self._loop).result(240)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.done(self.engine.collective_rpc(method, args=args))

    def generate_through(
        self, meanwhile: Callable[[int], None], prompts: list[list[int]] = PROMPTS, tokens: int = TOKENS
    ) -> list[Sampled]:
        """Calls it in another thread with the number of outputs that the first request has given."""

        calls: list[asyncio.Task[None]] = []

        async def one(index: int, prompt: list[int]) -> Sampled:
            async for found in self.driver.generate(
                {"prompt_token_ids": prompt}, _parameters(tokens), f"request {next(self._requests)}"
            ):
                last = found
                if index == 0:
                    count = len(found.output.outputs[0].token_ids)
                    calls.append(asyncio.create_task(asyncio.to_thread(meanwhile, count)))
            return _sampled(last)

        async def all_of_them() -> list[Sampled]:
            try:
                return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
            finally:
                # Also when a request has failed: what the calls found is known only after them.
                await asyncio.gather(*calls)

        return self.done(all_of_them())

    def sleep(self, level: int) -> None:
        self.done(self.driver.sleep(level))

    def wake_up(self, tags: list[str]) -> None:
        self.done(self.driver.wake_up(tags))

    def sleeper(self) -> AwaitedVllmSleeper:
        return AwaitedVllmSleeper([self.driver], self._loop)

    def replace_utility(self, patch: pytest.MonkeyPatch, utility: str, error: Exception) -> None:
        core = self.engine.engine_core
        asked = core._call_utility_async

        async def ask(method: str, *args: Any, engine: bytes) -> Any:
            if method == utility:
                raise error
            return await asked(method, *args, engine=engine)

        patch.setattr(core, "_call_utility_async", ask)

    def hold_outputs(self, patch: pytest.MonkeyPatch) -> Callable[[], None]:
        """Let nobody read what the engine generates from here on, until the result is called."""
        core = self.engine.engine_core
        read, released = core.get_output_async, threading.Event()

        async def hold() -> Any:
            found = await read()
            while not released.is_set():
                await asyncio.sleep(0.005)
            return found

        patch.setattr(core, "get_output_async", hold)
        return released.set

    def shutdown(self) -> None:
        self.engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
