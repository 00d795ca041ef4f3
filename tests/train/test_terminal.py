"""What the commands show on a terminal of 80 columns, and what an interrupted run says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rlrefit.recipes.cli import main
from rlrefit.recipes.configs import bundled_recipes
from rlrefit.recipes.run.checkpoint import CheckpointStore
from rlrefit.recipes.run.display import RunDisplay
from rlrefit.recipes.terminal import plain_table, under_way
from rlrefit.recipes.train import Interrupted, _told_what_is_saved

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


def _console(width: int = 80) -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, width=width), shown


def test_the_line_and_the_table_of_a_long_run_fit_80_columns_uncut() -> None:
    console, shown = _console()
    display = RunDisplay(console, 1200, 1)
    display.on_step(ROW)
    console.print(display.table([ROW], "a run"))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown.getvalue()
    assert sum("1200" in line for line in lines) == 2


def test_a_table_with_the_columns_of_a_bench_fits_80_columns_uncut() -> None:
    console, shown = _console()
    table = plain_table(("", "ms", "min", "max", "GB/s", "of p2p", "host ms", "MiB", "exact"))
    table.add_row(
        "peer per-tensor", "1234", "1234", "1234", "123.4", "100.0%", "123.45", "12345", "unchecked"
    )
    console.print(table)
    assert "…" not in shown.getvalue()


def test_off_a_terminal_what_is_under_way_is_told_before_and_after_in_plain_lines() -> None:
    console, shown = _console()
    with under_way(console, "starting 4 ranks"):
        before = shown.getvalue()
    assert before.count("\n") == 1
    assert shown.getvalue().count("\n") == 2
    assert "\x1b" not in shown.getvalue()


def test_the_bundled_recipes_are_listed_in_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == bundled_recipes()
    assert all(len(line.split()) > 1 and len(line) <= 80 for line in lines)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split()[0] == "rlrefit"


def test_a_run_that_is_interrupted_at_once_says_which_checkpoint_there_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2, {})
    with pytest.raises(Interrupted, match="no step is saved"), _told_what_is_saved(store):
        raise KeyboardInterrupt
    (tmp_path / "step_000010").mkdir()
    with pytest.raises(Interrupted, match="step_000010"), _told_what_is_saved(store):
        raise KeyboardInterrupt
