"""The cycle for coroutines, with an engine that its event loop has to answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from rlrefit.integration.colocated.memory import ProcessMemory, StageRecord
from rlrefit.integration.colocated.stages import Stage, StageBusy, StageFailed
from rlrefit.integration.errors import RefitError
from rlrefit.integration.records.record import RefitRecord
from rlrefit.workers.engines.common.awaited import AwaitedCycle, Forwarded, LoopCalls

from .pool import Device, PoolEngine, PoolTrainer, refit_on


class LoopsEngine:
    """The counted engine, each of whose calls is a coroutine of the loop's."""

    def __init__(self, device: Device) -> None:
        self._engine = PoolEngine(device)
        self._calls = LoopCalls()
        self._loops = threading.current_thread()
        self.sleeping = asyncio.Event()
        self.may_sleep = asyncio.Event()
        self.may_sleep.set()

    def _wait(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        async def answer() -> Any:
            assert threading.current_thread() is self._loops
            return call(*arguments, **more)

        return self._calls.wait(answer)

    def sleep(self, level: int) -> None:
        async def wait() -> None:
            self.sleeping.set()
            await self.may_sleep.wait()

        self._calls.wait(wait)
        self._wait(self._engine.sleep, level)

    def wake(self, tags: Sequence[str]) -> None:
        self._wait(self._engine.wake, tags)

    def asleep(self) -> frozenset[str]:
        found: frozenset[str] = self._wait(self._engine.asleep)
        return found

    def empty_cache(self) -> None:
        self._wait(self._engine.empty_cache)

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        found: list[ProcessMemory] = self._wait(self._engine.memory, restart=restart)
        return found


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


def _in_a_loop(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 60))


async def _text() -> str:
    await asyncio.sleep(0)
    return "text"


@pytest.mark.parametrize("multi", [True, False])
def test_turns_are_those_of_the_blocking_cycle(multi: bool) -> None:
    async def turns() -> None:
        scene = Scene()
        cycle = await scene.open(multi_stage_wake_up=multi)
        for version in range(2):
            scene.device.calls.clear()
            await cycle.to_training()
            assert await cycle.train(lambda: asyncio.to_thread(lambda: 3)) == 3
            records = await cycle.to_generation(version)
            wakes = ["wake weights"] if multi else ["wake weights kv_cache"]
            assert [call for call in scene.device.calls if "empty" not in call] == [
                *("sleep", "onload", "offload"),
                *(*wakes, f"refit {version}", "free"),
                *(["wake kv_cache"] if multi else []),
            ]
            assert [record.version for record in records] == [version] * 2
            assert await cycle.generate(_text) == "text"
        assert cycle.state.stage is Stage.AWAKE
        assert not any(record.failed for record in scene.records)

    _in_a_loop(turns)


def test_moves_can_be_awaited_one_by_one() -> None:
    async def moves() -> None:
        scene = Scene()
        cycle = await scene.open()
        await cycle.sleep()
        await cycle.load_trainer()
        await cycle.offload_trainer()
        await cycle.wake_weights()
        assert len(await cycle.refit(0)) == 2
        await cycle.free_trainer()
        await cycle.wake_kv_cache()
        assert cycle.state.stage is Stage.AWAKE
        cycle = await scene.open(multi_stage_wake_up=False)
        await cycle.sleep()
        await cycle.wake_all()
        assert cycle.state.stage is Stage.ALL_AWAKE

    _in_a_loop(moves)


def test_what_is_awaited_while_the_work_runs_is_refused_and_the_work_keeps_its_result() -> None:
    async def rollouts() -> None:
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
        calls: list[Awaitable[Any]] = [cycle.to_training(), cycle.to_generation(1), cycle.generate(_text)]
        for call in calls:
            with pytest.raises(StageBusy, match="while generate is under way"):
                await call
        assert not scene.device.calls
        ended.set()
        assert await generating == "text"
        assert [(record.move, record.failed) for record in scene.records] == [("generate", "")]
        await cycle.to_training()

    _in_a_loop(rollouts)


def test_work_whose_caller_is_cancelled_is_cancelled_and_the_cycle_goes_on() -> None:
    async def rollouts() -> None:
        scene = Scene()
        cycle = await scene.open()
        ended: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                ended.append("the work")

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cycle.generate(work), 0.2)
        assert ended == ["the work"]
        assert cycle.state.stage is Stage.AWAKE
        assert scene.records[-1].failed.startswith("CancelledError")
        await cycle.to_training()
        await cycle.to_generation(1)
        assert await cycle.generate(_text) == "text"

    _in_a_loop(rollouts)


def test_a_move_whose_caller_is_cancelled_ends_before_the_caller_goes_on() -> None:
    async def turns() -> None:
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

    _in_a_loop(turns)


def test_a_move_that_fails_after_its_caller_was_cancelled_is_told_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def turns() -> None:
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

    _in_a_loop(turns)
    assert (
        "to_training, whose caller was cancelled, has failed: sleep failed: ValueError: broken" in caplog.text
    )


def test_work_that_fails_is_told_as_by_the_blocking_cycle() -> None:
    async def rollouts() -> None:
        cycle = await Scene().open()

        async def fail() -> None:
            raise ValueError("no reward")

        with pytest.raises(StageFailed, match="generate failed: ValueError: no reward"):
            await cycle.generate(fail)
        assert await cycle.generate(_text) == "text"

    _in_a_loop(rollouts)


def test_a_blocking_call_in_the_loop_that_has_to_answer_it_is_refused() -> None:
    async def ask() -> None:
        scene = Scene()
        cycle = await scene.open()
        with pytest.raises(RefitError, match="would wait for itself"):
            scene.engine.asleep()
        with pytest.raises(RefitError, match="would wait for itself"):
            cycle.blocking.sleep()
        assert cycle.state.stage is Stage.AWAKE
        await cycle.to_training()

    _in_a_loop(ask)


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


def test_forwarded_methods_and_properties_are_called_through_run_and_others_are_unknown() -> None:
    class Target:
        read = 0

        @property
        def version(self) -> int:
            self.read += 1
            return 3

        def add(self, number: int, *, more: int = 0) -> int:
            return number + more

    target = Target()
    names: list[str] = []

    def run(name: str, call: Callable[[], Any]) -> Any:
        names.append(name)
        return call()

    forwarded = Forwarded(target, run)
    version = forwarded.version
    assert target.read == 0, "a property is read inside run"
    assert (version(), forwarded.add(1, more=2)) == (3, 3)
    assert names == ["version", "add"]
    for unknown in ("missing", "_private"):
        assert not hasattr(forwarded, unknown)
