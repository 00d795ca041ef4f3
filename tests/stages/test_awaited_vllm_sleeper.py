"""What the adapter of an ``AsyncLLM`` checks before it calls vLLM; with a real engine in ``tests/vllm``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlrefit.integration.colocated.stages import StageRefused
from rlrefit.integration.errors import RefitError
from rlrefit.workers.engines.vllm.async_driver import AsyncVllmDriver
from rlrefit.workers.engines.vllm.colocated import AwaitedVllmSleeper
from rlrefit.workers.engines.vllm.driver import EXTENSION

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
            "refit_empty_cache": [{}] * len(asleep),
            "refit_memory": [dict(PROCESS, allocated=rank) for rank in range(len(asleep))],
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


PROCESS = {
    "process": "here",
    "device": "GPU-0",
    **dict.fromkeys(("reserved", "peak_allocated", "peak_reserved"), 2),
    **dict.fromkeys(("device_used", "device_peak", "device_total"), 5),
}


def _in_a_loop(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 60))


def _request(driver: AsyncVllmDriver, name: str = "r") -> asyncio.Task[None]:
    async def run() -> None:
        async for _ in driver.generate("x", SimpleNamespace(output_kind=SimpleNamespace(name="FINAL")), name):
            pass

    return asyncio.create_task(run())


async def _settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_an_engine_without_sleep_mode_is_refused_on_a_gpu() -> None:
    async def scene() -> None:
        drivers = [AsyncVllmDriver(Llm()), AsyncVllmDriver(Llm(sleep_mode=False))]
        AwaitedVllmSleeper(drivers[:1])
        with pytest.raises(RefitError, match="engine 1 was started without enable_sleep_mode"):
            AwaitedVllmSleeper(drivers)

    _in_a_loop(scene)


def test_all_replicas_of_all_engines_are_heard_and_counted_through() -> None:
    async def scene() -> None:
        llms = [Llm(asleep=((), ())), Llm(asleep=((), ("kv_cache",)))]
        sleeper = AwaitedVllmSleeper([AsyncVllmDriver(llm) for llm in llms])
        assert await asyncio.to_thread(sleeper.asleep) == {"kv_cache"}
        found = await asyncio.to_thread(lambda: sleeper.memory(restart=True))
        assert [(process.process, process.allocated) for process in found] == [
            (f"engine rank {i}", i % 2) for i in range(4)
        ]
        await asyncio.to_thread(sleeper.empty_cache)
        assert [told for told in llms[1].told if told[0] == "refit_empty_cache"] == [
            ("refit_empty_cache", 0),
            ("refit_empty_cache", 1),
        ]

    _in_a_loop(scene)


def test_no_engine_sleeps_where_one_has_unfinished_requests() -> None:
    async def scene() -> None:
        idle, busy = Llm(), Llm()
        drivers = [AsyncVllmDriver(idle), AsyncVllmDriver(busy)]
        running = _request(drivers[1])
        await _settled()
        with pytest.raises(StageRefused, match="engine 1 has unfinished requests"):
            await asyncio.to_thread(AwaitedVllmSleeper(drivers).sleep, 2)
        assert not idle.moved
        running.cancel()
        await _settled()
        await asyncio.to_thread(AwaitedVllmSleeper(drivers).sleep, 2)
        assert idle.moved == busy.moved == [2]

    _in_a_loop(scene)


def test_a_request_that_is_about_to_begin_is_seen_and_one_that_comes_later_waits() -> None:
    """Between the look at the requests and the sleep none can slip in, which vLLM would abort."""

    async def scene() -> None:
        llm = Llm()
        driver = AsyncVllmDriver(llm)
        sleeper = AwaitedVllmSleeper([driver])
        llm.admitted.clear()
        beginning = _request(driver)
        await _settled()
        sleeping = asyncio.create_task(asyncio.to_thread(sleeper.sleep, 2))
        await asyncio.sleep(0.1)
        llm.admitted.set()
        with pytest.raises(StageRefused, match="engine 0 has unfinished requests"):
            await sleeping
        assert not llm.moved
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

    _in_a_loop(scene)


@pytest.mark.parametrize(
    ("tags", "why"),
    [(["weights"], "weights is awake already"), (["kv_cache", "cuda_graph"], "it knows no cuda_graph")],
)
def test_a_wake_up_that_vllm_would_pass_over_is_refused(tags: list[str], why: str) -> None:
    async def scene() -> None:
        llm = Llm(asleep=(("kv_cache",), ("kv_cache",)))
        sleeper = AwaitedVllmSleeper([AsyncVllmDriver(llm)])
        with pytest.raises(StageRefused, match=why):
            await asyncio.to_thread(sleeper.wake, tags)
        assert not llm.moved
        await asyncio.to_thread(sleeper.wake, ["kv_cache"])
        assert llm.moved == [["kv_cache"]]

    _in_a_loop(scene)


@pytest.mark.parametrize("alone", [True, False], ids=["the driver's", "the sleeper's"])
def test_waiting_requests_are_not_woken_onto_weights_that_are_no_versions(alone: bool) -> None:
    async def scene() -> None:
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

    _in_a_loop(scene)


def test_requests_that_a_failed_refit_has_ended_are_not_woken() -> None:
    async def scene() -> None:
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

    _in_a_loop(scene)


def test_a_sleep_whose_caller_is_cancelled_ends_without_it_and_requests_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
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

    _in_a_loop(scene)
    assert "sleep (level 1), whose caller was cancelled, has succeeded" in caplog.text


def test_an_engine_that_ends_as_it_goes_to_sleep_is_not_waited_for() -> None:
    async def scene() -> None:
        llm = Llm()
        llm.output_handler = asyncio.create_task(asyncio.sleep(0.05))

        async def never(level: int) -> None:
            await asyncio.Event().wait()

        llm.sleep = never  # type: ignore[method-assign]
        with pytest.raises(RefitError, match="the engine ended"):
            await asyncio.to_thread(AwaitedVllmSleeper([AsyncVllmDriver(llm)]).sleep, 2)

    _in_a_loop(scene)
