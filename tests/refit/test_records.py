"""The clock of a refit and what is made of its records."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlrefit.integration.records.clock import Interval, StageClock
from rlrefit.integration.records.record import RefitRecord, summarize


def record(rank: int, role: str, seconds: float, **fields: object) -> RefitRecord:
    return RefitRecord(
        3, 0, rank, role, "nccl_xfer", "p2p", 10, 0, 20, 5, seconds, {"pack": seconds}, **fields
    )  # type: ignore[arg-type]


def test_a_stage_adds_up_its_blocks_and_a_new_refit_starts_at_zero() -> None:
    clock = StageClock(torch.device("cpu"))
    start = time.monotonic()
    for _ in range(2):
        with clock.stage("pack"):
            time.sleep(0.01)
    most = time.monotonic() - start
    with clock.stage("unpack"):
        pass
    assert 0.02 <= clock.seconds["pack"] <= most
    assert [interval.stage for interval in clock.intervals()] == ["pack", "pack", "unpack"]
    assert all(0 <= interval.start <= interval.end for interval in clock.intervals())
    clock.restart()
    assert clock.seconds == {}
    assert clock.intervals() == []


def test_host_seconds_count_what_the_thread_computes_and_neither_sleep_nor_waits() -> None:
    clock = StageClock(torch.device("cpu"))

    def compute(seconds: float) -> None:
        start = time.thread_time()
        while time.thread_time() - start < seconds:
            pass

    compute(0.02)
    time.sleep(0.05)
    with clock.waiting():
        compute(0.05)
    assert 0.02 <= clock.host_seconds < 0.02 + 0.05


def test_host_seconds_count_what_another_thread_computes_for_the_refit_and_not_its_waits() -> None:
    clock = StageClock(torch.device("cpu"))

    def compute(seconds: float) -> None:
        start = time.thread_time()
        while time.thread_time() - start < seconds:
            pass

    def help_out() -> None:
        with clock.helping():
            compute(0.05)
            with clock.waiting():
                compute(0.1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(compute, 0.1).result()
        pool.submit(help_out).result()
    assert 0.05 <= clock.host_seconds < 0.05 + 0.1


def test_a_record_is_plain_data_and_carries_a_timeline_only_if_there_is_one() -> None:
    plain = record(0, "trainer", 1.0).to_json()
    assert "timeline" not in plain
    assert RefitRecord(**json.loads(json.dumps(plain))) == record(0, "trainer", 1.0)
    timed = record(0, "trainer", 1.0, timeline=[Interval("pack", 0.0, 0.5)]).to_json()
    assert json.loads(json.dumps(timed))["timeline"] == [["pack", 0.0, 0.5]]


def test_a_summary_takes_the_slowest_rank_and_refuses_mixed_versions() -> None:
    summary = summarize([record(0, "trainer", 1.0, host_seconds=0.1), record(1, "generation", 2.0)])
    assert (summary.seconds, summary.host_seconds, summary.bytes_bulk) == (2.0, 0.1, 10)
    assert summary.kept_gb_per_s == 20 / 2.0 / 1e9
    other = RefitRecord(4, 0, 1, "generation", "nccl_xfer", "p2p", 0, 0, 0, 0, 1.0)
    with pytest.raises(ValueError, match="missed a refit"):
        summarize([record(0, "trainer", 1.0), other])


class Recorded:
    """An event on a device whose clock the test sets."""

    reads = 0

    def __init__(self, seconds: float):
        self.at = seconds

    def synchronize(self) -> None:
        Recorded.reads += 1

    def elapsed_time(self, end: Recorded) -> float:
        return (end.at - self.at) * 1e3


def marked_clock(timeline: bool) -> Any:
    """A clock with 1,000 spans of a stage on each of two streams that run side by side, and one of another."""
    clock: Any = StageClock(torch.device("cpu"))
    clock.restart(timeline=timeline)
    clock._origin = Recorded(0.0)
    for index in range(1000):
        for stream, ahead in ((1, 0.0), (2, 0.5)):
            start = Recorded(1.0 + index + ahead)
            if not clock.wants_start("transfer", stream):
                start.at = -99.0  # what the event has from an earlier refit
            clock.mark("transfer", stream, start, Recorded(1.25 + index + ahead))
    clock.mark("pack", 1, Recorded(0.5), Recorded(0.75))
    return clock


@pytest.mark.parametrize("timeline", [False, True])
def test_marked_work_counts_from_its_first_start_to_its_last_end_over_all_streams(timeline: bool) -> None:
    seconds = marked_clock(timeline).seconds
    assert seconds == {"transfer": pytest.approx(1000.75 - 1.0), "pack": pytest.approx(0.25)}


def test_few_events_are_read_without_a_timeline_and_all_with_one() -> None:
    clock = marked_clock(timeline=False)
    Recorded.reads = 0
    assert clock.seconds
    assert clock.intervals() == []
    assert Recorded.reads == 2 * 3
    timed = marked_clock(timeline=True).intervals()
    assert len(timed) == 2001
    assert timed[0] == Interval("pack", 0.5, 0.75)
    assert timed[1] == Interval("transfer", 1.0, 1.25)
    assert timed[-1] == Interval("transfer", 1000.5, 1000.75)
    clock.restart()
    assert (clock.seconds, clock.intervals()) == ({}, []), "a new refit forgets what was marked"
