"""Progress while a run lasts, and a table at its end."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..terminal import plain_table, size

_COLUMNS = (
    ("step", "{step}"),
    ("reward", "{reward/mean:.3f}"),
    ("val", "{val/reward:.3f}"),
    ("gen. KL", "{generation_kl:.0e}"),
    ("loss", "{loss:+.3f}"),
    ("step s", "{time/step:.2f}"),
    ("refit", "{time/refit:.2f}"),
    ("gen.", "{time/generate:.2f}"),
    ("train", "{time/train:.2f}"),
    ("bulk", "{bulk}"),
    ("misc", "{misc}"),
)
# Those of a step's line: with their names no more fit into 80 columns.
_IN_A_LINE = ("step", "reward", "val", "gen. KL", "step s", "refit")
# A table of every step would bury the terminal; this many rows tell the course of a run.
_ROWS = 12


class RunDisplay:
    """A progress bar with a line for each step; lines alone where there is no terminal."""

    def __init__(self, console: Console, steps: int, first_step: int) -> None:
        self.console = console
        self._rows: list[dict[str, Any]] = []
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, completed=first_step - 1)

    def __enter__(self) -> RunDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_step(self, row: dict[str, Any]) -> None:
        """Show a step's line."""
        self._rows.append(row)
        self._progress.advance(self._task)
        cells = _cells(row)
        named = {name: cell for (name, _), cell in zip(_COLUMNS, cells, strict=True) if cell != "-"}
        text = "  ".join(f"{name} {named[name]}" for name in _IN_A_LINE if name in named)
        self.console.print(text, highlight=False, soft_wrap=True)

    def table(self, rows: list[dict[str, Any]], title: str) -> Table:
        """The course of the run in a dozen rows."""
        table = plain_table([name for name, _ in _COLUMNS], title)
        for row in _telling(rows):
            table.add_row(*_cells(row))
        return table


def _telling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first row, the last, and in between the validated ones, or every so many if there are too many."""
    validated = [row for row in rows[1:-1] if row["val/reward"] is not None]
    between = validated or rows[1:-1]
    between = between[:: -(-len(between) // _ROWS) or 1]
    return [*rows[:1], *between, *rows[1:][-1:]]


def _cells(row: dict[str, Any]) -> list[str]:
    values = dict(row)
    for route in ("bulk", "misc"):
        nbytes = row.get(f"refit/bytes_{route}")
        values[route] = None if nbytes is None else size(nbytes)
    return [_cell(template, values) for _, template in _COLUMNS]


def _cell(template: str, values: dict[str, Any]) -> str:
    key = template[1:-1].partition(":")[0]
    # format_map would read "a/b" as a key too, but an absent or empty value has to show as a dash.
    return "-" if values.get(key) is None else template.format_map(values)
