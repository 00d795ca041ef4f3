"""Shard to shard in verl into SGLang, by verl's own manager, actors and SGLang server of two workers, on CPUs.

``make test-sglang`` runs it; docs/verl.md says what has run where.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlrefit.recipes.run.files import read_json_lines
from tests.spawn import run_alone

from .sglang_run import FAILED, IN_TURN, KILLED, LACKS, REFUSED, ROOT, SPARSE, UPDATED, Seen, environment, run
from .test_trainers import OF_TWO_STEPS, STEPS

pytestmark = [
    # Seven processes load SGLang, each for many seconds.
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder: Path = tmp_path_factory.mktemp("fleet")
    own = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
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


@pytest.mark.timeout(400)
def test_the_examples_training_updates_sglang_shard_to_shard_at_each_step(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "examples/verl/compare.py",
        "--cpu",
        "--rollout",
        "sglang",
        "--folder",
        str(tmp_path),
    ]
    command += ["rlrefit_sync", "--", *OF_TWO_STEPS]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that verl's processes end with it
    ) as process:
        try:
            told, _ = process.communicate(timeout=380)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    log = tmp_path / "rlrefit_sync.log"
    assert process.returncode == 0, (told, log.read_text()[-4000:] if log.exists() else "")
    rows = read_json_lines(tmp_path / "rlrefit_sync.jsonl")
    assert [row["step"] for row in rows if "timing_s/update_weights" in row["data"]] == [1, 2]
    # The engine's log-probabilities beside the actor's, in BF16: what it generates with are the weights of the step.
    assert all(row["data"]["training/rollout_probs_diff_mean"] < 1e-3 for row in rows)
    sent, received = (
        read_json_lines(tmp_path / "refits" / f"refits-{role}-0.jsonl") for role in ("trainer", "generation")
    )
    for records in (sent, received):
        assert [record["version"] for record in records] == list(range(STEPS + 1))
        assert all(record["bytes_bulk"] > 0 == record["bytes_misc"] for record in records)
    assert all(record["bytes_bulk"] == record["bytes_verified"] for record in received)
