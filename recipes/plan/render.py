"""A planned refit as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...integration.layout import Box
from ...integration.packing.encoded import CHECKED_AT_ONCE
from ...integration.weights.manifest import dtype_name
from .explain import Explanation
from .study import Study

_LINKS = 10
# Below it the misc path is no side matter any more.
_USUAL_BULK_SHARE = 0.9
# Rows of a table that lists pieces; the command's JSON and the plan itself hold all.
_ROWS = 40


def show_study(console: Console, study: Study) -> None:
    """Print summary, routes, bytes by rank, busiest links and what planning took."""
    analysis, options = study.analysis, study.options
    train, gen = analysis.train_ranks, analysis.gen_ranks
    manifest = analysis.manifest
    console.print(
        f"[bold]{escape(options.model.name)}[/bold]: {len(manifest):,} weights, "
        f"{size(sum(spec.nbytes for spec in study.specs))} {dtype_name(options.model.dtype)}"
        f"{', linear layers in blocks of FP8' if options.model.quantize else ''}; "
        f"{_those(0, train)} train{'s' if train == 1 else ''}, "
        f"{_those(train, gen)} generate{'s' if gen == 1 else ''}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(options.hosts.describe(train, gen), highlight=False, soft_wrap=True)
    uneven = options.train.uneven_stages(options.model.architecture.layers)
    if uneven:
        console.print(f"trainer: {uneven}", highlight=False, soft_wrap=True)
    console.print(_routes(study))
    console.print(_ranks(study))
    console.print(_links(study))
    slowest = study.slowest_part
    measured = [
        (
            "a rank's own part",
            f"at most {max(part.segments for part in study.parts):,} segments in "
            f"{max(part.messages for part in study.parts):,} messages and "
            f"{max(part.rounds for part in study.parts):,} rounds",
        ),
        (
            "planning",
            f"at most {slowest.seconds:.2f} s a rank (rank {slowest.rank}; {len(study.parts)} of {train + gen} "
            f"measured), {size(study.peak_rss_bytes)} of memory in this process",
        ),
    ]
    summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in [*_link_times(study), *measured]:
        summary.add_row(key, escape(value))
    console.print(summary, highlight=False)
    if study.bulk_share < _USUAL_BULK_SHARE:
        console.print(
            f"warning: only {study.bulk_share:.1%} of the bytes go shard to shard; the rest goes whole to every engine "
            "rank, for the reasons under routes",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _link_times(study: Study) -> list[tuple[str, str]]:
    """What links bound and predict, and the memory that ``p2p`` stages in."""
    analysis, options = study.analysis, study.options
    relays = ", engine ranks of a host pass on what they share" if analysis.fan_out else ""
    # A bucket that is passed on in a later round is not free for the next one.
    held_longer = " (more where a rank passes on)" if analysis.fan_out else ""
    straight = (
        " straight into the engines' parameters; through buckets, where those can't be mapped (as vLLM's sleep mode may have "
        "it), each byte is copied twice"
        if options.hosts.shared_gpus
        else ""
    )
    return [
        (
            "speed of light T",
            f"{seconds(analysis.bound_seconds)} of bulk (the least that some link needs, whoever sends)",
        ),
        ("predicted, bulk", f"{seconds(analysis.predicted_seconds)}{relays}{straight}"),
        ("predicted, misc", _misc(study)),
        ("predicted, total", f"{seconds(study.predicted_seconds)}"),
        ("busiest link", f"{analysis.busiest_link_ratio:.3f} x the least that ownership allows"),
        (
            "staging memory",
            f"{'buckets' if options.hosts.shared_gpus else 'p2p'}: 2 x {options.streams} stream{'s' if options.streams > 1 else ''} x {size(analysis.bucket_bytes)} = "
            f"{size(study.staging_bytes)} at most{held_longer} for each direction and rank (a round fills {size(max(p.staging_bytes for p in study.parts))}); "
            f"ipc needs {_memory_of_checks(options.quantize)}",
        ),
    ]


def _memory_of_checks(quantize: str) -> str:
    if quantize == "off":
        return "none"
    # A byte for each code.
    return f"{size(CHECKED_AT_ONCE)} at most, to check what is quantized"


def _misc(study: Study) -> str:
    if not study.misc_bytes:
        return "none"
    return f"at least {seconds(study.misc_seconds)}: {size(study.misc_bytes)} go whole to every engine rank"


def _those(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"


def _routes(study: Study) -> Table:
    table = Table(title="routes", title_justify="left")
    for column in ("route", "why"):
        table.add_column(column, overflow="fold")
    for column in ("weights", "bytes", "share"):
        table.add_column(column, justify="right")
    total = sum(spec.nbytes for spec in study.specs) or 1
    for row in study.routes():
        table.add_row(
            row.route,
            escape(row.reason or "shard to shard"),
            f"{row.weights:,}",
            size(row.nbytes),
            f"{row.nbytes / total:.3%}",
        )
    return table


def _ranks(study: Study) -> Table:
    pairs = study.analysis.pair_bytes
    train = study.analysis.train_ranks
    table = Table(title="bytes by rank", title_justify="left")
    table.add_column("")
    for column in ("least", "at rank", "median", "most", "at rank"):
        table.add_column(column, justify="right")
    rows = [
        ("trainers send", pairs[:train].sum(axis=1), 0),
        ("engines receive", pairs[:, train:].sum(axis=0), train),
    ]
    if study.analysis.fan_out:
        rows.append(("engines pass on", pairs[train:].sum(axis=1), train))
    for label, amounts, first in rows:
        low, high = int(amounts.argmin()), int(amounts.argmax())
        table.add_row(
            label,
            size(int(amounts[low])),
            str(first + low),
            size(float(np.median(amounts))),
            size(int(amounts[high])),
            str(first + high),
        )
    return table


def _links(study: Study) -> Table:
    links = sorted(study.analysis.links, key=lambda link: -link.seconds)
    table = Table(title=f"busiest links of {len(links):,}", title_justify="left")
    table.add_column("link")
    for column in ("bytes", "GB/s", "time"):
        table.add_column(column, justify="right")
    for link in links[:_LINKS]:
        table.add_row(link.name, size(link.nbytes), f"{link.rate_gb_per_s:g}", seconds(link.seconds))
    return table


def show_explanation(console: Console, explanation: Explanation) -> None:
    """Print what becomes of one weight."""
    spec = explanation.entry.spec
    console.print(
        f"[bold]{escape(spec.name)}[/bold] {dtype_name(spec.dtype)}{escape(str(list(spec.shape)))}, {size(spec.nbytes)}",
        highlight=False,
        soft_wrap=True,
    )
    entry = explanation.entry
    why = escape(entry.reason or "shard to shard")
    console.print(
        f"goes over the misc path: {why}" if entry.route == "misc" else f"route: {entry.route} ({why})",
        highlight=False,
        soft_wrap=True,
    )
    if explanation.way:
        console.print(explanation.way, highlight=False, soft_wrap=True)
    for title, boxes in (("held by trainers", explanation.held), ("wanted by engines", explanation.wanted)):
        if not boxes:
            continue
        table = Table(title=title, title_justify="left")
        table.add_column("ranks", overflow="fold")
        table.add_column("boxes", overflow="fold")
        for held, ranks in list(boxes.items())[:_ROWS]:
            table.add_row(ranges(ranks), escape("  ".join(map(box_text, held))))
        _rest(table, len(boxes), 2)
        console.print(table)
    if not explanation.sendings:
        return
    table = Table(title="sent", title_justify="left")
    for column in ("from", "to", "passed on to", "box"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right")
    for sending in explanation.sendings[:_ROWS]:
        table.add_row(
            str(sending.source),
            ranges(sending.targets),
            ranges(sending.relayed_to),
            escape(box_text(sending.box)),
            f"{sending.nbytes:,}",
        )
    _rest(table, len(explanation.sendings), 5)
    console.print(table)


def show_problems(console: Console, violations: Iterable[str]) -> None:
    """Print why no plan can be made."""
    console.print("This refit can't be planned:", style="bold")
    for violation in violations:
        console.print(f"- {escape(violation)}", highlight=False, soft_wrap=True)


def _rest(table: Table, count: int, columns: int) -> None:
    if count > _ROWS:
        table.add_row(f"… {count - _ROWS} more", *[""] * (columns - 1))


def box_text(box: Box) -> str:
    """A box as Python writes slices, e.g. ``[0:4, 8:16]``; ``[]`` for a scalar."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks as runs, e.g. ``0-3, 8, 16-240 by 16``."""
    left = sorted(ranks)
    texts: list[str] = []
    while left:
        step = left[1] - left[0] if len(left) > 2 else 1
        count = 1
        while count < len(left) and left[count] - left[count - 1] == step:
            count += 1
        if count < 3 and step != 1:
            step = count = 1
        run, left = left[:count], left[count:]
        by = f" by {step}" if step > 1 else ""
        texts.append(str(run[0]) if count == 1 else f"{run[0]}-{run[-1]}{by}")
    return ", ".join(texts)


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
