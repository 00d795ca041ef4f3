"""Shard to shard in verl into SGLang, by verl's own manager, actors and SGLang server of two workers, on CPUs.

``make test-sglang`` runs it; docs/verl.md says what has run where.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.spawn import run_alone

from .sglang_run import FAILED, IN_TURN, KILLED, LACKS, REFUSED, SPARSE, UPDATED, Seen, environment, run

pytestmark = [
    # Seven processes load SGLang, each for many seconds.
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder: Path = tmp_path_factory.mktemp("fleet")
    own = {key: value for key, value in environment(folder).items() if key != "PYTHONPATH"}
    found = run_alone(run, folder, environment=own, timeout_s=800.0)
    assert isinstance(found, Seen)
    return found


def test_updates_leave_in_all_workers_what_sglang_loads_of_a_checkpoint_bit_for_bit(seen: Seen) -> None:
    assert seen.held.keys() == set(UPDATED)
    for version in UPDATED:
        assert seen.held[version] == seen.loaded[version]
        assert seen.loaded[version][0].keys() == seen.loaded[version][1].keys()
    assert len({str(found) for found in seen.loaded.values()}) == len(UPDATED)
    for records in seen.received:
        dense = [record for record in records if record["changed_share"] is None]
        assert all(record["bytes_bulk"] == record["bytes_verified"] > 0 for record in dense)
        assert [record["version"] for record in records] == list(UPDATED)
        assert all(record["bytes_misc"] == 0 for record in records)


def test_an_update_of_what_changed_alone_tells_how_little_travelled(seen: Seen) -> None:
    [sparse] = [record for record in seen.sent if record["changed_share"] is not None]
    assert sparse["version"] == SPARSE
    assert 0.01 < sparse["changed_share"] < 0.03
    assert sparse["bytes_wire"] < 0.1 * sparse["bytes_bulk"]
    assert seen.metrics[SPARSE]["checkpoint_engine/changed_share"] == sparse["changed_share"]


def test_after_each_update_the_engine_answers_from_its_weights_and_from_no_older_cache(seen: Seen) -> None:
    assert seen.answers == seen.afresh
    assert [answer[2] for answer in seen.answers.values()] == list(UPDATED)
    assert len({str(logprobs) for _, logprobs, _ in seen.answers.values()}) == len(UPDATED)


def test_a_release_that_lacks_names_is_refused_before_anything_is_sent_and_the_actors_hear_why(
    seen: Seen,
) -> None:
    error, seconds = seen.errors[REFUSED]
    assert LACKS in error
    assert "Nothing was sent" in error
    assert seconds < 60


def test_a_worker_that_fails_ends_the_update_on_all_and_the_next_one_meets_anew(seen: Seen) -> None:
    error, seconds = seen.errors[FAILED]
    assert "model.norm.weight" in error
    assert seconds < 60
    epochs = [record["epoch"] for record in seen.sent]
    assert len(set(epochs[:3])) == 1
    assert epochs[3] > epochs[2]


def test_the_manager_for_shared_gpus_wakes_and_refits_a_sleeping_server_over_one_group(seen: Seen) -> None:
    before, *turns = seen.sent[-3:]
    assert [record["version"] for record in turns] == list(IN_TURN)
    assert turns[0]["epoch"] == turns[1]["epoch"] > before["epoch"]


def test_a_killed_worker_ends_the_update_with_its_name(seen: Seen) -> None:
    error, seconds = seen.errors[KILLED]
    assert "generation rank" in error
    assert "PeerLost" in error
    assert seconds < 60
