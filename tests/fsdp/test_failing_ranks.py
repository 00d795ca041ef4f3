"""A trainer rank that fails alone under FSDP2: the others end in time with its number, and are not left in a collective."""

from __future__ import annotations

import pytest

from tests.spawn import run_ranks

from .failing_ranks import ENGINE, FAILS, TIMEOUT_S, Ended, run


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Ended]]:
    """By rank and by case."""
    found: list[dict[str, Ended]] = run_ranks(run, 3, timeout_s=120.0)
    return found


def test_a_rank_that_refuses_in_prepare_leaves_no_rank_in_a_gather_and_the_engine_clean(
    ends: list[dict[str, Ended]],
) -> None:
    mine = [rank["refuses"] for rank in ends]
    assert [one.error for one in mine] == [
        ("PeerLost", "begin/1", FAILS),
        ("RefitError", "bind", -1),
        ("PeerLost", "begin/1", FAILS),
    ]
    assert all(one.seconds < TIMEOUT_S / 2 for one in mine)
    assert (mine[ENGINE].clean, mine[ENGINE].held) == (True, True)
    assert [(one.next, one.right) for one in mine] == [(None, True)] * 3


@pytest.mark.parametrize(("case", "blamed"), [("engine", ENGINE), ("beside", FAILS)])
def test_a_failure_outside_the_export_leaves_the_trainers_ranks_in_step_for_the_next_epoch(
    ends: list[dict[str, Ended]], case: str, blamed: int
) -> None:
    mine = [rank[case] for rank in ends]
    for rank, one in enumerate(mine):
        assert one.error is not None
        assert (one.error[0], one.error[2]) == (
            ("ValueError", -1) if rank == blamed else ("PeerLost", blamed)
        )
    assert not mine[ENGINE].clean
    assert all(one.seconds < TIMEOUT_S for one in mine)
    assert [(one.next, one.right) for one in mine] == [(None, True)] * 3


def test_a_rank_that_fails_in_the_export_ends_the_gather_of_the_others_and_their_next_refit_is_refused(
    ends: list[dict[str, Ended]],
) -> None:
    mine = [rank["export"] for rank in ends]
    assert [one.error for one in mine][:2] == [("PeerLost", "export", FAILS), ("ValueError", "", -1)]
    assert mine[ENGINE].error is not None
    assert (mine[ENGINE].error[0], mine[ENGINE].error[2]) == ("PeerLost", FAILS)
    assert all(one.seconds < TIMEOUT_S for one in mine)
    assert not mine[ENGINE].clean
    # What the other trainer rank waits in still may take a later gather for its own.
    assert mine[0].next == ("RefitError", "export", -1)
    assert [mine[rank].next for rank in (FAILS, ENGINE)] == [("PeerLost", "settings", 0)] * 2
