"""What sleeps and whether an engine is paused is asked of the engine: other drivers and other callers change it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from rlrefit.integration.colocated.stages import Stage, StageRefused
from rlrefit.integration.errors import EngineDirty, RefitError
from rlrefit.workers.engines.sglang.callers import Answer, Step
from rlrefit.workers.engines.sglang.driver import SglangRefit
from rlrefit.workers.engines.sglang.engine_state import STATE, report_state

from .engine_double import EngineDouble, equal, weights
from .ways import Sending, blocking

ALL = {"weights", "kv_cache"}


pytestmark = pytest.mark.usefixtures("sglang")


def _released(engine: EngineDouble, *tags: str) -> None:
    """By another caller, who pauses nothing; without tags all of it."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput as Release

    manager = engine.tokenizer_manager
    engine.loop.run_until_complete(manager.release_memory_occupation(Release(tags=list(tags) or None), None))


def _paused(engine: EngineDouble, mode: str) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput as Pause

    engine.loop.run_until_complete(engine.tokenizer_manager.pause_generation(Pause(mode=mode)))


def _two_cycles(refit: SglangRefit, engine: EngineDouble) -> None:
    """Of a driver that finds the engine asleep."""
    sending = Sending(refit, engine)
    cycle = sending.cycle()
    assert cycle.state.stage is Stage.SLEEPING
    for version, index in enumerate((1, 2)):
        cycle.to_training()
        assert engine.tokenizer_manager.asleep >= ALL
        sending.turn(cycle, version, index)
        assert engine.tokenizer_manager.asleep == set()


def test_a_second_driver_knows_that_the_engine_sleeps_and_goes_on_from_there(
    engine: EngineDouble, through: Any
) -> None:
    blocking(engine, lambda first: first.sleep())

    def work(second: SglangRefit) -> None:
        assert second.asleep() == ALL
        with pytest.raises(EngineDirty, match="kv_cache and weights"):
            second.require_servable()
        with pytest.raises(RefitError, match="weights are asleep"):
            Sending(second, engine).sender.refit(0)
        with pytest.raises(StageRefused, match="sleeps already"):
            second.sleep()
        _two_cycles(second, engine)

    through(engine, work)


def test_a_driver_knows_what_another_caller_has_released(engine: EngineDouble, through: Any) -> None:
    blocking(engine, lambda first: _released(engine))

    def work(refit: SglangRefit) -> None:
        manager = engine.tokenizer_manager
        assert manager.asleep == ALL | {"cuda_graph"}
        assert not manager.paused
        assert refit.asleep() == ALL
        _two_cycles(refit, engine)

    through(engine, work)


def test_a_driver_hears_of_a_release_that_is_younger_than_itself(engine: EngineDouble) -> None:
    def work(refit: SglangRefit) -> None:
        refit.require_servable()
        _released(engine, "kv_cache")
        assert refit.asleep() == {"kv_cache"}
        with pytest.raises(EngineDirty, match="kv_cache"):
            refit.require_servable()
        sending = Sending(refit, engine)
        sending.take_on(1)
        sending.sender.refit(0)
        assert engine.tokenizer_manager.paused
        refit.wake(["kv_cache"])
        sending.require_served(1)

    blocking(engine, work)


def test_weights_that_another_caller_released_are_served_after_a_refit_only(engine: EngineDouble) -> None:
    def work(refit: SglangRefit) -> None:
        _released(engine)
        refit.wake()
        assert engine.tokenizer_manager.asleep == set()
        with pytest.raises(EngineDirty, match="discarded"):
            refit.require_servable()
        Sending(refit, engine).bring(0, 2)

    blocking(engine, work)


def test_graphs_that_were_released_alone_wake_with_the_kv_cache(engine: EngineDouble) -> None:
    def work(refit: SglangRefit) -> None:
        _released(engine, "cuda_graph")
        assert refit.asleep() == {"kv_cache"}
        refit.wake(["kv_cache"])
        assert engine.tokenizer_manager.calls[-3] == "resume cuda_graph"
        refit.require_servable()

    blocking(engine, work)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_engine_that_another_caller_paused_is_not_taken_for_one_that_generates(
    engine: EngineDouble, through: Any, mode: str
) -> None:
    blocking(engine, lambda first: _paused(engine, mode))

    def work(refit: SglangRefit) -> None:
        with pytest.raises(EngineDirty, match="paused"):
            refit.require_servable()
        refit.resume()
        refit.require_servable()
        assert not engine.tokenizer_manager.paused

    through(engine, work)


def test_a_pause_that_only_the_engines_own_process_knows_of_is_seen_there(engine: EngineDouble) -> None:
    blocking(engine, lambda first: _paused(engine, "abort"))
    assert not engine.tokenizer_manager.scheduler._engine_paused
    with pytest.raises(EngineDirty, match="paused"):
        blocking(engine, lambda refit: refit.require_servable())


def test_a_refit_that_is_refused_leaves_an_engine_paused_that_was_so_before(engine: EngineDouble) -> None:
    def work(refit: SglangRefit) -> None:
        begin = engine.tokenizer_manager.worker.begin

        def refused(version: int, specs: Any) -> dict[str, Any]:
            raise RefitError("no")

        engine.tokenizer_manager.worker.begin = refused  # type: ignore[method-assign]
        sending = Sending(refit, engine)
        for before in (False, True):
            if before:
                _paused(engine, "in_place")
            with pytest.raises(RefitError, match="no"):
                sending.sender.refit(0)
            assert engine.tokenizer_manager.paused is before
        engine.tokenizer_manager.worker.begin = begin  # type: ignore[method-assign]
        sending.bring(0, 1)

    blocking(engine, work)


def test_a_second_driver_does_not_resume_weights_that_the_first_left_half_written(
    engine: EngineDouble, through: Any
) -> None:
    manager = engine.tokenizer_manager
    manager.fail_bucket = 2

    def first(refit: SglangRefit) -> None:
        with pytest.raises(RefitError, match="discard"):
            Sending(refit, engine).sender.refit(0)

    def second(refit: SglangRefit) -> None:
        for ask in (refit.require_servable, refit.resume):
            with pytest.raises(EngineDirty, match="refit 0 began"):
                ask()
        assert manager.paused
        sending = Sending(refit, engine)
        for version, index in ((1, 1), (2, 2)):
            sending.bring(version, index)

    blocking(engine, first)
    through(engine, second)


def test_requests_of_a_paused_engine_are_not_written_under_and_end_with_an_abort(
    engine: EngineDouble, through: Any
) -> None:
    manager = engine.tokenizer_manager

    def first(refit: SglangRefit) -> None:
        manager.running = 2
        _paused(engine, "in_place")

    def second(refit: SglangRefit) -> None:
        sending = Sending(refit, engine)
        with pytest.raises(RefitError, match="mode='abort'"):
            sending.sender.refit(0)
        assert (manager.running, manager.paused) == (2, True)
        assert equal(manager.holder.held, weights(0))
        sending.bring(0, 1, "abort")
        assert (manager.running, manager.retracted, manager.aborted) == (0, 0, 2)

    blocking(engine, first)
    through(engine, second)


def test_buckets_abort_requests_that_run(engine: EngineDouble, through: Any) -> None:
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        sending = Sending(refit, engine)
        for version, index in enumerate((1, 2)):
            manager.running = 3
            sending.bring(version, index, "abort")
            assert manager.running == 0
        assert manager.aborted == 6

    through(engine, work)


def test_buckets_retract_requests_that_run_and_go_on_with_the_new_weights(
    engine_that_retracts: EngineDouble, through: Any
) -> None:
    manager = engine_that_retracts.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        sending = Sending(refit, engine_that_retracts)
        for version, index in enumerate((1, 2)):
            manager.running = 3
            sending.take_on(index)
            sending.sender.refit(version, "retract")
            assert (manager.running, manager.aborted) == (3, 0)
            manager.running = 0
            sending.require_served(index)

    through(engine_that_retracts, work)


def test_an_engine_sleeps_under_requests_that_it_may_abort_or_wait_for(
    engine: EngineDouble, through: Any
) -> None:
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        manager.running = 2
        with pytest.raises(StageRefused, match="retracted requests wait"):
            refit.sleep(mode="retract")
        with pytest.raises(RefitError, match="did not all end"):
            refit.sleep(mode="wait")
        assert (manager.running, manager.paused, refit.asleep()) == (2, False, frozenset())
        refit.sleep(mode="abort")
        assert (manager.aborted, refit.asleep()) == (2, ALL)

    through(engine, work)


def test_a_cycle_goes_to_training_under_requests_once_they_are_aborted(
    engine: EngineDouble, through: Any
) -> None:
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        sending = Sending(refit, engine)
        cycle = sending.cycle()
        for version, index in enumerate((1, 2)):
            manager.running = 2
            refit.pause("abort")
            with pytest.raises(EngineDirty, match="paused"):
                refit.require_servable()
            cycle.to_training()
            sending.turn(cycle, version, index)
        assert manager.aborted == 4

    through(engine, work)


def test_a_pause_that_no_refit_follows_is_resumed_with_the_requests_that_it_retracted(
    engine_that_retracts: EngineDouble, through: Any
) -> None:
    manager = engine_that_retracts.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        manager.running = 2
        refit.pause("retract")
        with pytest.raises(StageRefused, match="unfinished requests"):
            refit.sleep()
        refit.resume()
        assert (manager.running, manager.paused) == (2, False)

    through(engine_that_retracts, work)


def test_an_abort_whose_answer_is_lost_is_not_forgotten_and_the_next_refit_resumes(
    engine: EngineDouble, through: Any
) -> None:
    """The server tells nobody of it."""
    manager = engine.tokenizer_manager

    def work(refit: SglangRefit) -> None:
        sending = Sending(refit, engine)
        way = refit.calls._caller
        call = way.call

        def losing(step: Step) -> Answer:
            answer = call(step)
            if step.fields.get("mode") == "abort":
                raise RefitError("the answer got lost")
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(way, "call", losing)
            with pytest.raises(RefitError, match="got lost"):
                sending.sender.refit(0, "abort")
        assert not manager.scheduler._engine_paused
        with pytest.raises(EngineDirty, match="paused"):
            refit.require_servable()
        sending.bring(0, 1)

    through(engine, work)


def test_what_sleeps_is_told_without_waiting_for_requests(engine: EngineDouble, through: Any) -> None:
    def work(refit: SglangRefit) -> None:
        engine.tokenizer_manager.running = 1
        assert refit.asleep() == frozenset()
        engine.tokenizer_manager.running = 0

    through(engine, work)


def test_a_scheduler_that_tells_nothing_is_an_error(engine: EngineDouble) -> None:
    def work(refit: SglangRefit) -> None:
        engine.tokenizer_manager.attached = False
        with pytest.raises(RefitError, match="loader"):
            refit.asleep()

    blocking(engine, work)


class Scheduler:
    """As SGLang's, which binds its answers as it is made."""

    def __init__(self) -> None:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        self.weight_updater = types.SimpleNamespace(offload_tags={"weights"})
        self._engine_paused = False
        self._request_dispatcher = types.SimpleNamespace(
            _mapping={GetInternalStateReq: self.get_internal_state}
        )

    def get_internal_state(self, recv_req: Any) -> Any:
        return types.SimpleNamespace(internal_state={"tp_size": 1})

    def process_input_requests(self, recv_reqs: list[Any]) -> list[Any]:
        return [self._request_dispatcher._mapping[type(request)](request) for request in recv_reqs]


def test_a_scheduler_that_was_there_before_tells_of_releases_before_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Request:
        pass

    module = types.ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = type("Scheduler", (Scheduler,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        sys.modules["sglang.srt.managers.io_struct"], "GetInternalStateReq", Request, raising=False
    )
    scheduler = module.Scheduler()
    [before] = scheduler.process_input_requests([Request()])
    assert before.internal_state == {"tp_size": 1}
    report_state()
    report_state()
    for tags, paused in (({"weights"}, False), ({"kv_cache", "weights"}, True), (set(), False)):
        scheduler.weight_updater.offload_tags.clear()
        scheduler.weight_updater.offload_tags.update(tags)
        scheduler._engine_paused = paused
        [told] = scheduler.process_input_requests([Request()])
        assert told.internal_state == {
            "tp_size": 1,
            STATE: {"released": sorted(tags), "paused": paused},
        }
