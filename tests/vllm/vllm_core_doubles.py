"""vLLM's own engine core without a model, over one worker that answers as it is told, and the two engines around such cores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.common.answers import answer
from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
from rlrefit.workers.engines.vllm.driver import VllmDriver
from rlrefit.workers.engines.vllm.patches import stay_paused_while_asleep, watch_weight_updates
from rlrefit.workers.engines.vllm.transfer_engine import RlrefitTransferEngine


class Worker(Executor):
    """vLLM's own bookkeeping of sleep over one worker.

    Attributes:
        version: that it serves.
        commits: whether a refit that fails has written all before.
        fails: methods that raise, those of rlrefit's as a worker's answer.
    """

    def __init__(self) -> None:
        self.is_sleeping, self.sleeping_tags, self.calls = False, set(), []
        self.version, self.commits = 6, True
        self.fails: dict[str, BaseException] = {}
        self.engine = object.__new__(RlrefitTransferEngine)
        self.engine._refit = SimpleNamespace(
            guard=SimpleNamespace(require_awake=lambda: None),
            serving_version=lambda: 7,
            refit_state=SimpleNamespace(version=7),
            refit=lambda version: {"version": version},
        )
        self.engine._engine, self.engine._updating, self.engine._committed = "nccl_xfer", False, 0

    def _init_executor(self) -> None:
        raise AssertionError("vLLM's constructor was not to run")

    def check_health(self) -> None:
        raise AssertionError("nobody asks")

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(method)
        if method == "refit" and (self.commits or method not in self.fails):
            [self.version] = args
        if isinstance(self.fails.get(method), RefitError):
            return [answer(lambda: self._fail(method))]
        if method in self.fails:
            self._fail(method)
        transfer = {
            "start_weight_update": self.engine.start,
            "update_weights": self.engine.update,
            "finish_weight_update": self.engine.finish,
        }
        if method in transfer:
            return [transfer[method](None, *args, **(kwargs or {}))]
        return [{"asleep": sorted(self.sleeping_tags), "version": self.version}]

    def _fail(self, method: str) -> dict[str, Any]:
        raise self.fails[method]


class Scheduler:
    """``holds``: why prefixes of old weights can't be dropped; ``False`` where vLLM answers so."""

    def __init__(self) -> None:
        self.pause_state, self.running = PauseState.UNPAUSED, []
        self.holds: Exception | bool | None = None

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_unfinished_requests(self) -> bool:
        return False

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests
        if isinstance(self.holds, Exception):
            raise self.holds
        return self.holds is None


def core_of(kind: type[EngineCore] = EngineCore, backend: str | None = "rlrefit", extension: str = "") -> Any:
    stay_paused_while_asleep()
    watch_weight_updates()
    core: Any = object.__new__(kind)
    core.vllm_config = SimpleNamespace(
        weight_transfer_config=None if backend is None else SimpleNamespace(backend=backend),
        parallel_config=SimpleNamespace(worker_extension_cls=extension),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        kv_transfer_config=None,
        ec_transfer_config=None,
        model_config=SimpleNamespace(is_multimodal_model=False),
    )
    core.model_executor, core.scheduler = Worker(), Scheduler()
    return core


class Llm:
    """``vllm.LLM`` around a core without requests."""

    def __init__(self, core: Any) -> None:
        self.llm_engine, self.vllm_config = self, core.vllm_config
        self.output_processor = SimpleNamespace(request_states={})
        self.sleep, self.wake_up, self.is_sleeping = core.sleep, core.wake_up, core.is_sleeping
        self.reset_prefix_cache, self._rpc = core.reset_prefix_cache, core.collective_rpc

    def has_unfinished_requests(self) -> bool:
        return False

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return self._rpc(method, None, args)


class AsyncLlm:
    """``AsyncLLM`` and its client, around cores of replicas, whose requests a test finishes.

    Attributes:
        wait: awaited before each refit.
        fails: calls of its own that raise.
        queues: of the requests that it was given.
    """

    def __init__(self, *cores: Any) -> None:
        self.vllm_config, self.engine_core, self.core_engines = cores[0].vllm_config, self, cores
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_ranks_managed, self.outputs_queue = [0], asyncio.Queue[Any]()
        self.output_handler: asyncio.Task[None] | None = None
        self.wait: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.fails: dict[str, BaseException] = {}
        self.queues: list[asyncio.Queue[Any]] = []

    @property
    def paused(self) -> bool:
        return all(core.is_scheduler_paused() for core in self.core_engines)

    def _run_output_handler(self) -> None:
        async def read() -> None:
            while not isinstance(found := await self.outputs_queue.get(), Exception):
                assert not found.outputs

        if self.output_handler is None:
            self.output_handler = asyncio.create_task(read())

    async def _call_utility_async(self, utility: str, *arguments: Any, engine: Any) -> Any:
        if self.output_handler is not None and self.output_handler.done():
            raise RuntimeError("EngineDeadError")
        if arguments[:1] == ("refit",):
            await self.wait()
        return getattr(engine, utility)(*arguments)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        if "pause_generation" in self.fails:
            raise self.fails["pause_generation"]
        for core in self.core_engines:
            core.pause_scheduler(mode, clear_cache)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        """What ``AsyncLLM``'s own ``pause_generation`` asks of its client."""
        await self.pause_generation(mode, clear_cache)

    async def resume_generation(self) -> None:
        for core in self.core_engines:
            core.resume_scheduler()

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
        completion = SimpleNamespace(index=0, token_ids=[7])
        self.queues[-1].put_nowait(SimpleNamespace(request_id=request, finished=True, outputs=[completion]))

    async def abort(self, request: str) -> None:
        pass


def script_driver(core: Any) -> VllmDriver:
    driver = VllmDriver(Llm(core))
    driver.join_refit({}, 1, RefitConfig())
    return driver


async def server_driver(llm: AsyncLlm) -> AsyncVllmDriver:
    driver = AsyncVllmDriver(llm)
    await driver.join_refit({}, 1, RefitConfig())
    return driver
