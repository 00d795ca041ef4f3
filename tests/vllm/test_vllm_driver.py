"""The drivers over an engine that fails or is cut off in every way, without vLLM's processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.workers.vllm.driver import EXTENSION, AsyncVllmDriver, VllmDriver

# As vLLM 0.21 raises at its client, of no kind of its own, where blocks stay held.
HELD = Exception(
    "Call to reset_prefix_cache method failed: Failed to reset KV cache even when all the running"
)


class _Engine:
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
        if method == "nccl_xfer_refit" and self.commits:
            self.version = arguments[0]
        self.fail(method)
        if method == "refit_serving_version":
            return {"version": self.version}
        return {"asleep": self.asleep}

    def fail(self, method: str) -> None:
        if method in self.fails:
            raise self.fails[method]


class _Llm(_Engine):
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


class _AsyncLlm(_Engine):
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
        if method == "nccl_xfer_refit":
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


async def _met(llm: _AsyncLlm) -> AsyncVllmDriver:
    driver = AsyncVllmDriver(llm)
    await driver.init_refit({}, 1, RefitConfig())
    return driver


def _request(driver: AsyncVllmDriver) -> asyncio.Task[Any]:
    async def last() -> Any:
        async for found in driver.generate(
            "x", SimpleNamespace(output_kind=SimpleNamespace(name="FINAL")), "r"
        ):
            output = found
        return output

    return asyncio.create_task(last())


async def _settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [_Llm, _AsyncLlm])
def test_an_engine_without_our_workers_is_refused_at_once_with_the_argument_to_give(kind: type[_Engine]):
    make = VllmDriver if kind is _Llm else AsyncVllmDriver
    with pytest.raises(RefitError, match=f'without rlrefit\'s workers.*worker_extension_cls="{EXTENSION}"'):
        make(kind(extension=""))


def test_somebody_elses_workers_are_told_by_their_first_answer():
    absent = Exception(
        "Call to collective_rpc method failed: 'Worker' object has no attribute 'refit_asleep'"
    )
    llm = _Llm("somebody.Elses")
    llm.fails["refit_asleep"] = absent
    with pytest.raises(RefitError, match=r"no attribute 'refit_asleep'.*driver\.EXTENSION"):
        VllmDriver(llm)

    async def meet() -> None:
        engine = _AsyncLlm("somebody.Elses")
        engine.fails["refit_asleep"] = absent
        with pytest.raises(RefitError, match=r"no attribute 'refit_asleep'.*driver\.EXTENSION"):
            await _met(engine)

    asyncio.run(meet())


@pytest.mark.parametrize("raised", [True, False])
def test_prefixes_that_stay_held_leave_an_llm_paused_until_a_refit_drops_them(raised: bool):
    llm = _Llm()
    driver = VllmDriver(llm)
    driver.init_refit({}, 1, RefitConfig())
    told = "Failed to reset KV cache" if raised else "a part of its cache was not reset"
    if raised:
        llm.fails["reset_prefix_cache"] = HELD
    else:
        llm.resets = False
    for version in (7, 8):
        with pytest.raises(RefitError, match=rf"cached prefixes of the old weights.*{told}"):
            driver.refit(version)
        assert llm.paused
        with pytest.raises(EngineDirty, match=rf"{told}.*Refit again"):
            driver.generate(["x"], None)
    # Refits that fail before they write don't make those prefixes fresh.
    llm.commits, llm.fails["nccl_xfer_refit"] = False, RefitError("refused")
    with pytest.raises(RefitError, match="refused"):
        driver.refit(9)
    assert llm.paused
    assert driver.version == 8
    llm.commits = llm.resets = True
    llm.fails.clear()
    driver.refit(10)
    assert not llm.paused
    driver._require_usable()


@pytest.mark.parametrize("error", [ValueError("vLLM's own"), RefitError("ours"), KeyboardInterrupt()])
def test_a_refit_whose_answer_is_lost_leaves_an_llm_that_refuses(error: BaseException):
    llm = _Llm()
    driver = VllmDriver(llm)
    driver.init_refit({}, 1, RefitConfig())
    llm.fails["nccl_xfer_refit"] = error  # after the worker has committed
    with pytest.raises(type(error)):
        driver.refit(7)
    with pytest.raises(EngineDirty, match="cut off" if isinstance(error, KeyboardInterrupt) else str(error)):
        driver.generate(["x"], None)
    if not isinstance(error, KeyboardInterrupt):
        assert llm.paused
        assert driver.version == 7 == driver.serving_version()
    llm.fails.clear()
    driver.refit(8)
    assert not llm.paused
    driver._require_usable()


def test_prefixes_that_stay_held_end_the_requests_of_an_async_llm():
    async def scene() -> None:
        llm = _AsyncLlm()
        driver = await _met(llm)
        running = _request(driver)
        await _settled()
        llm.fails["reset_prefix_cache"] = HELD
        with pytest.raises(RefitError, match=r"cached prefixes of the old weights.*Failed to reset KV cache"):
            await driver.refit(7)
        for refused in (running, _request(driver)):
            with pytest.raises(EngineDirty, match="Failed to reset KV cache"):
                await asyncio.wait_for(refused, 5)
        assert llm.paused
        llm.fails.clear()
        await driver.refit(8)
        assert not llm.paused
        served = _request(driver)
        await _settled()
        llm.finish("r")
        assert (await served).versions == ((8,),)

    asyncio.run(scene())


def test_a_refit_whose_caller_is_cancelled_ends_without_it_and_requests_wait_for_it(
    caplog: pytest.LogCaptureFixture,
):
    async def scene() -> None:
        llm = _AsyncLlm()
        trainer = asyncio.Event()
        llm.wait = trainer.wait
        driver = await _met(llm)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.refit(7), 0.01)
        late = _request(driver)
        await _settled()
        assert llm.paused
        assert not llm.queues
        trainer.set()
        await _settled()
        assert not llm.paused
        assert driver.version == 7 == await driver.serving_version()
        llm.finish("r")
        assert (await late).versions == ((7,),)

    asyncio.run(scene())
    assert "refit 7, whose caller was cancelled, has succeeded" in caplog.text


def test_a_refit_that_fails_after_its_caller_was_cancelled_is_told_to_requests_and_log(
    caplog: pytest.LogCaptureFixture,
):
    async def scene() -> None:
        llm = _AsyncLlm()
        trainer = asyncio.Event()
        llm.wait = trainer.wait
        driver = await _met(llm)
        running = _request(driver)
        await _settled()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.refit(7), 0.01)
        llm.fails = dict.fromkeys(("nccl_xfer_refit", "refit_serving_version"), RefitError("no trainer came"))
        trainer.set()
        for refused in (running, _request(driver)):
            with pytest.raises(EngineDirty, match="no trainer came"):
                await asyncio.wait_for(refused, 5)

    asyncio.run(scene())
    assert "refit 7, whose caller was cancelled, has failed: no trainer came" in caplog.text


def test_a_refit_that_waits_for_another_can_be_cancelled():
    async def scene() -> None:
        llm = _AsyncLlm()
        trainer = asyncio.Event()
        llm.wait = trainer.wait
        driver = await _met(llm)
        first = asyncio.create_task(driver.refit(7))
        await _settled()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.refit(8), 0.01)
        trainer.set()
        await first
        await _settled()
        assert driver.version == 7 == llm.version

    asyncio.run(scene())


@pytest.mark.parametrize("stage", ["pause_generation", "nccl_xfer_refit"])
def test_an_async_llm_that_raises_what_is_not_ours_leaves_nobody_waiting(stage: str):
    async def scene() -> None:
        llm = _AsyncLlm()
        driver = await _met(llm)
        running = _request(driver)
        await _settled()
        llm.fails[stage] = RuntimeError("vLLM's own")
        with pytest.raises(RuntimeError, match="vLLM's own"):
            await driver.refit(7)
        if stage == "pause_generation":  # the old weights are whole: the engine serves on
            llm.finish("r")
            assert (await asyncio.wait_for(running, 5)).versions == ((-1,),)
            assert driver.version == 3
            return
        for refused in (running, _request(driver)):
            with pytest.raises(EngineDirty, match="RuntimeError: vLLM's own"):
                await asyncio.wait_for(refused, 5)
        assert driver.version == 7 == llm.version

    asyncio.run(scene())


def test_an_async_llm_that_sleeps_in_part_is_refitted_and_neither_paused_anew_nor_resumed():
    """To pause, data-parallel replicas would take steps together, in memory that is not there."""

    async def scene() -> None:
        llm = _AsyncLlm()
        driver = await _met(llm)
        llm.paused, llm.asleep = True, ["kv_cache"]
        llm.fails["pause_generation"] = AssertionError("paused anew")
        for version in (7, 8):
            await driver.refit(version, mode="wait")
            assert driver.version == version == llm.version
            assert llm.paused

    asyncio.run(scene())


def test_an_engine_that_ends_in_its_first_refit_and_before_any_request_is_not_waited_for():
    llm = _AsyncLlm()  # outside an event loop, where vLLM starts no reader of outputs
    llm.wait = asyncio.Event().wait

    async def scene() -> None:
        driver = await _met(llm)
        refitting = asyncio.create_task(driver.refit(7))
        await _settled()
        assert llm.paused
        llm.outputs_queue.put_nowait(RuntimeError("EngineDeadError"))
        with pytest.raises(RefitError, match="the engine ended"):
            await asyncio.wait_for(asyncio.shield(refitting), 5)
        with pytest.raises(EngineDirty, match="the engine ended"):
            await asyncio.wait_for(_request(driver), 5)

    asyncio.run(scene())


@pytest.mark.parametrize("kind", [_Llm, _AsyncLlm])
def test_an_engine_whose_connector_would_serve_blocks_of_old_weights_is_refused_at_once(kind: type[_Engine]):
    make, engine = VllmDriver if kind is _Llm else AsyncVllmDriver, kind()
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    engine.vllm_config.kv_transfer_config = transfer
    with pytest.raises(RefitError, match="kv_transfer_config: OffloadingConnector does not drop"):
        make(engine)


@pytest.mark.parametrize(
    ("method", "answer", "text"),
    [
        ("refit_serving_version", [{"version": 2}], r"different versions: \[7, 2\]"),
        (
            "nccl_xfer_refit",
            [{"refit_error": {"type": "PeerLost", "text": "a replica's"}}],
            "worker 1: a replica's",
        ),
        ("reset_prefix_cache", False, "a part of its cache was not reset"),
    ],
)
def test_what_any_data_parallel_replica_answers_is_heard(method: str, answer: Any, text: str):
    async def scene() -> None:
        llm = _AsyncLlm(replicas=2)
        driver = await _met(llm)
        assert len(await driver.refit(7)) == 2
        llm.other_replicas[method] = answer
        with pytest.raises(RefitError, match=text):
            await (driver.serving_version() if method == "refit_serving_version" else driver.refit(8))

    asyncio.run(scene())
