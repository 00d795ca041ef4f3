"""Stages of a refit on a GPU: as long as their work there, whoever marks it."""

from __future__ import annotations

import torch

from rlrefit.integration.records.clock import StageClock

from .needs import needs

pytestmark = needs()


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
            assert clock.wants_start("unpack", side.cuda_stream)
            start.record()
            torch.cuda._sleep(20_000_000)
            end.record()
        clock.mark("unpack", side.cuda_stream, start, end)
        torch.cuda.current_stream(device).wait_stream(side)
        seconds = clock.seconds
        assert 0.005 < seconds["pack"] < 0.2
        assert 0.005 < seconds["unpack"] < 0.2
