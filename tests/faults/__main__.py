"""``python -m tests.faults``: run the trials of a seed, print the table, and end with 1 if something did not hold."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from rich.console import Console

from .judge import holds
from .run import run_trials
from .table import Result, table, write
from .trials import Trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
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
                how = seen.struck.how if seen.struck is not None else "never struck"
                console.print(f"{seen.trial.told}; {how}", style="bold", markup=False, highlight=False)
                for fault in verdict.faults:
                    console.print(f"    {fault}", markup=False, highlight=False)

    def chosen(trial: Trial) -> bool:
        numbered = not asked.only or trial.number in asked.only
        return numbered and (not asked.kinds or trial.kind.startswith(tuple(asked.kinds)))

    results = run_trials(asked.seed, asked.trials, asked.crews, chosen, told)
    console.print(table(results, f"{len(results)} faults, seed {asked.seed}"))
    if asked.json is not None:
        write(asked.json, asked.seed, results)
    missed = [seen.trial.number for seen, _ in results if seen.struck is None]
    if missed:
        console.print(f"Trials whose fault never came to be: {missed}")
    return int(not holds([verdict for _, verdict in results]))


if __name__ == "__main__":
    raise SystemExit(main())
