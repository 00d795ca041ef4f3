"""Doubles of vLLM's two engines for the tests of drivers: they fail, wait and answer as they are told, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rlrefit.integration.config import RefitConfig
from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
from rlrefit.workers.engines.vllm.driver import EXTENSION

# As vLLM 0.21 raises at its client, of no kind of its own, where blocks stay held.
HELD = Exception(
    "Call to reset_prefix_cache method failed: Failed to reset KV cache even when all the running"
)


class Engine:
    """What both of vLLM's engines have, with one worker."""

    def __init__(self, extension: str = EXTENSION) -> None:
        self.paused = False
        self.version = 3
        self.commits = True  # before the refit fails
        self.fails: dict[str, BaseException] = {}
        self.asleep: list[str] = []
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=False),
            parallel_config=SimpleNamespace(worker_extension_cls=extension),
            model_config=SimpleNamespace(is_multimodal_model=False),
            weight_transfer_config=None,
            kv_transfer_config=None,
            ec_transfer_config=None,
        )
        self.output_processor = SimpleNamespace(request_states={})

    def answer(self, method: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        if method == "refit" and self.commits:
            self.version = arguments[0]
        self.fail(method)
        if method == "refit_serving_version":
            return {"version": self.version}
        return {"asleep": self.asleep}

    def fail(self, method: str) -> None:
        if method in self.fails:
            raise self.fails[method]


class Llm(Engine):
    """``vllm.LLM``."""

    def __init__(self, extension: str = EXTENSION) -> None:
        super().__init__(extension)
        self.llm_engine = self
        self.resets = True

    def has_unfinished_requests(self) -> bool:
        return False

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        return [self.answer(method, args)]

    def is_sleeping(self) -> bool:
        return self.paused

    def sleep(self, level: int, mode: str) -> None:
        self.paused = True

    def wake_up(self, tags: list[str]) -> None:
        self.paused = False

    def reset_prefix_cache(self, **_: bool) -> bool:
        self.fail("reset_prefix_cache")
        return self.resets


class AsyncLlm(Engine):
    """``AsyncLLM`` and its client of engine cores, of ``replicas``."""

    def __init__(self, extension: str = EXTENSION, replicas: int = 1) -> None:
        super().__init__(extension)
        self.engine_core = self
        self.core_engines = list(range(replicas))
        self.engine_ranks_managed = [0]
        self.output_handler: asyncio.Task[None] | None = None
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.wait: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.queues: list[asyncio.Queue[Any]] = []
        self.other_replicas: dict[str, Any] = {}

    def _run_output_handler(self) -> None:
        async def read() -> None:
            while not isinstance(found := await self.outputs_queue.get(), Exception):
                assert not found.outputs

        if self.output_handler is None:
            self.output_handler = asyncio.create_task(read())

    async def _call_utility_async(self, utility: str, *arguments: Any, engine: int) -> Any:
        if self.output_handler is not None and self.output_handler.done():
            raise RuntimeError("EngineDeadError")
        method = arguments[0] if utility == "collective_rpc" else utility
        if method == "refit":
            await self.wait()
        if engine and method in self.other_replicas:
            return self.other_replicas[method]
        if utility == "reset_prefix_cache":
            self.fail(utility)
            return True
        return [self.answer(method, arguments[2])]

    async def pause_generation(self, **_: Any) -> None:
        self.fail("pause_generation")
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def add_request(self, *_: Any, **__: Any) -> Any:
        assert not self.paused
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.queues.append(queue)

        async def get() -> Any:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            return found

        return SimpleNamespace(get_nowait=lambda: None, get=get, put=queue.put_nowait)

    def finish(self, request: str) -> None:
        output = SimpleNamespace(
            request_id=request, finished=True, outputs=[SimpleNamespace(index=0, token_ids=[7])]
        )
        self.queues[-1].put_nowait(output)

    async def abort(self, request: str) -> None:
        pass


async def met(llm: AsyncLlm) -> AsyncVllmDriver:
    driver = AsyncVllmDriver(llm)
    await driver.init_refit({}, 1, RefitConfig())
    return driver


async def met_a_late_trainer(llm: AsyncLlm) -> tuple[AsyncVllmDriver, asyncio.Event]:
    """The driver, whose refits wait for the event."""
    trainer = asyncio.Event()
    llm.wait = trainer.wait
    return await met(llm), trainer


def request_of(driver: AsyncVllmDriver) -> asyncio.Task[Any]:
    async def last() -> Any:
        async for found in driver.generate(
            "x", SimpleNamespace(output_kind=SimpleNamespace(name="FINAL")), "r"
        ):
            output = found
        return output

    return asyncio.create_task(last())


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)
