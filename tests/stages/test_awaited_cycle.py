"""The cycle for coroutines, with an engine that its event loop has to answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.memory import StageRecord
from rlrefit.integration.colocated.stages import Stage, StageBusy
from rlrefit.integration.errors import RefitError
from rlrefit.integration.records.record import RefitRecord
from rlrefit.workers.engines.common.awaited import AwaitedCycle, LoopCalls

from .pool import Device, PoolEngine, PoolTrainer, in_a_loop, refit_on


class LoopsEngine:
    """The counted engine, each of whose calls is a coroutine of the loop's."""

    def __init__(self, device: Device) -> None:
        self._engine = PoolEngine(device)
        self._calls = LoopCalls()
        self._loops = threading.current_thread()
        self.sleeping = asyncio.Event()
        self.may_sleep = asyncio.Event()
        self.may_sleep.set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any, **more: Any) -> Any:
            async def answer() -> Any:
                assert threading.current_thread() is self._loops
                if name == "sleep":
                    self.sleeping.set()
                    await self.may_sleep.wait()
                return getattr(self._engine, name)(*arguments, **more)

            return self._calls.wait(answer)

        return ask


class Scene:
    def __init__(self) -> None:
        self.device = Device(200)
        self.records: list[StageRecord] = []
        self.engine = LoopsEngine(self.device)

    async def open(self, **settings: Any) -> AwaitedCycle:
        plain = refit_on(self.device)

        async def refit(version: int) -> list[RefitRecord]:
            await asyncio.sleep(0)
            return plain(version)

        trainer = PoolTrainer(self.device)
        return await AwaitedCycle.open(self.engine, trainer, refit, on_stage=self.records.append, **settings)


async def _text() -> str:
    await asyncio.sleep(0)
    return "text"


@pytest.mark.parametrize("multi", [True, False], ids=["in stages", "at once"])
@in_a_loop
async def test_turns_are_those_of_the_blocking_cycle(multi: bool) -> None:
    scene = Scene()
    cycle = await scene.open(multi_stage_wake_up=multi)
    loop = threading.current_thread()

    async def work() -> str:
        assert threading.current_thread() is loop
        return await _text()

    blocking = Device(200)
    twin = ColocatedCycle(
        PoolEngine(blocking), PoolTrainer(blocking), refit_on(blocking), multi_stage_wake_up=multi
    )
    for version in range(2):
        await cycle.to_training()
        assert await cycle.train(work) == "text"
        found = await cycle.to_generation(version)
        assert await cycle.generate(work) == "text"
        twin.to_training()
        twin.train(str)
        assert [record.stage_peaks for record in found] == [
            record.stage_peaks for record in twin.to_generation(version)
        ]
        twin.generate(str)
        assert {record.version for record in found} == {version}
        assert cycle.state.stage is Stage.AWAKE
    assert scene.device.calls == blocking.calls
    assert ("wake weights kv_cache" in blocking.calls) is not multi


@in_a_loop
async def test_what_is_awaited_while_the_work_runs_is_refused_and_the_work_keeps_its_result() -> None:
    scene = Scene()
    cycle = await scene.open()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        begun.set()
        with pytest.raises(StageBusy, match="sleep was asked for while generate is under way"):
            await cycle.sleep()
        await ended.wait()
        return "text"

    generating = asyncio.create_task(cycle.generate(work))
    await begun.wait()
    for call in (cycle.to_training(), cycle.to_generation(1), cycle.generate(_text)):
        with pytest.raises(StageBusy, match="while generate is under way"):
            await call
    assert not scene.device.calls
    ended.set()
    assert await generating == "text"
    assert [(record.move, record.failed) for record in scene.records] == [("generate", "")]
    await cycle.to_training()


@in_a_loop
async def test_work_whose_caller_is_cancelled_is_cancelled_and_the_cycle_goes_on() -> None:
    scene = Scene()
    cycle = await scene.open()
    ended: list[str] = []

    async def work() -> None:
        limit.reschedule(0.0)  # the time is up as soon as it has begun
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append("the work")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await cycle.generate(work)
    assert ended == ["the work"]
    assert cycle.state.stage is Stage.AWAKE
    assert scene.records[-1].failed.startswith("CancelledError")
    await cycle.to_training()
    await cycle.to_generation(1)
    assert await cycle.generate(_text) == "text"


@in_a_loop
async def test_a_move_whose_caller_is_cancelled_ends_before_the_caller_goes_on() -> None:
    scene = Scene()
    cycle = await scene.open()
    scene.engine.may_sleep.clear()
    going = asyncio.create_task(cycle.to_training())
    await scene.engine.sleeping.wait()
    for _ in range(3):
        going.cancel()
        await asyncio.sleep(0.01)
    assert not going.done()
    with pytest.raises(StageBusy, match="generate was asked for while sleep of to_training is under way"):
        await cycle.generate(_text)
    scene.engine.may_sleep.set()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert cycle.state.stage is Stage.TRAINING
    await cycle.to_generation(0)


@in_a_loop
async def test_a_move_that_fails_after_its_caller_was_cancelled_is_told_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    cycle = await scene.open()
    scene.engine.may_sleep.clear()
    scene.device.fails["sleep"] = ValueError("broken")
    going = asyncio.create_task(cycle.to_training())
    await scene.engine.sleeping.wait()
    going.cancel()
    scene.engine.may_sleep.set()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert cycle.state.stage is Stage.LOST
    assert (
        "to_training, whose caller was cancelled, has failed: sleep failed: ValueError: broken" in caplog.text
    )


@in_a_loop
async def test_a_blocking_call_in_the_loop_that_has_to_answer_it_is_refused() -> None:
    scene = Scene()
    cycle = await scene.open()
    with pytest.raises(RefitError, match="would wait for itself"):
        scene.engine.asleep()
    with pytest.raises(RefitError, match="would wait for itself"):
        cycle.blocking.sleep()
    assert cycle.state.stage is Stage.AWAKE
    await cycle.to_training()


def test_a_loop_that_has_ended_is_not_waited_for() -> None:
    kept: list[LoopCalls] = []

    async def keep() -> None:
        kept.append(LoopCalls())

    asyncio.run(keep())
    with pytest.raises(RefitError) as met:
        kept[0].wait(_text)
    assert met.value.stage == "engine"


def test_a_loop_that_stops_meanwhile_is_not_waited_for() -> None:
    loop = asyncio.new_event_loop()
    running = threading.Thread(target=loop.run_forever, daemon=True)
    running.start()

    async def stop() -> None:
        loop.stop()
        await asyncio.Event().wait()

    with pytest.raises(RefitError) as met:
        LoopCalls(loop).wait(stop)
    assert met.value.stage == "engine"
    running.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
