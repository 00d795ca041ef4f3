"""Calls of a cycle that come while another one is under way, from other threads and from within it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rlrefit.integration.colocated.cycle import ColocatedCycle, UnderWay
from rlrefit.integration.colocated.memory import StageRecord
from rlrefit.integration.colocated.stages import Stage, StageBusy, StageRefused

from .pool import Device, PoolEngine, PoolTrainer, refit_on

# Each is legal at one of the two stages at which work is done, or leads on from there.
CALLS: dict[str, Callable[[ColocatedCycle], object]] = {
    "sleep": ColocatedCycle.sleep,
    "to_training": ColocatedCycle.to_training,
    "to_generation": lambda cycle: cycle.to_generation(7),
    "load_trainer": ColocatedCycle.load_trainer,
    "offload_trainer": ColocatedCycle.offload_trainer,
    "refit": lambda cycle: cycle.refit(7),
    "train": lambda cycle: cycle.train(list),
    "generate": lambda cycle: cycle.generate(list),
}


class Scene:
    """A cycle over a counted device, and its account."""

    def __init__(self) -> None:
        self.device = Device(200)
        self.records: list[StageRecord] = []
        self.engine = PoolEngine(self.device)
        self.cycle = ColocatedCycle(
            self.engine, PoolTrainer(self.device), refit_on(self.device), on_stage=self.records.append
        )

    def seen(self) -> Any:
        """All that a refused call may not change."""
        return list(self.device.calls), dict(self.device.held), self.cycle.state, list(self.records)

    @contextmanager
    def under_way(self, work: str) -> Iterator[Future[str]]:
        """Let work run in a thread of its own meanwhile; it ends after the block."""
        begun, ended = threading.Event(), threading.Event()

        def wait() -> str:
            begun.set()
            assert ended.wait(20)
            return "text"

        with ThreadPoolExecutor(1, "rollouts") as pool:
            running = pool.submit(getattr(self.cycle, work), wait)
            try:
                assert begun.wait(20)
                yield running
            finally:
                ended.set()


@pytest.mark.parametrize("asked", CALLS)
@pytest.mark.parametrize("work", ["train", "generate"])
def test_what_other_threads_ask_for_meanwhile_is_refused_by_the_moves_name(work: str, asked: str) -> None:
    scene = Scene()
    if work == "train":
        scene.cycle.to_training()
    with scene.under_way(work) as running:
        before = scene.seen()
        told = (
            rf"^\S*{asked} was asked for while {work} is under way \(for [\d.]+ s, in thread 'rollouts_0'\)"
        )
        with pytest.raises(StageBusy, match=told) as caught:
            CALLS[asked](scene.cycle)
        assert caught.value.stage == scene.cycle.state.stage
        assert scene.seen() == before
    assert running.result() == "text"
    assert [(record.move, record.failed) for record in scene.records][-1] == (work, "")
    assert scene.cycle.state == before[2]
    if work == "train":
        scene.cycle.to_generation(7)
    assert scene.cycle.generate(lambda: "more") == "more"


@pytest.mark.parametrize("asked", CALLS)
def test_what_the_work_itself_asks_for_is_refused_and_the_work_goes_on(asked: str) -> None:
    scene = Scene()

    def ask() -> str:
        before = scene.seen()
        with pytest.raises(StageBusy, match=r"asked for from within that call.*once that call has returned"):
            CALLS[asked](scene.cycle)
        assert scene.seen() == before
        return "text"

    assert scene.cycle.generate(ask) == "text"
    assert [record.move for record in scene.records] == ["generate"]
    scene.cycle.to_training()


def test_a_move_of_a_row_is_told_with_its_row() -> None:
    scene = Scene()
    begun, ended = threading.Event(), threading.Event()
    plain = scene.engine.sleep

    def slow(level: int) -> None:
        begun.set()
        assert ended.wait(20)
        plain(level)

    scene.engine.sleep = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(scene.cycle.to_training)
        assert begun.wait(20)
        with pytest.raises(StageBusy, match="generate was asked for while sleep of to_training is under way"):
            scene.cycle.generate(list)
        with pytest.raises(StageBusy, match="to_training was asked for while sleep of to_training"):
            scene.cycle.to_training()
        ended.set()
        going.result()
    assert scene.cycle.state.stage is Stage.TRAINING
    assert scene.device.calls == ["sleep", "onload"]


def test_between_the_moves_of_a_row_only_its_own_thread_goes_on() -> None:
    held = UnderWay()
    with ThreadPoolExecutor(1) as pool:

        def ask(call: Any) -> None:
            with call("sleep", Stage.AWAKE):
                pass

        with held.row("to_generation", Stage.AWAKE):
            for call in (held.move, held.row):
                with pytest.raises(StageBusy, match="sleep was asked for while to_generation is under way"):
                    pool.submit(ask, call).result()
            with held.row("refit", Stage.AWAKE), held.move("refit", Stage.AWAKE):
                pass
            ask(held.move)
        pool.submit(ask, held.move).result()


def test_a_call_of_who_is_told_of_a_move_is_refused() -> None:
    """The move ends with its account."""
    scene = Scene()
    refused: list[StageBusy] = []

    def tell(record: StageRecord) -> None:
        with pytest.raises(StageBusy, match="load_trainer was asked for while sleep is under way") as caught:
            scene.cycle.load_trainer()
        refused.append(caught.value)

    scene.cycle = ColocatedCycle(
        scene.engine, PoolTrainer(scene.device), refit_on(scene.device), on_stage=tell
    )
    scene.cycle.sleep()
    assert len(refused) == 1
    assert scene.cycle.state == replace(scene.cycle.state, stage=Stage.SLEEPING, failed="")


def test_a_sleep_that_is_refused_after_the_rest_was_woken_for_it_is_no_refusal() -> None:
    scene = Scene()
    scene.cycle.sleep()
    scene.cycle.wake_weights()
    scene.device.fails["sleep"] = StageRefused("requests are running")
    with pytest.raises(Exception, match=r"refused to sleep .*after kv_cache was woken for it") as caught:
        scene.cycle.sleep()
    assert not isinstance(caught.value, StageRefused)
    assert scene.cycle.state.stage is Stage.LOST
