"""A few dozen faults of every kind, one seed: nothing is corrupted, nobody hangs, errors name the cause, all heals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.ahead import FoundAhead, keeping_time

from .crew import Crew, Result, run_trials
from .judge import ENOUGH, Verdict, holds, judge
from .rank import Ended, Observed, Raised, Struck
from .trials import DELTA_ROUND, HEALED, PATIENT_S, ROUND, VERSIONS, WORLDS, Kind, Trial, draw

SEED = 5
# Of sparse refits, one of each; the command has the others.
IN_THE_SUITE = {
    Kind.KILLED,
    Kind.BROKEN,
    Kind.LOST_BLOCKS,
    Kind.ENTRIES,
    Kind.HEADERS,
    Kind.BASE,
    Kind.UNRECORDED,
    Kind.WRITTEN,
    Kind.DIRTY,
    Kind.RESTARTED,
}


@keeping_time  # faults are noticed by limits of seconds
def run_a_round(folder: Path) -> list[Result]:
    return run_trials(SEED, len(ROUND), crews=4)


@keeping_time
def run_sparse_refits(folder: Path) -> list[Result]:
    left = set(IN_THE_SUITE)

    def is_first(trial: Trial) -> bool:
        found = trial.kind in left
        left.discard(trial.kind)
        return found

    return run_trials(SEED, len(DELTA_ROUND), 4, is_first, delta=True)


def change_bytes_that_nobody_checks(folder: Path) -> Observed:
    trial = Trial(0, "0/0", Kind.FLIPPED, (2, 1), 1, "off", PATIENT_S, (2, ""), 0.0)
    with Crew() as crew:
        return crew.run(trial, {})


def write_engines_where_nobody_adds_up(folder: Path) -> list[Observed]:
    """Behind its back, where blocks land and where none lands."""
    found = []
    with Crew() as crew:
        for kind in (Kind.WRITTEN, Kind.UNSEEN):
            trial = Trial(0, "0/0", kind, (2, 1), 2, "off", PATIENT_S, (3, ""), 0.0, delta=True)
            found.append(crew.run(trial, {}))
    return found


AHEAD = (run_a_round, run_sparse_refits, change_bytes_that_nobody_checks, write_engines_where_nobody_adds_up)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> list[Result]:
    return [*found_ahead.by(run_a_round), *found_ahead.by(run_sparse_refits)]


def told(results: list[Result]) -> str:
    """The trials in which something was not as it has to be, with the seed that repeats them."""
    wrong = [(seen, verdict) for seen, verdict in results if verdict.faults]
    return "".join(f"\nseed {SEED}, {seen.told}\n    " + "\n    ".join(found.faults) for seen, found in wrong)


def test_every_kind_of_fault_comes_to_be(results: list[Result]) -> None:
    assert {seen.trial.kind for seen, _ in results if seen.struck is not None} == {*ROUND} | IN_THE_SUITE


@pytest.mark.parametrize("count", ["corrupt", "unguarded", "hangs"])
def test_no_engine_serves_wrong_bytes_or_is_clean_while_it_may_be_written_and_every_rank_ends_in_time(
    results: list[Result], count: str
) -> None:
    assert not any(getattr(verdict, count) for _, verdict in results), told(results)


def test_the_errors_of_the_other_ranks_are_refit_errors_that_name_the_cause(results: list[Result]) -> None:
    errors = sum(verdict.errors for _, verdict in results)
    assert sum(verdict.typed for _, verdict in results) == errors, told(results)
    named = sum(verdict.named for _, verdict in results)
    assert named >= ENOUGH * errors, told(results)


def test_the_next_epoch_brings_every_engine_to_one_version(results: list[Result]) -> None:
    assert all(verdict.healed for _, verdict in results), told(results)


def test_a_seed_stands_for_the_same_trials_each_time() -> None:
    passed = {(0, "open"): 100, (1, "begin"): 50, (2, "begin"): 50}
    counts = {world: [passed] * sum(world) for world in WORLDS}
    sparse = {world: [passed | {(3, "apply"): 20}] * sum(world) for world in WORLDS}
    assert draw(7, 40, counts) == draw(7, 40, counts)
    assert draw(7, 40, counts) != draw(8, 40, counts)
    assert {trial.kind for trial in draw(7, len(ROUND), counts)} == {*ROUND}
    assert {trial.kind for trial in draw(7, len(DELTA_ROUND), sparse, delta=True)} == {*DELTA_ROUND}


TRIAL = Trial(0, "0/0", Kind.KILLED, (1, 2), 1, "full", PATIENT_S, (1, "begin"), 0.5)
PEER_LOST = Raised("PeerLost", "refit rank 1 gave up", True, False, blamed=1)


def observed() -> Observed:
    """Rank 1 was killed, and all went as it has to."""
    dense = {"committed": [HEALED], "sparse": {HEALED: False}}
    healed = {rank: Ended(rank, clean=True, version=HEALED, **dense) for rank in (1, 2)}
    healed[0] = Ended(0, **dense)
    ended = {0: Ended(0, PEER_LOST, sent=[2]), 2: Ended(2, PEER_LOST, clean=False, version=1)}
    return Observed(TRIAL, Struck(0.0, ""), ended, killed=True, healed=healed)


def test_the_judge_finds_nothing_where_all_went_as_it_has_to() -> None:
    assert judge(observed()) == Verdict(errors=2, typed=2, named=2)
    assert holds([judge(observed())])


@pytest.mark.parametrize(
    ("rank_2", "found"),
    [
        (Ended(2, PEER_LOST, clean=True, version=2, left_wrong=["up"]), {"corrupt": 1}),
        (Ended(2, committed=[2], wrong={2: ["up"]}, clean=True, version=2), {"corrupt": 1, "errors": 1}),
        (Ended(2, PEER_LOST, clean=True, version=1), {"unguarded": 1}),
        (Ended(2, Raised("ValueError", "?", False, False), clean=False), {"typed": 1, "named": 1}),
        (Ended(2, dataclasses.replace(PEER_LOST, blamed=0), clean=False), {"named": 1}),
    ],
)
def test_the_judge_sees_what_must_not_be(rank_2: Ended, found: dict[str, int]) -> None:
    seen = observed()
    seen.ended[2] = rank_2
    verdict = dataclasses.asdict(judge(seen))
    expected = dataclasses.asdict(Verdict(errors=2, typed=2, named=2)) | {"faults": verdict["faults"]}
    if "errors" in found:
        expected |= {"typed": 1, "named": 1}
    assert verdict == expected | found
    assert not holds([judge(seen)])


def test_the_judge_sees_bytes_that_change_where_nothing_is_checked(found_ahead: FoundAhead) -> None:
    verdict = judge(found_ahead.by(change_bytes_that_nobody_checks))
    assert verdict.corrupt == 1
    assert verdict.healed


def test_the_judge_sees_weights_that_are_wrong_under_blocks_and_counts_those_beside_them_as_escapes(
    found_ahead: FoundAhead,
) -> None:
    found = [judge(seen) for seen in found_ahead.by(write_engines_where_nobody_adds_up)]
    assert [(verdict.corrupt, verdict.escapes) for verdict in found] == [(1, 0), (0, 1)]
    assert all(verdict.healed for verdict in found)


def test_the_judge_sees_a_sparse_refit_of_an_engine_that_was_dirty_and_a_next_epoch_without_one() -> None:
    seen = observed()
    seen.trial = dataclasses.replace(TRIAL, kind=Kind.DIRTY, delta=True, place=(2, ""))
    for ended in seen.ended.values():
        ended.error, ended.clean, ended.version = None, True, 3
        ended.committed, ended.sparse = [1, 2, 3], {1: False, 2: True, 3: True}
    verdict = judge(seen)
    assert verdict.corrupt == len(seen.ended)
    assert not verdict.healed


def test_the_judge_sees_hangs_and_engines_that_do_not_heal() -> None:
    seen = observed()
    seen.hung[2] = "its stack"
    del seen.ended[2]
    seen.healed[2].left_wrong = ["up"]
    verdict = judge(seen)
    assert (verdict.hangs, verdict.healed, verdict.errors) == (1, False, 1)
    assert not holds([verdict])


def test_engines_that_serve_different_versions_are_silent_corruption() -> None:
    seen = observed()
    versions = {1: VERSIONS[0], 2: 2}
    seen.ended = {rank: Ended(rank, clean=True, version=version) for rank, version in versions.items()}
    assert judge(seen).corrupt == 1
