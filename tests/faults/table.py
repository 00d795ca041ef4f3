"""The results of many trials, as a table and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from .crew import Observed
from .judge import Verdict
from .trials import Kind

Result = tuple[Observed, Verdict]

_COLUMNS = (
    "trials",
    "errors",
    "typed",
    "named the cause",
    "hangs",
    "silent corruption",
    "unguarded",
    "escapes of sampled",
    "healed",
    "longest s",
)


def table(results: Sequence[Result], title: str) -> Table:
    """One row for each kind of fault, and one for all."""
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result[0].trial.kind].append(result)
    made = Table("fault", title=title)
    for column in _COLUMNS:
        made.add_column(column, justify="right")
    for kind in Kind:
        if by_kind[kind]:
            made.add_row(kind, *_row(by_kind[kind]))
    made.add_section()
    made.add_row("all", *_row(results))
    return made


def _row(results: Sequence[Result]) -> list[str]:
    verdicts = [verdict for _, verdict in results]
    errors = sum(v.errors for v in verdicts)

    def share(part: int) -> str:
        return f"{part} ({100 * part / errors:.0f}%)" if errors else "0"

    return [
        str(len(results)),
        str(errors),
        share(sum(v.typed for v in verdicts)),
        share(sum(v.named for v in verdicts)),
        *(str(_sum(verdicts, of)) for of in ("hangs", "corrupt", "unguarded", "escapes")),
        f"{sum(v.healed for v in verdicts)}/{len(results)}",
        f"{max(seen.seconds for seen, _ in results):.1f}",
    ]


def _sum(verdicts: Iterable[Verdict], of: str) -> int:
    return sum(getattr(verdict, of) for verdict in verdicts)


def write(path: Path, seed: int, results: Sequence[Result]) -> None:
    """All trials with what was seen of them."""
    rows: list[dict[str, Any]] = []
    for seen, verdict in results:
        rows.append(
            {
                "trial": asdict(seen.trial),
                "told": seen.trial.told,
                "struck": asdict(seen.struck) if seen.struck is not None else None,
                "seconds": seen.seconds,
                "victim_seconds": seen.victim_seconds,
                "errors": {
                    rank: asdict(ended.error) for rank, ended in seen.ended.items() if ended.error is not None
                },
                "committed": {rank: ended.committed for rank, ended in seen.ended.items()},
                "clean": {rank: ended.clean for rank, ended in seen.ended.items()},
                "verdict": asdict(verdict),
            }
        )
    path.write_text(json.dumps({"seed": seed, "trials": rows}, indent=1))
