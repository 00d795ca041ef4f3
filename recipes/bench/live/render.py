"""What a run looks like: tables and JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .measure import PathResult
from .options import ENGINES, LiveOptions

if TYPE_CHECKING:
    from .run import LiveResult


def json_record(options: LiveOptions, result: LiveResult) -> dict[str, Any]:
    """All figures; ``null`` are the seconds of a path that did not run, and ``bit_exact`` without a second path."""
    return {
        "model": options.model,
        "layers": options.layers,
        "train": options.train_text,
        "gen": options.gen_text,
        "dtype": options.dtype,
        "backend": options.backend,
        "device": result.device,
        "engine": result.engine,
        "kept_bytes": result.kept_bytes,
        "startup_seconds": result.startup_seconds,
        "bit_exact": result.bit_exact,
        "paths": [_path_record(result, path) for path in result.paths],
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write the record whole or not at all: it may be read while the run goes on."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(aside, path)


def show(console: Console, options: LiveOptions, result: LiveResult) -> None:
    """Print the run's tables."""
    console.print(
        escape(
            f"{options.model} {options.dtype}: Megatron {options.train_text} → {ENGINES[options.backend]} {result.engine[options.backend]} "
            f"{options.gen_text}, {options.world_size} + {options.gen_ranks} x {result.device}; "
            f"{result.kept_bytes / 1e9:.3f} GB kept by the largest worker"
        ),
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        "ms from the call until the engine has answered, and of the refit itself (own); GB/s kept by a worker; MiB of extra "
        "memory at the peak, and of growth over the timed refits, trainer / engine",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "ms", "min", "max", "own", "GB/s", "peak", "growth", "exact"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for path in result.paths:
        table.add_row(*_row(result, path))
    console.print(table)
    for note in _notes(result):
        console.print(escape(note), highlight=False, soft_wrap=True)


def _row(result: LiveResult, path: PathResult) -> list[str]:
    if path.timing is None:
        return [path.name, "not run", *[""] * 7]
    timing = path.timing
    return [
        path.name,
        *(f"{seconds * 1e3:.1f}" for seconds in (timing.median, timing.minimum, timing.maximum)),
        f"{path.own_seconds * 1e3:.1f}" if path.own_seconds else "",
        f"{result.kept_bytes / timing.median / 1e9:.1f}",
        _both(path.peak_extra_bytes),
        _both(path.growth_bytes),
        "NO" if path.faults else "unchecked" if result.bit_exact is None else "yes",
    ]


def _both(sides: dict[str, int]) -> str:
    return " / ".join(f"{nbytes / 2**20:.0f}" for nbytes in sides.values())


def _notes(result: LiveResult) -> list[str]:
    found = []
    for path in result.paths:
        if path.timing is None:
            found.append(f"{path.name} did not run: {path.not_run}")
            continue
        counts = ", ".join(f"{count} {route}" for route, count in path.routes.counts.items())
        found.append(
            f"{path.name}: {path.routes.carrier}; weights {counts}; {path.routes.reason}".rstrip("; ")
        )
        if path.stages:
            stages = ", ".join(f"{stage} {seconds * 1e3:.1f}" for stage, seconds in path.stages.items())
            found.append(f"{path.name}: ms by stage of the slowest rank (stages may overlap): {stages}")
        found += [
            f"{path.name}: {count} weights on the misc path, {reason}" for reason, count in path.misc.items()
        ]
    return found


def _path_record(result: LiveResult, path: PathResult) -> dict[str, Any]:
    if path.timing is None:
        return {"path": path.name, "not_run": path.not_run, "seconds_median": None}
    moved = path.bytes_bulk + path.bytes_misc
    return {
        "path": path.name,
        "carrier": path.routes.carrier,
        "reason": path.routes.reason,
        "seconds_median": path.timing.median,
        "seconds_min": path.timing.minimum,
        "seconds_max": path.timing.maximum,
        "own_seconds_median": path.own_seconds or None,
        "kept_gb_per_s": result.kept_bytes / path.timing.median / 1e9,
        "first_seconds": path.first_seconds,
        "open_seconds": path.open_seconds,
        "seconds": path.seconds,
        "stages": path.stages,
        "weights": path.routes.counts,
        "bytes_bulk": path.bytes_bulk,
        "bytes_misc": path.bytes_misc,
        "bulk_share": path.bytes_bulk / moved if moved else None,
        "misc_reasons": path.misc,
        "peak_extra_bytes": path.peak_extra_bytes,
        "growth_bytes": path.growth_bytes,
        "memory_before": asdict(path.before) if path.before is not None else None,
        "memory": [asdict(point) for point in path.memory],
        "faults": path.faults,
    }
