"""The wait that all ranks wait by."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlrefit.integration.comm import waiting
from rlrefit.integration.comm.torch_group import TorchGroup
from rlrefit.integration.comm.waiting import ends_within, wait_until
from rlrefit.integration.errors import PeerLost, RefitError, RefitTimeout
from rlrefit.integration.transport import streams
from rlrefit.integration.weights.endpoints import prepares_alone
from rlrefit.integration.weights.source_thread import SourceThread, require_in_step
from rlrefit.workers.trainers.fsdp.source import FSDPSource


def late() -> RefitTimeout:
    return RefitTimeout("nothing came", stage="misc", rank=0)


def test_a_rank_that_gave_up_is_the_cause_though_the_time_is_up_before_the_next_look_at_it() -> None:
    def watch(stage: str) -> None:
        raise PeerLost("trainer rank 3 gave up", stage=stage)

    with pytest.raises(PeerLost) as raised:
        wait_until(lambda: False, 0.05, "misc", watch, late)
    assert raised.value.stage == "misc"


def test_where_nobody_gave_up_the_wait_ends_with_its_own_error() -> None:
    looked: list[str] = []
    with pytest.raises(RefitTimeout):
        wait_until(lambda: False, 0.05, "misc", looked.append, late)
    assert looked == ["misc"]


@pytest.mark.parametrize("ends", [True, False])
def test_memory_of_kernels_that_do_not_end_after_a_failure_becomes_nobody_elses(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[object, ...]] = []
    monkeypatch.setattr(waiting, "_left_running", kept)
    monkeypatch.setattr(streams, "_DRAIN_WITHIN", 0.05)
    last = SimpleNamespace(query=lambda: ends)
    monkeypatch.setattr(streams, "make_event", lambda device: last)
    recorded: list[object] = []
    stream = SimpleNamespace(record=recorded.append)
    bucket = torch.zeros(1)
    streams.drain([stream], torch.device("cpu"), bucket)  # type: ignore[list-item]
    assert recorded == [last]
    assert any(one is bucket for used in kept for one in used) is not ends


def test_a_call_of_a_source_that_waits_for_ever_is_left_in_time_and_its_process_refits_no_more() -> None:
    waits = threading.Event()

    def gather() -> None:
        waits.wait(20)
        raise ConnectionResetError("the group ended")

    thread = SourceThread(torch.device("cpu"), 0.3, 1, 2, lambda stage: None)
    with pytest.raises(RefitTimeout) as late:
        thread.run(gather, "export")
    assert (late.value.stage, late.value.rank, thread.left) == ("export", 1, True)
    with pytest.raises(RefitError) as refused:
        require_in_step(1)
    assert (refused.value.stage, refused.value.rank) == ("export", 1)
    waits.set()
    # Its group is broken then, which every later collective tells by itself.
    assert ends_within(lambda: _in_step(1), 5)


@pytest.mark.parametrize(("blamed", "goes_on"), [(2, True), (0, False), (-1, False)])
def test_a_call_of_a_source_goes_on_after_the_end_of_an_engine_and_not_for_long_after_a_trainers(
    blamed: int, goes_on: bool
) -> None:
    def ended(stage: str) -> None:
        raise PeerLost("a rank is lost", stage=stage, rank=1, blamed=blamed)

    def gather() -> str:
        if not waits.wait(1.5 if goes_on else 20):
            return "all of it"
        raise ConnectionResetError("the group ended")

    waits = threading.Event()
    thread = SourceThread(torch.device("cpu"), 2.0, 1, 2, ended)
    start = time.monotonic()
    if goes_on:
        assert thread.run(gather, "export") == "all of it"
    else:
        with pytest.raises(PeerLost) as lost:
            thread.run(gather, "export")
        assert lost.value.blamed == blamed
        assert time.monotonic() - start < 2
    waits.set()
    assert ends_within(lambda: _in_step(1), 5)


def test_a_source_runs_in_the_callers_modes_and_its_errors_are_its_own() -> None:
    thread = SourceThread(torch.device("cpu"), 5.0, 0, 1, lambda stage: None)
    with torch.no_grad():
        assert not thread.run(torch.is_grad_enabled, "export")
    with torch.inference_mode():
        assert thread.run(torch.is_inference_mode_enabled, "export")
    assert thread.run(torch.is_grad_enabled, "export")

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        raise ValueError("no more")

    drawn = thread.draw(weights())
    assert next(drawn)[0] == "a"
    with pytest.raises(ValueError, match="no more"):
        next(drawn)
    thread.close()


def _in_step(rank: int) -> bool:
    try:
        require_in_step(rank)
    except RefitError:
        return False
    return True


class _Gathering(FSDPSource):
    """One whose ranks wait for each other as they prepare, and that says nothing of it."""

    def prepare(self) -> None:
        dist.barrier()


def test_a_subclass_that_prepares_in_its_own_way_is_not_taken_to_wait_for_nobody() -> None:
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 4)})
    assert prepares_alone(FSDPSource(model))
    assert not prepares_alone(_Gathering(model))


def test_a_communicator_is_not_given_up_where_the_gpu_does_not_end_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[tuple[object, ...]] = []
    monkeypatch.setattr(waiting, "_left_running", kept)
    group = object.__new__(TorchGroup)
    group.device, group.rank, group._owns = torch.device("cuda"), 0, True
    asked: list[str] = []
    backend = SimpleNamespace(abort=lambda: asked.append("abort"), shutdown=lambda: asked.append("shutdown"))
    monkeypatch.setattr(waiting, "_gpu_is_stuck", False)
    # Work that is left running may end once its communicator has been given up.
    waiting.leave_running("kernels")
    group._backends = [backend]
    group.close(failed=True)
    assert asked == ["abort"]
    waiting.note_stuck_gpu()
    for failed in (False, True):
        group._backends = [backend]
        group.close(failed=failed)
        assert kept[-1] == ([backend],)
    assert asked == ["abort"]
