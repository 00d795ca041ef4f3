"""Ranks in processes of their own: what they return, and every way in which one of them fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import util
from typing import Any

import pytest

from tests.spawn import RankFailed, run_alone, run_ranks, run_together


def add_up(rank: int, offset: int) -> tuple[int, int, Any]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, int(total), total


def raise_on_rank_1(rank: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise KeyError("what rank 1 says")
    dist.barrier()


def die_on_rank_1(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(120)


def sleep_on_rank_0(rank: int) -> None:
    if rank == 0:
        time.sleep(120)


def test_results_come_back_by_rank_tensors_included() -> None:
    results = run_ranks(add_up, 2, 10)
    assert [result[:2] for result in results] == [(0, 21), (1, 21)]
    assert [int(result[2]) for result in results] == [21, 21]


def leave_rank_1_by(rank: int, end: str) -> int:
    """Every way to fail when the answer is already given."""
    import torch.distributed as dist

    dist.barrier()  # a rank that still connects would be the first to fail
    if rank == 1:
        if end == "raise":
            dist.destroy_process_group()  # the second one raises
        else:
            leave = _crash if end == "crash" else _hang
            util.Finalize(None, leave, exitpriority=100)
    return rank


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> None:
    time.sleep(120)


def crash_alone() -> None:
    util.Finalize(None, _crash, exitpriority=100)


# Each way to fail, and what is told of it. They wait beside one another.
FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "raises while the others wait for it": (
        lambda: run_ranks(raise_on_rank_1, 2),
        r"(?s)rank 1 of 2:.*raise_on_rank_1.*what rank 1 says",
    ),
    "dies": (lambda: run_ranks(die_on_rank_1, 2), "rank 1 of 2 died with exit code 7"),
    "does not finish": (
        lambda: run_ranks(sleep_on_rank_0, 2, timeout_s=8),
        r"ranks \[0\] of 2 ran longer than 8",
    ),
    "raises after its answer": (
        lambda: run_ranks(leave_rank_1_by, 2, "raise"),
        r"(?s)rank 1 of 2 had answered, and raised:.*destroy_process_group",
    ),
    "crashes as it leaves": (
        lambda: run_ranks(leave_rank_1_by, 2, "crash"),
        r"^leave_rank_1_by: rank 1 of 2 had answered, and died with exit code -11$",
    ),
    "never leaves": (
        lambda: run_ranks(leave_rank_1_by, 2, "hang", timeout_s=8),
        r"^leave_rank_1_by: rank 1 of 2 had answered, and did not end in 8 s$",
    ),
    "crashes alone": (lambda: run_alone(crash_alone, environment={}), "died with exit code -11"),
}


@pytest.fixture(scope="module")
def failing() -> Iterator[dict[str, Future[Any]]]:
    run_ranks(add_up, 2, 10)  # the first ranks of a session may wait until the server of processes has loaded
    with ThreadPoolExecutor(len(FAILURES)) as pool:
        yield {way: pool.submit(run) for way, (run, _) in FAILURES.items()}


@pytest.mark.parametrize("way", FAILURES)
def test_a_rank_that_fails_is_named_and_the_others_end(way: str, failing: dict[str, Future[Any]]) -> None:
    with pytest.raises(RankFailed, match=FAILURES[way][1]):
        failing[way].result(60)


def test_what_failed_first_of_two_worlds_is_raised_and_what_followed_is_noted() -> None:
    lost = threading.Event()

    def trainer() -> None:
        assert lost.wait(60)
        time.sleep(0.1)
        raise RankFailed("lost its peer")

    def engine() -> None:
        lost.set()
        raise RankFailed("is the cause")

    for sides in ((trainer, engine), (engine, trainer)):
        lost.clear()
        with pytest.raises(RankFailed, match=r"^is the cause\n") as raised:
            run_together(*sides)
        [note] = raised.value.__notes__
        assert "lost its peer" in note
    assert run_together(lambda: 1, lambda: 2) == [1, 2]
