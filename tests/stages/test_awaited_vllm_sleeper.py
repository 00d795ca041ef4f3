"""What the adapter of an ``AsyncLLM`` checks before it calls vLLM; with a real engine in ``tests/vllm``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlrefit.integration.colocated.stages import StageRefused
from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
from rlrefit.workers.engines.vllm.colocated import AwaitedVllmSleeper
from rlrefit.workers.engines.vllm.driver import EXTENSION

from .pool import in_a_loop

DIRTY = {"refit_error": {"type": "EngineDirty", "text": "a level 2 sleep discarded the weights"}}


class Llm:
    """An ``AsyncLLM`` of two replicas that has what the driver asks, and writes down what it is told."""

    def __init__(self, *, sleep_mode: bool = True, asleep: Sequence[Sequence[str]] = ((), ())) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
            device_config=SimpleNamespace(device_type="cuda"),
            weight_transfer_config=None,
            kv_transfer_config=None,
            ec_transfer_config=None,
            parallel_config=SimpleNamespace(worker_extension_cls=EXTENSION),
        )
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core, self.core_engines = self, range(len(asleep))
        self.output_handler: asyncio.Task[None] | None = None
        self.answers: dict[str, Sequence[Any]] = {
            "refit_asleep": [{"asleep": list(of)} for of in asleep],
            "refit_serving_version": [{"version": 3}] * len(asleep),
        }
        self.told: list[Any] = []
        self.admitted = asyncio.Event()
        self.admitted.set()

    def _run_output_handler(self) -> None:
        self.output_handler = self.output_handler or asyncio.create_task(asyncio.Event().wait())

    async def _call_utility_async(self, utility: str, method: str, *arguments: Any, engine: int) -> Any:
        self.told.append((method, engine))
        return [self.answers[method][engine]]

    async def sleep(self, level: int) -> None:
        self.told.append(level)

    async def wake_up(self, tags: list[str]) -> None:
        self.told.append(tags)

    async def add_request(self, request_id: str, *_: Any, **__: Any) -> Any:
        await self.admitted.wait()
        self.output_processor.request_states[request_id] = None
        return SimpleNamespace(get_nowait=lambda: None, get=asyncio.Event().wait, put=lambda error: None)

    async def abort(self, requests: Any) -> None:
        self.told.append(("abort", requests))
        for request in [requests] if isinstance(requests, str) else requests:
            self.output_processor.request_states.pop(request, None)

    @property
    def moved(self) -> list[Any]:
        """What changes an engine."""
        return [told for told in self.told if not isinstance(told, tuple)]


def _request(driver: AsyncVllmDriver, name: str = "r") -> asyncio.Task[None]:
    async def run() -> None:
        async for _ in driver.generate("x", SimpleNamespace(output_kind=SimpleNamespace(name="FINAL")), name):
            pass

    return asyncio.create_task(run())


async def _settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@in_a_loop
async def test_an_engine_without_sleep_mode_is_refused_on_a_gpu() -> None:
    drivers = [AsyncVllmDriver(Llm()), AsyncVllmDriver(Llm(sleep_mode=False))]
    AwaitedVllmSleeper(drivers[:1])
    with pytest.raises(RefitError, match="engine 1 was started without enable_sleep_mode"):
        AwaitedVllmSleeper(drivers)


@in_a_loop
async def test_a_request_that_is_about_to_begin_is_seen_and_one_that_comes_later_waits() -> None:
    """Between the look at the requests and the sleep none can slip in, which vLLM would abort."""
    llm, idle = Llm(), Llm()
    driver = AsyncVllmDriver(llm)
    sleeper = AwaitedVllmSleeper([driver, AsyncVllmDriver(idle)])
    llm.admitted.clear()
    beginning = _request(driver)
    await _settled()
    sleeping = asyncio.create_task(asyncio.to_thread(sleeper.sleep, 2))
    await asyncio.sleep(0.1)
    llm.admitted.set()
    with pytest.raises(StageRefused, match="engine 0 has unfinished requests"):
        await sleeping
    assert llm.moved == idle.moved == []  # none sleeps where one is busy
    beginning.cancel()
    await _settled()

    plain, late = llm.sleep, []

    async def slow(level: int) -> None:
        late.append(_request(driver, "late"))
        await _settled()
        assert not driver.busy
        await plain(level)

    llm.sleep = slow  # type: ignore[method-assign]
    await asyncio.to_thread(sleeper.sleep, 2)
    await _settled()
    assert driver.busy
    late[0].cancel()


@pytest.mark.parametrize(
    ("tags", "why"),
    [(["weights"], "weights is awake already"), (["kv_cache", "cuda_graph"], "it knows no cuda_graph")],
)
@in_a_loop
async def test_a_wake_up_that_vllm_would_pass_over_is_refused(tags: list[str], why: str) -> None:
    llm = Llm(asleep=(("kv_cache",), ("kv_cache",)))
    sleeper = AwaitedVllmSleeper([AsyncVllmDriver(llm)])
    with pytest.raises(StageRefused, match=why):
        await asyncio.to_thread(sleeper.wake, tags)
    assert not llm.moved
    await asyncio.to_thread(sleeper.wake, ["kv_cache"])
    assert llm.moved == [["kv_cache"]]


@pytest.mark.parametrize("alone", [True, False], ids=["the driver's", "the sleeper's"])
@in_a_loop
async def test_waiting_requests_are_not_woken_onto_weights_that_are_no_versions(alone: bool) -> None:
    llm = Llm(asleep=(("kv_cache", "weights"),) * 2)
    driver = AsyncVllmDriver(llm)
    sleeper = AwaitedVllmSleeper([driver])

    async def wake(*tags: str) -> None:
        await (driver.wake_up(tags) if alone else asyncio.to_thread(sleeper.wake, tags))

    waiting = _request(driver)
    await _settled()
    llm.answers["refit_serving_version"] = [{"version": 3}, DIRTY]
    with pytest.raises(StageRefused, match=r"weights and kv_cache awake .*no version whole .*level 2"):
        await wake("weights", "kv_cache")
    assert not llm.moved
    await wake("weights")
    llm.answers["refit_asleep"] = [{"asleep": ["kv_cache"]}] * 2
    with pytest.raises(StageRefused, match="kv_cache awake the engine would run the requests that wait"):
        await wake("kv_cache")
    llm.answers["refit_serving_version"] = [{"version": 4}] * 2
    await wake("kv_cache")
    assert llm.moved == [["weights"], ["kv_cache"]]
    waiting.cancel()


@in_a_loop
async def test_requests_that_a_failed_refit_has_ended_are_not_woken() -> None:
    llm = Llm(asleep=(("kv_cache",),) * 2)
    driver = AsyncVllmDriver(llm)
    waiting = _request(driver)
    await _settled()
    driver._end_requests(RefitError("no trainer came"))
    llm.answers["refit_serving_version"] = [DIRTY] * 2
    await driver.wake_up(["kv_cache"])
    assert llm.told[0] == ("abort", ["r"])
    assert llm.moved == [["kv_cache"]]
    waiting.cancel()


@in_a_loop
async def test_a_sleep_whose_caller_is_cancelled_ends_without_it_and_requests_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = Llm()
    driver = AsyncVllmDriver(llm)
    plain, may = llm.sleep, asyncio.Event()

    async def slow(level: int) -> None:
        await may.wait()
        await plain(level)

    llm.sleep = slow  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(driver.sleep(1), 0.01)
    late = _request(driver)
    await _settled()
    assert not driver.busy
    may.set()
    await _settled()
    assert llm.moved == [1]
    assert driver.busy
    late.cancel()
    assert "sleep (level 1), whose caller was cancelled, has succeeded" in caplog.text


@in_a_loop
async def test_an_engine_that_ends_as_it_goes_to_sleep_is_not_waited_for() -> None:
    llm = Llm()
    llm.output_handler = asyncio.create_task(asyncio.sleep(0.05))

    async def never(level: int) -> None:
        await asyncio.Event().wait()

    llm.sleep = never  # type: ignore[method-assign]
    with pytest.raises(RefitError, match="the engine ended"):
        await asyncio.to_thread(AwaitedVllmSleeper([AsyncVllmDriver(llm)]).sleep, 2)
