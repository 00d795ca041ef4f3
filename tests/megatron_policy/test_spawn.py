from __future__ import annotations

import os
import signal
import threading
import time
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


def test_an_error_of_a_rank_comes_back_with_its_traceback_while_the_others_wait_for_it() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2:.*raise_on_rank_1.*what rank 1 says"):
        run_ranks(raise_on_rank_1, 2)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 died with exit code 7"):
        run_ranks(die_on_rank_1, 2)


def test_a_rank_that_does_not_finish_is_named_and_killed() -> None:
    run_ranks(add_up, 2, 10)  # the first ranks of a session may wait until the server of processes has loaded
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"ranks \[0\] of 2 ran longer than 6"):
        run_ranks(sleep_on_rank_0, 2, timeout_s=6)
    assert time.monotonic() - started < 30


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


def test_a_rank_that_raises_after_its_answer_is_named_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 had answered, and raised:.*destroy_process_group"):
        run_ranks(leave_rank_1_by, 2, "raise")


def test_a_rank_that_crashes_as_it_leaves_is_named_with_its_exit_code() -> None:
    with pytest.raises(
        RankFailed, match=r"^leave_rank_1_by: rank 1 of 2 had answered, and died with exit code -11$"
    ):
        run_ranks(leave_rank_1_by, 2, "crash")


def test_a_rank_that_never_leaves_is_named_and_killed() -> None:
    with pytest.raises(
        RankFailed, match=r"^leave_rank_1_by: rank 1 of 2 had answered, and did not end in 6 s$"
    ):
        run_ranks(leave_rank_1_by, 2, "hang", timeout_s=6)


def crash_alone() -> None:
    util.Finalize(None, _crash, exitpriority=100)


def test_a_process_alone_that_crashes_as_it_leaves_is_an_error_too() -> None:
    with pytest.raises(RankFailed, match="died with exit code -11"):
        run_alone(crash_alone, environment={})


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
