"""What sparse refits go over where the ranks of a host can't share GPU memory for them; threads over gloo.

The group of copy engines is the code's own up to the driver, which is played: it has no memory, maps nothing, or pins nothing on one rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.comm import device_group, opening
from rlrefit.integration.comm.device_group import DeviceGroup
from rlrefit.integration.comm.opening import GroupChoice
from rlrefit.integration.comm.shared_memory import SharedMemory
from rlrefit.integration.engine import refit
from rlrefit.integration.engine.epoch_plan import EpochPlan
from rlrefit.integration.errors import TransportUnavailable
from rlrefit.integration.gpu_memory import buckets
from rlrefit.integration.gpu_memory.driver import DriverError
from rlrefit.integration.layout import Fragment
from tests.colocated.worlds import left_behind, nothing_left
from tests.refit.synthetic import run_world

from .scene import CONFIG, refits, world

DEVICE = GroupChoice("device", "the test says so", "buckets in GPU memory", 1 << 20)
WIRE = GroupChoice("network", "the test says so")
WHY = {"memory": "cuMemAlloc", "mapping": "cuIpcOpenMemHandle", "pinning": "ulimit"}


@dataclass
class Played:
    """The driver of each rank's thread, of which one fails."""

    fails: str
    rank: int
    now: threading.local
    made: list[DeviceGroup]

    def on_failing_rank(self, what: str) -> bool:
        return self.fails == what and self.now.rank == self.rank


Play = Callable[[str, int], Played]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Let one rank's driver fail in one way."""

    def begin(fails: str, rank: int) -> Played:
        played = Played(fails, rank, threading.local(), [])

        class Group(DeviceGroup):
            def _begin(self) -> None:
                # Only its index is asked for.
                own, self.device = self.device, torch.device("cuda", 0)
                super()._begin()
                self.device = own
                played.made.append(self)

            def connect(self, peers: Any) -> None:
                played.now.rank = self.rank
                super().connect(peers)

        def own_buckets(nbytes: int, device: torch.device, timeout_s: float) -> Any:
            if played.on_failing_rank("memory"):
                raise DriverError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
            told = buckets.ToldBuckets(None, 0)
            return SimpleNamespace(address=0, told=told, close=lambda: None)

        class PeerBuckets(buckets.PeerBuckets):
            def __init__(self, told: buckets.ToldBuckets, *args: Any):
                if told.refused:
                    super().__init__(told, *args)
                if played.on_failing_rank("mapping"):
                    raise TransportUnavailable("cuIpcOpenMemHandle says CUDA_ERROR_INVALID_CONTEXT")
                self.address = 0

            def close(self) -> None:
                pass

        monkeypatch.setattr(device_group, "OwnBuckets", own_buckets)
        monkeypatch.setattr(device_group, "PeerBuckets", PeerBuckets)
        monkeypatch.setattr(device_group, "on_device", lambda _: nullcontext())
        monkeypatch.setattr(device_group, "call", lambda *_: 0)
        monkeypatch.setattr(SharedMemory, "pin", lambda _: not played.on_failing_rank("pinning"))
        monkeypatch.setattr(opening, "DeviceGroup", Group)
        return played

    return begin


def over(monkeypatch: pytest.MonkeyPatch, *choices: GroupChoice) -> None:
    plan_epoch = refit.plan_epoch

    def with_these(*args: Any) -> tuple[EpochPlan, list[Fragment]]:
        plan, fragments = plan_epoch(*args)
        return replace(plan, delta_groups=choices), fragments

    monkeypatch.setattr(refit, "plan_epoch", with_these)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("fails", WHY)
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_sparse_refits_take_the_wire_on_all_ranks_where_one_can_not_share_gpu_memory(
    play: Play,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    fails: str,
    rank: int,
) -> None:
    played, before = play(fails, rank), left_behind()
    over(monkeypatch, DEVICE, WIRE)
    start = time.monotonic()
    results = run_world(*world(2, 2), refits(1, 2, 3, 4), replace(CONFIG, delta=mode))
    assert time.monotonic() - start < CONFIG.timeout_s
    for of_rank in results:
        assert [wrong for _, wrong in of_rank] == [[]] * 4
        sparse = [record.changed_share is not None for record, _ in of_rank]
        assert sparse[:3] == [False, mode == "always", True]
    assert len(played.made) == 4
    told = [record.getMessage() for record in caplog.records if "sparse refits" in record.getMessage()]
    assert len(told) == 1
    assert WHY[fails] in told[0]
    assert nothing_left(before)


@pytest.mark.parametrize("fails", WHY)
def test_refits_stay_dense_under_auto_where_no_wire_joins_the_ranks_and_always_does_not_open(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    play(fails, 2)
    over(monkeypatch, DEVICE)
    for of_rank in run_world(*world(2, 2), refits(1, 2, 3), replace(CONFIG, delta="auto")):
        assert [(record.changed_share, wrong) for record, wrong in of_rank] == [(None, [])] * 3
    told = [record.getMessage() for record in caplog.records if "dense" in record.getMessage()]
    assert len(told) == 1
    assert WHY[fails] in told[0]
    start = time.monotonic()
    for error in run_world(*world(2, 2), refits(1), CONFIG):
        assert isinstance(error, TransportUnavailable)
        assert WHY[fails] in str(error)
    assert time.monotonic() - start < CONFIG.timeout_s
