"""What the commands show on a terminal of 80 columns and elsewhere, and what an interrupted run says."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console

from rlrefit.recipes.cli import main
from rlrefit.recipes.configs import bundled_recipes
from rlrefit.recipes.run.checkpoint import CheckpointStore
from rlrefit.recipes.run.display import RunDisplay
from rlrefit.recipes.terminal import under_way
from rlrefit.recipes.train import Interrupted, _ended_as_interrupted, _told_what_is_saved

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
