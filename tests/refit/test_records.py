"""The clock of a refit and what is made of its records."""

from __future__ import annotations

import json
import time

import pytest
import torch

from rlrefit.integration.records import Interval, RefitRecord, StageClock, summarize


def record(rank: int, role: str, seconds: float, **fields: object) -> RefitRecord:
    return RefitRecord(
        3, 0, rank, role, "nccl_xfer", "p2p", 10, 0, 20, 5, seconds, {"pack": seconds}, **fields
    )  # type: ignore[arg-type]


def test_a_stage_adds_up_its_blocks_and_a_new_refit_starts_at_zero() -> None:
    clock = StageClock(torch.device("cpu"))
    for _ in range(2):
        with clock.stage("pack"):
            time.sleep(0.01)
    with clock.stage("unpack"):
        pass
    assert 0.02 <= clock.seconds["pack"] < 0.2
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
    assert 0.02 <= clock.host_seconds < 0.04


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_stage_lasts_as_long_as_its_work_and_another_streams_marks_count() -> None:
    device = torch.device("cuda")
    clock = StageClock(device)
    side = torch.cuda.Stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()  # the kernel is loaded at its first use
    for _ in range(2):
        clock.restart()
        with clock.stage("pack"):
            torch.cuda._sleep(20_000_000)
        assert clock.wall_seconds < 0.005, "the stage must not wait for the device"
        with torch.cuda.stream(side):
            start.record()
            torch.cuda._sleep(20_000_000)
            end.record()
        clock.mark("unpack", start, end)
        torch.cuda.current_stream(device).wait_stream(side)
        seconds = clock.seconds
        assert 0.005 < seconds["pack"] < 0.2
        assert 0.005 < seconds["unpack"] < 0.2
