"""``python -m tests.faults``: run the trials of a seed, print the table, and end with 1 if something did not hold."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .crew import Result, run_trials
from .judge import holds
from .trials import Kind, Trial

_COUNTED = ("errors", "typed", "named", "hangs", "corrupt", "unguarded", "escapes", "healed")


def table(results: Sequence[Result], title: str) -> Table:
    """One row for each kind of fault, and one for all."""
    made = Table("fault", "trials", *_COUNTED, "longest s", title=title)
    kinds = dict.fromkeys(seen.trial.kind for seen, _ in results)
    rows = {str(kind): [r for r in results if r[0].trial.kind is kind] for kind in Kind if kind in kinds}
    for kind, found in {**rows, "all": results}.items():
        counted = [sum(getattr(verdict, of) for _, verdict in found) for of in _COUNTED]
        longest = max((seen.seconds for seen, _ in found), default=0.0)
        made.add_row(kind, str(len(found)), *map(str, counted), f"{longest:.1f}")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--delta", action="store_true", help="faults of sparse refits")
    parser.add_argument("--crews", type=int, default=4, help="trials that run beside one another")
    parser.add_argument("--only", type=int, nargs="+", default=(), help="run these trials alone, by number")
    parser.add_argument(
        "--kinds", nargs="+", default=(), help="run these kinds alone, by the beginning of their names"
    )
    parser.add_argument("--json", type=Path, help="file for all that was seen")
    asked = parser.parse_args()
    console = Console(width=170)
    lock = threading.Lock()

    def told(result: Result) -> None:
        seen, verdict = result
        if verdict.faults:
            with lock:
                console.print(f"{seen.told}", style="bold", markup=False, highlight=False)
                for fault in verdict.faults:
                    console.print(f"    {fault}", markup=False, highlight=False)

    def chosen(trial: Trial) -> bool:
        numbered = not asked.only or trial.number in asked.only
        return numbered and (not asked.kinds or trial.kind.startswith(tuple(asked.kinds)))

    results = run_trials(asked.seed, asked.trials, asked.crews, chosen, told, delta=asked.delta)
    of = "faults of sparse refits" if asked.delta else "faults"
    console.print(table(results, f"{len(results)} {of}, seed {asked.seed}"))
    if asked.json is not None:
        rows = [{"seen": asdict(seen), "verdict": asdict(verdict)} for seen, verdict in results]
        asked.json.write_text(
            json.dumps({"seed": asked.seed, "trials": rows}, indent=1, default=str, skipkeys=True)
        )
    missed = [seen.trial.number for seen, _ in results if seen.struck is None]
    if missed:
        console.print(f"Trials whose fault never came to be: {missed}")
    return int(not holds([verdict for _, verdict in results]))


if __name__ == "__main__":
    raise SystemExit(main())
