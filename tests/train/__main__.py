"""``python -m tests.train``: recipes with dense refits and with sparse ones, which must learn the same bit for bit."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests import (
    conftest,  # noqa: F401 - the environment of the tests' processes
    vllm_cpu,
)

from .delta_runs import COLUMNS, RECIPES, Compared, compare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--recipes", nargs="+", default=(), help="run these alone, by a part of their names")
    parser.add_argument(
        "--set", nargs="+", default=(), metavar="KEY=VALUE", help="change all recipes, as rlrefit train does"
    )
    asked = parser.parse_args()
    os.environ[vllm_cpu.VARIABLE] = vllm_cpu.PLAIN
    vllm_cpu.show(vllm_cpu.PLAIN)
    console = Console(width=200)
    found: list[Compared] = []
    for recipe in RECIPES:
        if asked.recipes and not any(part in recipe for part in asked.recipes):
            continue
        with tempfile.TemporaryDirectory() as folder:
            every = f"checkpoint.every={asked.steps // 2}"
            found += compare(recipe, Path(folder), asked.steps, every, *asked.set)
        for one in found[-2:]:
            console.print(f"{one.recipe}: {'; '.join(one.differs[:20]) or 'equal'}", markup=False)
    table = Table(*COLUMNS)
    for one in found:
        table.add_row(*one.row)
    console.print(table)
    return int(any(one.differs for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
