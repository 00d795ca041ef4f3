"""Processes of the servers, and ranks in such: what they return, and every way in which one of them fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import util
from typing import Any

import pytest

from tests.spawn import RankFailed, run_alone, run_ranks, run_together


def add_up(rank: int, offset: int) -> tuple[int, Any]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, total


def test_results_come_back_by_rank_tensors_included() -> None:
    assert [(rank, int(total)) for rank, total in run_ranks(add_up, 2, 10)] == [(0, 21), (1, 21)]


def gather(rank: int, sizes: Sequence[int]) -> list[list[Any]]:
    import torch.distributed as dist

    found = []
    for size in sizes:
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (rank, "x" * size * rank))
        found.append(told)
    return found


def test_ranks_gather_objects_that_fit_into_one_collective_and_larger_ones() -> None:
    sizes = [0, *range(4060, 4100), 100_000]  # with some bytes around them, 4096 fit
    told = [[(0, ""), (1, "x" * size)] for size in sizes]
    assert run_ranks(gather, 2, sizes) == [told, told]


def tell_parents() -> tuple[list[str | None], int, int]:
    """Of this process, and of one that it starts itself."""
    settings = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")]
    return settings, os.getppid(), run_alone(os.getppid, environment={})


def test_all_that_descends_from_a_session_is_forked_by_one_server_without_gpus_and_with_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    settings, first, second = run_alone(tell_parents, environment={})
    assert settings == ["", "1"]
    assert first == second


def fail_on_rank_1(rank: int, way: str) -> int:
    import torch.distributed as dist

    dist.barrier()  # a rank that still connects would be the first to fail
    if way == "sleep":
        time.sleep(120 if rank == 0 else 0)
    elif way == "die":
        time.sleep(120 if rank == 0 else 0)
        os._exit(7)
    elif way == "raise":
        if rank == 1:
            raise KeyError("what rank 1 says")
        dist.barrier()
    elif rank == 1 and way == "raise late":
        dist.destroy_process_group()  # the second one raises
    elif rank == 1:
        util.Finalize(None, _crash if way == "crash late" else _hang, exitpriority=100)
    return rank


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> None:
    time.sleep(120)


def crash_alone() -> None:
    util.Finalize(None, _crash, exitpriority=100)


# Each way to fail, and what is told of it. They wait beside one another.
FAILURES: dict[str, str] = {
    "raise": r"(?s)rank 1 of 2:.*fail_on_rank_1.*what rank 1 says",
    "die": "rank 1 of 2 died with exit code 7",
    "sleep": r"(?s)ranks \[0\] of 2 ran longer than 15.*rank 0:.*in fail_on_rank_1",
    "raise late": r"(?s)rank 1 of 2 had answered, and raised:.*destroy_process_group",
    "crash late": r"^fail_on_rank_1: rank 1 of 2 had answered, and died with exit code -11\n(?s:.*in _crash)",
    "hang late": r"^fail_on_rank_1: rank 1 of 2 had answered, and did not end in 15 s\n(?s:.*in _hang)",
    "alone": r"died with exit code -11\n(?s:.*in _crash)",
}


@pytest.fixture(scope="module")
def failing() -> Iterator[dict[str, Future[Any]]]:
    run_ranks(add_up, 2, 10)  # the first ranks of a session may wait until the server of processes has loaded

    def run(way: str) -> Any:
        if way == "alone":
            return run_alone(crash_alone, environment={})
        return run_ranks(fail_on_rank_1, 2, way, timeout_s=15 if way in ("sleep", "hang late") else 240)

    with ThreadPoolExecutor(len(FAILURES)) as pool:
        yield {way: pool.submit(run, way) for way in FAILURES}


@pytest.mark.parametrize("way", FAILURES)
def test_a_rank_that_fails_is_named_and_the_others_end(way: str, failing: dict[str, Future[Any]]) -> None:
    with pytest.raises(RankFailed, match=FAILURES[way]):
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

    sides: tuple[Callable[[], None], ...] = (trainer, engine)
    for worlds in (sides, sides[::-1]):
        lost.clear()
        with pytest.raises(RankFailed, match=r"^is the cause\n") as raised:
            run_together(*worlds)
        [note] = raised.value.__notes__
        assert "lost its peer" in note
    assert run_together(lambda: 1, lambda: 2) == [1, 2]
