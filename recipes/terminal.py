"""What all commands print alike: tables, sizes, times, and that something is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.table import Table

_FEW = 6


def plain_table(columns: Sequence[str], title: str | None = None) -> Table:
    """A table without frames, whose first column is text and whose others are numbers; no row wraps."""
    # Wide gaps where they leave the table within 80 columns.
    gap = 1 if len(columns) <= _FEW else 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


@contextmanager
def under_way(console: Console, what: str) -> Iterator[None]:
    """Say that ``what`` is under way: a spinner on a terminal, elsewhere a line before and one after."""
    started = time.monotonic()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"{what} …", highlight=False, markup=False, soft_wrap=True)
        yield
    taken = time.monotonic() - started
    console.print(f"{what}: done after {taken:.0f} s", highlight=False, markup=False, soft_wrap=True)


def size(nbytes: float) -> str:
    """Bytes in powers of 1000, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            break
        nbytes /= 1000
    return (
        f"{nbytes:.0f} B"
        if unit == "B"
        else f"{nbytes:.3g} {unit}"
        if nbytes < 1000
        else f"{nbytes:.0f} {unit}"
    )


def seconds(value: float) -> str:
    """A time in seconds, or milliseconds where it is short."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
