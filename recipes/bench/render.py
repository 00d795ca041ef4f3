"""What a run looks like: tables, JSON, and a picture of its stages over time."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..terminal import plain_table
from .options import ENGINES, BenchOptions, LiveOptions
from .sharing import Sharing, sharing

if TYPE_CHECKING:
    # A live run's modules import Megatron's workers, which few have installed.
    from .live.measure import LiveResult, PathResult
    from .measure import DeltaResult, RefitResult
    from .run import BenchResult


def json_records(options: BenchOptions, result: BenchResult) -> list[dict[str, Any]]:
    """A record for each transport; a peer that was not timed has ``null`` for its seconds.

    Where ranks share GPUs, ``p2p_gb_per_s`` is the rate between these, ``null`` on one GPU, and further keys tell of the
    copies: ``colocated``, ``copy_gb_per_s``, ``copy_ratio``, and those of :class:`~.sharing.Sharing`, ``null`` where
    everything goes to all.
    """
    peers = {
        name: peer.timing.median if peer.timing is not None else None for name, peer in result.peers.items()
    }
    return [
        {
            "model": options.model,
            "train": options.train_text,
            "gen": options.gen_text,
            "dtype": options.dtype,
            "quantize": options.quantize,
            "sleep": options.sleep,
            "leave": options.leave,
            "transport": refit.transport,
            "kept_bytes": result.kept_bytes,
            "seconds_median": refit.timing.median,
            "seconds_min": refit.timing.minimum,
            "seconds_max": refit.timing.maximum,
            "kept_gb_per_s": _rate(result, refit.timing.median),
            "p2p_gb_per_s": result.p2p_gb_per_s,
            "p2p_ratio": _ratio(_rate(result, refit.timing.median), result.p2p_gb_per_s),
            "host_seconds": refit.host_seconds,
            "peak_extra_bytes": refit.peak_extra_bytes,
            "stages": refit.stages,
            "peers": peers,
            "bit_exact": refit.bit_exact,
            **({"deltas": [_sparse_record(one) for one in sparse]} if options.changed else {}),
            **(_shared_figures(result, refit) if options.colocated else {}),
        }
        for refit, sparse in zip(result.refits, result.deltas, strict=True)
    ]


def _sparse_record(one: DeltaResult) -> dict[str, Any]:
    return {
        "changed": one.changed,
        "found": one.found,
        "seconds_median": one.timing.median,
        "seconds_min": one.timing.minimum,
        "seconds_max": one.timing.maximum,
        "wire_ratio": one.wire_ratio,
        "base_bytes": one.base_bytes,
        "record_seconds": one.record,
        "stages": one.stages,
        "bit_exact": not one.faults,
    }


def _sparse(options: BenchOptions, result: BenchResult) -> Table:
    """A row for each transport and share of change."""
    records = options.delta_base == "optimizer"
    headings = ("", "changed", "found", "ms", "min", "max", "of dense", "wire", "GB", "exact")
    table = plain_table((*headings, "record") if records else headings)
    for refit, sparse in zip(result.refits, result.deltas, strict=True):
        for one in sparse:
            table.add_row(
                f"delta {refit.transport}",
                f"{one.changed:.2%}",
                f"{one.found:.3%}",
                *_times(one.timing.median, one.timing.minimum, one.timing.maximum),
                f"{one.timing.median / refit.timing.median:.2f}",
                f"{one.wire_ratio:.2%}",
                f"{one.base_bytes / 1e9:.1f}",
                "NO" if one.faults else "yes",
                *(_times(one.record) if records else ()),
            )
    return table


def write_json(path: Path, records: list[dict[str, Any]]) -> None:
    """One record as an object, several as a list."""
    path.write_text(json.dumps(records[0] if len(records) == 1 else records, indent=2) + "\n")


def show(console: Console, options: BenchOptions, result: BenchResult) -> None:
    """Print the run's tables."""
    title = (
        f"{options.model} {options.dtype}{_quantized(options)}, {options.train_text} → {options.gen_text}, {result.device}; "
        f"{result.kept_bytes / 1e9:.3f} GB kept per engine rank{', which sleeps between refits' if options.sleep else ''}"
        f"{'; trainers leave their GPUs between refits' if options.leave else ''}; "
        f"{_wires(result)}"
    )
    of, nominal = ("of copy", result.copy_gb_per_s) if options.colocated else ("of p2p", result.p2p_gb_per_s)
    table = plain_table(("", "ms", "min", "max", "GB/s", of, "host ms", "MiB", "exact"))
    for refit in result.refits:
        timing = refit.timing
        table.add_row(
            f"refit {refit.transport}",
            *_times(timing.median, timing.minimum, timing.maximum),
            f"{_rate(result, timing.median):.1f}",
            _share(_rate(result, timing.median), nominal),
            _times(refit.host_seconds)[0],
            f"{refit.peak_extra_bytes / 2**20:.0f}",
            {True: "yes", False: "NO", None: "unchecked"}[refit.bit_exact],
        )
    for name, peer in result.peers.items():
        if peer.timing is None:
            table.add_row(f"peer {name}", "not run", *[""] * 7)
            continue
        rate = _rate(result, peer.timing.median)
        table.add_row(
            f"peer {name}",
            *_times(peer.timing.median, peer.timing.minimum, peer.timing.maximum),
            f"{rate:.1f}",
            _share(rate, nominal),
            "",
            "",
            "yes",
        )
    console.print(escape(title), highlight=False, soft_wrap=True)
    console.print(
        "medians of the slowest rank's times; GB/s kept by an engine rank; MiB of extra memory at the peak",
        highlight=False,
    )
    console.print(table)
    if options.colocated:
        console.print(
            "GB of the bulk path: least that stayed on a GPU, most that an engine took from others; ms that the busiest link "
            "needs at the rates above",
            highlight=False,
            soft_wrap=True,
        )
        console.print(_shared(result))
    console.print("ms by stage, of the slowest rank (stages may overlap)", highlight=False)
    console.print(_stages(result.refits))
    if options.changed:
        base = f"base in {options.delta_base if options.device == 'cuda' else 'host'} memory"
        kept = "the largest base"
        if options.delta_base == "optimizer":
            base, kept = (
                "by recorded changes",
                "the largest mask; record, ms that recording took, before the refit",
            )
        console.print(
            f"sparse refits, {base}: found, the share of what travels that differed; ms; wire, their bytes beside a dense "
            f"refit's; GB, {kept}",
            highlight=False,
            soft_wrap=True,
        )
        console.print(_sparse(options, result))
    for note in _notes(result):
        console.print(escape(note), highlight=False, soft_wrap=True)


def draw_timeline(path: Path, refit: RefitResult, train_ranks: int) -> None:
    """A picture of one refit: a row for each rank, a bar for each stretch of a stage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.5 + 0.5 * len(refit.timelines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    stages = list(dict.fromkeys(stage for line in refit.timelines for stage, _, _ in line))
    colors = {stage: f"C{i % 10}" for i, stage in enumerate(stages)}
    for rank, line in enumerate(refit.timelines):
        for position, stage in enumerate(stages):
            # Stages overlap: each has a lane of its own inside the rank's row.
            lane = rank + 0.8 * position / len(stages) - 0.4
            bars = [(start * 1e3, (end - start) * 1e3) for name, start, end in line if name == stage]
            axes.broken_barh(bars, (lane, 0.8 / len(stages)), facecolors=colors[stage])
    labels = [
        f"trainer rank {rank}" if rank < train_ranks else f"engine rank {rank}"
        for rank in range(len(refit.timelines))
    ]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms after the refit's start on the rank")
    handles = [Patch(color=colors[stage], label=stage) for stage in stages]
    figure.legend(handles=handles, ncols=max(1, len(stages)), loc="outside upper center", fontsize=8)
    figure.savefig(path, dpi=150)


def _quantized(options: BenchOptions) -> str:
    return " with linear layers in blocks of fp8 (quantized by the trainers)" if options.is_quantized else ""


def _wires(result: BenchResult) -> str:
    """The rates that were measured beside the refits."""
    found = []
    if result.copy_gb_per_s is not None:
        found.append(f"device copy {result.copy_gb_per_s:.1f} GB/s")
    if result.p2p_gb_per_s is not None:
        found.append(f"pairwise p2p {result.p2p_gb_per_s:.1f} GB/s")
    return ", ".join(found)


def _shared_figures(result: BenchResult, refit: RefitResult) -> dict[str, Any]:
    """Keys of a record that only runs on shared GPUs have."""
    found = _sharing(result, refit)
    return {
        "colocated": True,
        "copy_gb_per_s": result.copy_gb_per_s,
        "copy_ratio": _ratio(_rate(result, refit.timing.median), result.copy_gb_per_s),
        **{f.name: getattr(found, f.name) if found is not None else None for f in fields(Sharing)},
    }


def _shared(result: BenchResult) -> Table:
    table = plain_table(("", "stayed", "crossed", "bound ms", "of bound"))
    for refit in result.refits:
        found = _sharing(result, refit)
        if found is None:
            table.add_row(f"refit {refit.transport}", "all to all")
            continue
        table.add_row(
            f"refit {refit.transport}",
            f"{found.stayed_bytes / 1e9:.3f}",
            f"{found.crossed_bytes / 1e9:.3f}",
            *_times(found.bound_seconds),
            f"{found.bound_seconds / refit.timing.median:.1%}",
        )
    return table


def _sharing(result: BenchResult, refit: RefitResult) -> Sharing | None:
    if refit.pair_bytes is None or result.copy_gb_per_s is None:
        return None
    return sharing(refit.pair_bytes, result.copy_gb_per_s, result.p2p_gb_per_s)


def _stages(refits: list[RefitResult]) -> Table:
    table = plain_table(("", *(refit.transport for refit in refits)))
    for stage in dict.fromkeys(stage for refit in refits for stage in refit.stages):
        cells = (f"{refit.stages[stage] * 1e3:.2f}" if stage in refit.stages else "" for refit in refits)
        table.add_row(stage, *cells)
    return table


def _notes(result: BenchResult) -> list[str]:
    found: list[str] = []
    for refit in result.refits:
        found.append(f"{refit.transport}: {refit.reason}")
        found += [f"{count} weights on the misc path, {reason}" for reason, count in refit.misc.items()]
    return [
        *dict.fromkeys(found),
        *(f"peer {name} was not timed: {p.reason}" for name, p in result.peers.items() if p.timing is None),
    ]


def _rate(result: BenchResult, seconds: float) -> float:
    return result.kept_bytes / seconds / 1e9


def _ratio(rate: float, nominal: float | None) -> float | None:
    return rate / nominal if nominal is not None else None


def _share(rate: float, nominal: float | None) -> str:
    ratio = _ratio(rate, nominal)
    return f"{ratio:.1%}" if ratio is not None else ""


def _times(*seconds: float) -> tuple[str, ...]:
    return tuple(f"{s * 1e3:.2f}" if s < 1 else f"{s * 1e3:.0f}" for s in seconds)


def live_record(options: LiveOptions, result: LiveResult) -> dict[str, Any]:
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


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the record whole or not at all: it may be read while the run goes on."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(aside, path)


def show_live(console: Console, options: LiveOptions, result: LiveResult) -> None:
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
    table = plain_table(("", "ms", "min", "max", "own", "GB/s", "peak", "growth", "exact"))
    for path in result.paths:
        table.add_row(*_live_row(result, path))
    console.print(table)
    for note in _live_notes(result):
        console.print(escape(note), highlight=False, soft_wrap=True)


def _live_row(result: LiveResult, path: PathResult) -> list[str]:
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


def _live_notes(result: LiveResult) -> list[str]:
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
