"""What the commands show on a terminal of 80 columns and elsewhere, and what an interrupted run says."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from rich.console import Console

from rlrefit.recipes.cli import main
from rlrefit.recipes.config.schema import RayConfig
from rlrefit.recipes.configs import bundled_recipes
from rlrefit.recipes.run.checkpoint import CheckpointStore
from rlrefit.recipes.run.cluster import RunError, gather, ray_cluster
from rlrefit.recipes.run.display import RunDisplay
from rlrefit.recipes.terminal import under_way
from rlrefit.recipes.train import (
    Interrupted,
    _ended_as_interrupted,
    _stop_on_interrupt,
    _told_what_is_saved,
)

ROW = {
    "step": 1200,
    "reward/mean": -0.026,
    "val/reward": 0.1,
    "generation_kl": 2e-14,
    "loss": -0.017,
    "time/step": 234.56,
    "time/refit": 0.06,
    "time/generate": 120.11,
    "time/train": 88.01,
    "refit/bytes_bulk": 61_000_000_000,
    "refit/bytes_misc": 25_200_000,
}


def test_the_line_and_the_table_of_a_long_run_fit_80_columns_uncut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(file=(shown := io.StringIO()), width=80)
    with under_way(console, "starting 4 ranks"):
        assert shown.getvalue().count("\n") == 1  # no terminal, which could be written over
    display = RunDisplay(console, 1200, 1)
    display.on_step(ROW)
    console.print(display.table([ROW], "a run"))
    assert main(["train", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    lines = shown.getvalue().splitlines() + listed
    assert [line.split()[0] for line in listed] == bundled_recipes()
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)
    assert not any("…" in line for line in lines[2:])  # behind what is under way


def test_a_run_that_is_interrupted_at_once_says_which_checkpoint_there_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, {})
    with pytest.raises(Interrupted, match="no step is saved"), _told_what_is_saved(store):
        raise KeyboardInterrupt
    (tmp_path / "step_000010").mkdir()
    with pytest.raises(Interrupted, match="step_000010"), _told_what_is_saved(store):
        raise KeyboardInterrupt
    with pytest.raises(Interrupted, match="step_000010"), _told_what_is_saved(store):
        raise SystemExit(signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="step_000010"), _told_what_is_saved(store), _ended_as_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("ended_by", "told"),
    [
        (
            "Worker exits unexpectedly by a signal. Exit code: 1. The process receives a SIGTERM.",
            "rlrefit train alone",
        ),
        ("Worker unexpectedly exits with a connection error code 2. End of file.", "out-of-memory"),
    ],
)
def test_a_rank_that_was_sent_sigterm_is_not_said_to_have_run_out_of_memory(
    ended_by: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(_: object) -> None:
        raise RayActorError(error_msg=f"The actor died.\n\tactor_id: 1\nThe actor is dead. {ended_by}")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    with pytest.raises(RunError, match="trainer rank 1 died") as died:
        gather([("trainer rank 1", object())], 1.0)
    remedies = [remedy for remedy in ("rlrefit train alone", "out-of-memory") if remedy in str(died.value)]
    assert remedies == [told]


def test_an_option_that_a_command_lacks_is_answered_with_that_commands_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "recipe=grpo_tiny", "--steps", "5"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "usage: rlrefit train" in said
    assert "key=value" in said.splitlines()[-1]


def test_the_first_interrupt_lets_the_step_end_and_the_second_one_does_not() -> None:
    console = Console(file=(shown := io.StringIO()), width=80)
    with _stop_on_interrupt(console) as asked:
        assert not asked()
        signal.raise_signal(signal.SIGINT)
        assert asked()
        assert "after this step" in shown.getvalue()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_ray_that_does_not_come_up_in_time_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise Exception(
            "The current node timed out during startup. This could happen for many reasons"
        )  # as Ray does

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(RunError, match="timed out during startup"), ray_cluster(RayConfig(), 1):
        pass
