from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.spawn import RankFailed, run_ranks


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
