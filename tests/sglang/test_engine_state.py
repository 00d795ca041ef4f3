"""What sleeps, whether an engine is paused, and what becomes of its requests; other drivers and other callers change it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from rlrefit.integration.colocated.stages import Stage, StageRefused
from rlrefit.integration.errors import EngineDirty, RefitError, RefitTimeout
from rlrefit.workers.engines.sglang.callers import Answer, Step
from rlrefit.workers.engines.sglang.engine_state import STATE, report_state

from .conftest import Drive
from .engine_double import Holder, equal, weights
from .ways import Driven

ALL = {"weights", "kv_cache"}
pytestmark = pytest.mark.usefixtures("sglang")


def _two_cycles(driven: Driven) -> None:
    """Of a driver that finds the engine asleep."""
    cycle = driven.cycle()
    assert cycle.state.stage is Stage.SLEEPING
    for version, index in enumerate((1, 2)):
        cycle.to_training()
        assert driven.manager.asleep >= ALL
        driven.turn(cycle, version, index)
        assert driven.manager.asleep == set()


# Sleep


def test_a_second_driver_knows_that_the_engine_sleeps_and_goes_on_from_there(driven: Driven) -> None:
    driven.refit.sleep()
    second = driven.refit = driven.open()
    assert second.asleep() == ALL
    with pytest.raises(EngineDirty, match="kv_cache and weights"):
        second.require_servable()
    with pytest.raises(RefitError, match="weights are asleep"):
        driven.sender.refit(0)
    with pytest.raises(StageRefused, match="sleeps already"):
        second.sleep()
    _two_cycles(driven)


def test_a_driver_knows_what_another_caller_has_released(driven: Driven) -> None:
    driven.released()
    assert driven.manager.asleep == ALL | {"cuda_graph"}
    assert not driven.manager.paused
    assert driven.refit.asleep() == ALL
    _two_cycles(driven)


def test_a_driver_hears_of_a_release_that_is_younger_than_itself(alone: Driven) -> None:
    alone.refit.require_servable()
    alone.released("kv_cache")
    assert alone.refit.asleep() == {"kv_cache"}
    with pytest.raises(EngineDirty, match="kv_cache"):
        alone.refit.require_servable()
    alone.take_on(1)
    alone.sender.refit(0)
    assert alone.manager.paused
    alone.refit.wake(["kv_cache"])
    alone.require_served(1)


@pytest.mark.parametrize("by_another", [False, True], ids=["by the driver", "by another caller"])
def test_weights_that_a_sleep_discarded_are_served_after_a_refit_only(
    driven: Driven, by_another: bool
) -> None:
    refit = driven.refit
    (driven.released if by_another else refit.sleep)()
    refit.wake()
    assert driven.manager.asleep == set()
    with pytest.raises(EngineDirty, match="discarded"):
        refit.require_servable()
    assert driven.manager.paused is not by_another
    driven.bring(0, 2)


def test_graphs_that_were_released_alone_wake_with_the_kv_cache(alone: Driven) -> None:
    refit = alone.refit
    alone.released("cuda_graph")
    assert refit.asleep() == {"kv_cache"}
    refit.wake(["kv_cache"])
    assert alone.manager.calls[-3] == "resume cuda_graph"
    refit.require_servable()


def test_a_wake_up_that_would_end_the_scheduler_is_refused(alone: Driven) -> None:
    for tags in (["weights"], [], ["experts"]):
        with pytest.raises(StageRefused):
            alone.refit.wake(tags)
    alone.refit.sleep()
    for tags in (["experts"], ["weights", "experts"]):
        with pytest.raises(StageRefused):
            alone.refit.wake(tags)
    assert alone.refit.asleep() == ALL


def test_level_1_needs_a_backup_and_keeps_the_weights(drive_alone: Drive) -> None:
    with pytest.raises(StageRefused, match="enable_weights_cpu_backup"):
        drive_alone().refit.sleep(1)
    backed = drive_alone(enable_weights_cpu_backup=True)
    backed.refit.sleep(1)
    backed.refit.wake()
    backed.require_served(0)


def test_an_engine_that_would_free_nothing_is_not_put_to_sleep(drive_alone: Drive) -> None:
    driven = drive_alone(device="cuda", enable_memory_saver=False)
    with pytest.raises(StageRefused, match="enable_memory_saver=True"):
        driven.refit.sleep()
    assert not driven.refit.asleep()
    driven.require_served(0)


# Pauses


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_engine_that_another_caller_paused_is_not_taken_for_one_that_generates(
    driven: Driven, mode: str
) -> None:
    driven.paused(mode)
    with pytest.raises(EngineDirty, match="paused"):
        driven.refit.require_servable()
    driven.refit.resume()
    driven.require_served(0)


def test_a_pause_that_only_the_engines_own_process_knows_of_is_seen_there(alone: Driven) -> None:
    alone.paused("abort")
    assert not alone.manager.scheduler._engine_paused
    with pytest.raises(EngineDirty, match="paused"):
        alone.refit.require_servable()


def test_a_refit_that_is_refused_leaves_an_engine_paused_that_was_so_before(
    alone: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(version: int, specs: Any) -> dict[str, Any]:
        raise RefitError("no")

    with monkeypatch.context() as patch:
        patch.setattr(alone.manager.worker, "begin", refused)
        for before in (False, True):
            if before:
                alone.paused("in_place")
            with pytest.raises(RefitError, match="no"):
                alone.sender.refit(0)
            assert alone.manager.paused is before
    alone.bring(0, 1)


def test_a_second_driver_does_not_resume_weights_that_the_first_left_half_written(driven: Driven) -> None:
    driven.manager.fail_bucket = 2
    with pytest.raises(RefitError, match="discard"):
        driven.sender.refit(0)
    del driven.sender
    driven.refit = driven.open()
    for ask in (driven.refit.require_servable, driven.refit.resume):
        with pytest.raises(EngineDirty, match="refit 0 began"):
            ask()
    assert driven.manager.paused
    for version, index in ((1, 1), (2, 2)):
        driven.bring(version, index)


def test_a_pause_that_no_refit_follows_is_resumed_with_the_requests_that_it_retracted(drive: Drive) -> None:
    driven = drive(disable_radix_cache=True)
    refit = driven.refit
    driven.manager.running = 2
    refit.pause("retract")
    with pytest.raises(StageRefused, match="unfinished requests"):
        refit.sleep()
    refit.resume()
    assert (driven.manager.running, driven.manager.paused) == (2, False)


def test_an_abort_whose_answer_is_lost_is_not_forgotten_and_the_next_refit_resumes(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server tells nobody of it."""
    way = driven.refit.calls._caller
    call = way.call

    def losing(step: Step) -> Answer:
        answer = call(step)
        if step.fields.get("mode") == "abort":
            raise RefitError("the answer got lost")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(way, "call", losing)
        with pytest.raises(RefitError, match="got lost"):
            driven.sender.refit(0, "abort")
    assert not driven.manager.scheduler._engine_paused
    with pytest.raises(EngineDirty, match="paused"):
        driven.refit.require_servable()
    driven.bring(0, 1)


# Requests


def test_running_requests_are_waited_for_and_not_forever(driven: Driven) -> None:
    manager = driven.manager
    manager.running = 1
    assert driven.refit.asleep() == frozenset(), "which is told without waiting"
    with pytest.raises(RefitTimeout, match="did not all end"):
        driven.sender.refit(0)
    assert equal(manager.holder.held, weights(0))
    assert not manager.paused


def test_a_batch_that_is_on_its_way_out_is_waited_for_while_the_engine_goes_on(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = driven.manager
    flush = manager.flush_cache

    async def flushed(timeout_s: float | None = None) -> Any:
        if timeout_s and not manager.paused:
            manager.running = 0
        return await flush(timeout_s)

    monkeypatch.setattr(manager, "flush_cache", flushed)
    manager.running = 1
    driven.refit.sleep()
    assert manager.asleep == ALL
    assert manager.calls.count("continue") == 1
    assert not manager.running


def test_an_engine_sleeps_under_requests_that_it_may_abort_or_wait_for(driven: Driven) -> None:
    manager, refit = driven.manager, driven.refit
    manager.running = 2
    with pytest.raises(StageRefused, match="unfinished requests"):
        refit.sleep()
    with pytest.raises(StageRefused, match="retracted requests wait"):
        refit.sleep(mode="retract")
    with pytest.raises(RefitError, match="did not all end"):
        refit.sleep(mode="wait")
    assert (manager.running, manager.paused, refit.asleep()) == (2, False, frozenset())
    refit.sleep(mode="abort")
    assert (manager.aborted, refit.asleep()) == (2, ALL)


def test_a_paused_engine_with_requests_is_not_put_to_sleep(alone: Driven) -> None:
    alone.refit.begin(0, Holder(0).specs())
    alone.manager.retracted = 1
    with pytest.raises(StageRefused, match="unfinished requests"):
        alone.refit.sleep()
    assert [call for call in alone.manager.calls if call.startswith("release")] == []


def test_a_cycle_goes_to_training_under_requests_once_they_are_aborted(driven: Driven) -> None:
    cycle = driven.cycle()
    for version, index in enumerate((1, 2)):
        driven.manager.running = 2
        driven.refit.pause("abort")
        with pytest.raises(EngineDirty, match="paused"):
            driven.refit.require_servable()
        cycle.to_training()
        driven.turn(cycle, version, index)
    assert driven.manager.aborted == 4


def test_requests_of_a_paused_engine_are_not_written_under_and_end_with_an_abort(driven: Driven) -> None:
    manager = driven.manager
    manager.running = 2
    driven.paused("in_place")
    with pytest.raises(RefitError, match="mode='abort'"):
        driven.sender.refit(0)
    assert (manager.running, manager.paused) == (2, True)
    assert equal(manager.holder.held, weights(0))
    for version in (0, 1):
        driven.bring(version, 1 + version, "abort")
        assert (manager.running, manager.retracted, manager.aborted) == (0, 0, 2 * (version + 1))
        manager.running = 2


def test_requests_are_retracted_only_where_no_prefix_of_theirs_is_cached_and_go_on_with_new_weights(
    drive: Drive,
) -> None:
    cached, plain = drive(), drive(disable_radix_cache=True)
    sender = cached.sender
    cached.manager.running = 2
    with pytest.raises(RefitError, match="disable_radix_cache=True"):
        sender.refit(0, "retract")
    assert not cached.manager.paused
    manager, refit = plain.manager, plain.refit
    for version, index in enumerate((1, 2)):
        manager.running = 3
        refit.begin(version, Holder(0).specs(), "retract")
        assert manager.retracted == 3
        refit.commit(version)
        plain.take_on(index)
        plain.sender.refit(version, "retract")
        assert (manager.running, manager.retracted, manager.aborted) == (3, 0, 0)
        manager.running = 0
        plain.require_served(index)


def test_requests_that_are_left_after_a_refit_keep_the_engine_paused_until_they_are_aborted(
    driven: Driven,
) -> None:
    manager, refit = driven.manager, driven.refit
    refit.begin(0, Holder(0).specs())
    manager.retracted = 1
    with pytest.raises(RefitError, match="mode='abort'"):
        refit.commit(0)
    assert manager.paused
    with pytest.raises(EngineDirty):
        refit.require_servable()
    refit.begin(1, Holder(0).specs(), "abort")
    refit.commit(1)
    assert (manager.paused, manager.retracted) == (False, 0)


def test_requests_that_keep_old_keys_are_not_let_through(alone: Driven) -> None:
    with pytest.raises(RefitError, match="in_place"):
        alone.refit.begin(0, [], "in_place")  # type: ignore[arg-type]


# The scheduler's own account


def test_a_scheduler_that_tells_nothing_is_an_error(alone: Driven) -> None:
    refit = alone.refit
    alone.manager.attached = False
    with pytest.raises(RefitError, match="loader"):
        refit.asleep()


class Scheduler:
    """As SGLang's, which binds its answers as it is made."""

    def __init__(self) -> None:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        self.weight_updater = types.SimpleNamespace(offload_tags={"weights"})
        self._engine_paused = False
        self.draft_worker = None
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
    request = type("Request", (), {})
    module = types.ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = type("Scheduler", (Scheduler,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    io_struct = sys.modules["sglang.srt.managers.io_struct"]
    monkeypatch.setattr(io_struct, "GetInternalStateReq", request, raising=False)
    scheduler = module.Scheduler()
    [before] = scheduler.process_input_requests([request()])
    assert before.internal_state == {"tp_size": 1}
    report_state()
    report_state()
    for tags, paused in (({"weights"}, False), ({"kv_cache", "weights"}, True), (set(), False)):
        scheduler.weight_updater.offload_tags.clear()
        scheduler.weight_updater.offload_tags.update(tags)
        scheduler._engine_paused = paused
        [told] = scheduler.process_input_requests([request()])
        assert told.internal_state == {"tp_size": 1, STATE: {"released": sorted(tags), "paused": paused}}
