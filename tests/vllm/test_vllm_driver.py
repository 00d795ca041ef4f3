"""The drivers over engines that are not as they have to be, that fail, and that are cut off in every way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.interface import PauseState
from vllm_core_doubles import AsyncLlm, Llm, core_of, script_driver, server_driver

from rlrefit.integration.errors import EngineDirty, PeerLost, RefitError
from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
from rlrefit.workers.engines.vllm.driver import EXTENSION, VllmDriver


def _meet(kind: type[Llm | AsyncLlm], core: Any) -> None:
    if kind is Llm:
        VllmDriver(Llm(core))
    else:
        asyncio.run(server_driver(AsyncLlm(core)))


@pytest.mark.parametrize("kind", [Llm, AsyncLlm])
def test_an_engine_without_our_workers_is_refused_with_the_argument_to_give(kind: type[Llm | AsyncLlm]):
    with pytest.raises(RefitError, match=f'worker_extension_cls="{EXTENSION}"'):
        _meet(kind, core_of(backend=None))
    # Somebody else's are told by their first answer.
    core = core_of(backend=None, extension="somebody.Elses")
    core.model_executor.fails["refit_asleep"] = AttributeError(
        "'Worker' object has no attribute 'refit_asleep'"
    )
    with pytest.raises(RefitError, match=r"no attribute 'refit_asleep'.*driver\.EXTENSION"):
        _meet(kind, core)


@pytest.mark.parametrize("kind", [Llm, AsyncLlm])
def test_an_engine_whose_connector_would_serve_blocks_of_old_weights_is_refused(kind: type[Llm | AsyncLlm]):
    core = core_of()
    connector = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    core.vllm_config.kv_transfer_config = connector
    with pytest.raises(RefitError, match="kv_transfer_config: OffloadingConnector"):
        _meet(kind, core)


@pytest.mark.parametrize("holds", [RuntimeError("blocks are held"), False])
def test_prefixes_that_stay_held_leave_an_llm_paused_until_a_refit_drops_them(holds: Any):
    core = core_of()
    driver = script_driver(core)
    core.scheduler.holds = holds
    for version in (7, 8):
        with pytest.raises(RefitError, match="cached prefixes of the old weights"):
            driver.refit(version)
        assert core.is_scheduler_paused()
        with pytest.raises(EngineDirty, match="cached prefixes"):
            driver.generate(["x"], None)
    # Refits that fail before they write don't make those prefixes fresh.
    core.scheduler.holds = None
    core.model_executor.commits = False
    core.model_executor.fails["refit"] = RefitError("refused")
    with pytest.raises(RefitError, match="refused"):
        driver.refit(9)
    assert core.is_scheduler_paused()
    assert driver.version == 8
    core.model_executor.fails.clear()
    driver.refit(10)
    assert not core.is_scheduler_paused()
    driver._require_usable()


@pytest.mark.parametrize("error", [ValueError("vLLM's own"), RefitError("ours"), KeyboardInterrupt()])
def test_a_refit_whose_answer_is_lost_leaves_an_llm_that_refuses(error: BaseException):
    core = core_of()
    driver = script_driver(core)
    core.model_executor.fails["refit"] = error  # after the worker has committed
    with pytest.raises(type(error)):
        driver.refit(7)
    with pytest.raises(EngineDirty, match=str(error) or "interrupted"):
        driver.generate(["x"], None)
    if not isinstance(error, KeyboardInterrupt):
        assert core.is_scheduler_paused()
        assert driver.version == 7 == driver.serving_version()
    core.model_executor.fails.clear()
    driver.refit(8)
    assert not core.is_scheduler_paused()
    driver._require_usable()


Scene = Callable[[AsyncLlm, AsyncVllmDriver], Awaitable[None]]


def _in_a_loop(scene: Scene, replicas: int = 1) -> None:
    async def meet() -> None:
        llm = AsyncLlm(*(core_of() for _ in range(replicas)))
        await scene(llm, await server_driver(llm))

    asyncio.run(meet())


def _late_trainer(llm: AsyncLlm) -> asyncio.Event:
    """Refits wait for it."""
    trainer = asyncio.Event()
    llm.wait = trainer.wait
    return trainer


def _worker(llm: AsyncLlm) -> Any:
    return llm.core_engines[0].model_executor


def _request(driver: AsyncVllmDriver) -> asyncio.Task[Any]:
    async def last() -> Any:
        parameters = SimpleNamespace(output_kind=SimpleNamespace(name="FINAL"))
        async for found in driver.generate("x", parameters, "r"):
            output = found
        return output

    return asyncio.create_task(last())


async def _settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def _refused(told: str, *requests: asyncio.Task[Any]) -> None:
    for request in requests:
        with pytest.raises(EngineDirty, match=told):
            await asyncio.wait_for(request, 5)


def test_prefixes_that_stay_held_end_the_requests_of_an_async_llm():
    async def scene(llm: AsyncLlm, driver: AsyncVllmDriver) -> None:
        running = _request(driver)
        await _settled()
        llm.core_engines[0].scheduler.holds = RuntimeError("blocks are held")
        with pytest.raises(RefitError, match=r"cached prefixes of the old weights.*blocks are held"):
            await driver.refit(7)
        await _refused("blocks are held", running, _request(driver))
        assert llm.paused
        llm.core_engines[0].scheduler.holds = None
        await driver.refit(8)
        assert not llm.paused
        served = _request(driver)
        await _settled()
        llm.finish("r")
        assert (await served).versions == ((8,),)

    _in_a_loop(scene)


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_refit_whose_caller_is_cancelled_ends_without_it_and_requests_wait_for_it(
    succeeds: bool, caplog: pytest.LogCaptureFixture
):
    async def scene(llm: AsyncLlm, driver: AsyncVllmDriver) -> None:
        trainer = _late_trainer(llm)
        running = None if succeeds else _request(driver)
        await _settled()
        begun = len(llm.queues)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.refit(7), 0.01)
        late = _request(driver)
        await _settled()
        assert llm.paused
        assert len(llm.queues) == begun
        if running is not None:
            _worker(llm).fails = dict.fromkeys(
                ("refit", "refit_serving_version"), RefitError("no trainer came")
            )
            trainer.set()
            await _refused("no trainer came", running, late)
            return
        trainer.set()
        await _settled()
        assert not llm.paused
        assert driver.version == 7 == await driver.serving_version()
        llm.finish("r")
        assert (await late).versions == ((7,),)

    _in_a_loop(scene)
    assert ("has succeeded" if succeeds else "has failed") in caplog.text


def test_a_refit_that_waits_for_another_can_be_cancelled():
    async def scene(llm: AsyncLlm, driver: AsyncVllmDriver) -> None:
        trainer = _late_trainer(llm)
        first = asyncio.create_task(driver.refit(7))
        await _settled()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.refit(8), 0.01)
        trainer.set()
        await first
        await _settled()
        assert driver.version == 7 == _worker(llm).version

    _in_a_loop(scene)


@pytest.mark.parametrize("stage", ["pause_generation", "refit"])
def test_an_async_llm_that_raises_what_is_not_ours_leaves_nobody_waiting(stage: str):
    async def scene(llm: AsyncLlm, driver: AsyncVllmDriver) -> None:
        running = _request(driver)
        await _settled()
        failing = llm if stage == "pause_generation" else _worker(llm)
        failing.fails[stage] = RuntimeError("vLLM's own")
        with pytest.raises(RuntimeError, match="vLLM's own"):
            await driver.refit(7)
        if stage == "pause_generation":  # the old weights are whole: the engine serves on
            llm.finish("r")
            assert (await asyncio.wait_for(running, 5)).versions == ((-1,),)
            assert driver.version == 6
            return
        await _refused("RuntimeError: vLLM's own", running, _request(driver))
        assert driver.version == 7 == _worker(llm).version

    _in_a_loop(scene)


def test_an_async_llm_that_sleeps_in_part_is_refitted_and_neither_paused_anew_nor_resumed():
    """To pause, data-parallel replicas would take steps together, in memory that is not there."""

    async def scene(llm: AsyncLlm, driver: AsyncVllmDriver) -> None:
        [core] = llm.core_engines
        core.scheduler.pause_state = PauseState.PAUSED_ALL
        core.model_executor.is_sleeping, core.model_executor.sleeping_tags = True, {"kv_cache"}
        llm.fails["pause_generation"] = AssertionError("paused anew")
        for version in (7, 8):
            await driver.refit(version, mode="wait")
            assert driver.version == version == _worker(llm).version
            assert llm.paused

    _in_a_loop(scene)


def test_an_engine_that_ends_in_its_first_refit_and_before_any_request_is_not_waited_for():
    llm = AsyncLlm(core_of())  # outside an event loop, where vLLM starts no reader of outputs
    llm.wait = asyncio.Event().wait

    async def scene() -> None:
        driver = await server_driver(llm)
        refitting = asyncio.create_task(driver.refit(7))
        await _settled()
        assert llm.paused
        llm.outputs_queue.put_nowait(RuntimeError("EngineDeadError"))
        with pytest.raises(RefitError, match="the engine ended"):
            await asyncio.wait_for(asyncio.shield(refitting), 5)
        await _refused("the engine ended", _request(driver))

    asyncio.run(scene())


def _fail_its_refit(core: Any) -> None:
    core.model_executor.fails["refit"] = PeerLost("a replica's")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda core: setattr(core.model_executor, "version", 2), r"different versions: \[7, 2\]"),
        (_fail_its_refit, "worker 1: a replica's"),
        (lambda core: setattr(core.scheduler, "holds", False), "cached prefixes"),
    ],
    ids=["another version", "a failure", "old prefixes"],
)
def test_what_any_data_parallel_replica_answers_is_heard(change: Callable[[Any], None], told: str):
    async def scene(llm: AsyncLlm, driver: AsyncVllmDriver) -> None:
        assert len(await driver.refit(7)) == 2
        change(llm.core_engines[1])
        with pytest.raises(RefitError, match=told):
            await (driver.serving_version() if "versions" in told else driver.refit(8))

    _in_a_loop(scene, replicas=2)
