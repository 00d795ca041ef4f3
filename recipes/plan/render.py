"""A planned refit as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...integration.layout import Axes, Box
from ...integration.packing.encoded import CHECKED_AT_ONCE
from ...integration.quantize.formats import Int4, Nvfp4
from ...integration.weights.manifest import dtype_name
from ..config.model import experts_of, quantization_of
from ..terminal import plain_table, seconds, size
from .catalog import Model, padded_by_marlin
from .explain import Explanation
from .sparse import Sparse
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
        f"{_quantized(options.model)}; "
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
    for row in study.routes():
        if row.reason:
            console.print(
                f"{row.route}, {row.weights:,} weights: {escape(row.reason)}", highlight=False, soft_wrap=True
            )
    console.print(_ranks(study))
    console.print(_links(study))
    if study.sparse is not None:
        _show_sparse(console, study.sparse, study.predicted_seconds)
    slowest = study.slowest_part
    measured = [
        (
            "a rank's own part",
            "at most "
            + ", ".join(
                f"{(most := max(getattr(part, what) for part in study.parts)):,} {what.removesuffix('s' if most == 1 else '')}"
                for what in ("segments", "messages", "rounds")
            ),
        ),
        (
            "planning",
            f"at most {slowest.seconds:.2f} s a rank (rank {slowest.rank}; {len(study.parts)} of {train + gen} measured)",
        ),
        ("", f"{size(study.peak_rss_bytes)} of memory in this process"),
    ]
    summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in [*_link_times(study), *measured]:
        summary.add_row(key, escape(value))
    console.print(summary, highlight=False)
    if options.hosts.shared_gpus:
        console.print(
            "The prediction is of one copy into the engines' parameters, by either side. Where those of neither side can be mapped, "
            "bytes go through buckets and are copied twice.",
            highlight=False,
            soft_wrap=True,
        )
    if padded := padded_by_marlin(options.model, options.gen):
        console.print(
            f"warning: vLLM 0.21 does not load sizes with Marlin that its tiles do not divide ({escape(padded)}); take 0.26 or later, which pads them",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    if options.model.activations and experts_of(options.model.config):
        console.print(
            "warning: the plan is of engines before Blackwell, whose kernel of experts is Marlin's. Blackwell's have NVFP4 in orders that no refit "
            "knows: there experts take the misc path",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    if quantization_of(options.model.config) and options.model.quantize is None:
        console.print(
            f"warning: config.json says that the checkpoint is quantized, and the plan is of weights in {dtype_name(options.model.dtype)}, as "
            "trainers export them; give --quantize if engines hold linear layers so",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    if study.bulk_share < _USUAL_BULK_SHARE:
        console.print(
            f"warning: only {study.bulk_share:.1%} of the bytes go shard to shard; the rest goes whole to every engine "
            "rank, for the reasons under routes",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _link_times(study: Study) -> list[tuple[str, str]]:
    """The bound and the prediction of the links, and the memory for staging."""
    analysis, options = study.analysis, study.options
    relays = ", engine ranks of a host pass on what they share" if analysis.fan_out else ""
    # A bucket that is passed on in a later round is not free for the next one.
    held_longer = "; more where a rank passes on" if analysis.fan_out else ""
    plural = "s" if options.streams > 1 else ""
    return [
        (
            "speed of light T",
            f"{seconds(analysis.bound_seconds)} of bulk: the least that some link needs",
        ),
        ("predicted, bulk", f"{seconds(analysis.predicted_seconds)}{relays}"),
        ("predicted, misc", _misc(study)),
        ("predicted, total", f"{seconds(study.predicted_seconds)}"),
        ("busiest link", f"{analysis.busiest_link_ratio:.3f} x the least that ownership allows"),
        (
            "staging memory",
            f"{'buckets' if options.hosts.shared_gpus else 'p2p'}: 2 x {options.streams} stream{plural} x "
            f"{size(analysis.bucket_bytes)} = {size(study.staging_bytes)} at most",
        ),
        ("", f"for each direction and rank; a round fills {size(study.round_bytes)}{held_longer}"),
        ("", f"ipc needs {_memory_of_checks(options.quantize)}"),
    ]


def _quantized(model: Model) -> str:
    match model.quantize:
        case None:
            return ""
        case Int4(group):
            return f", linear layers in INT4 in groups of {group}"
        case Nvfp4():
            return (
                f", linear layers in NVFP4, {'with their inputs' if model.activations else 'weights alone'}"
            )
        case _:
            return ", linear layers in blocks of FP8"


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
    table = plain_table(("route", "weights", "bytes", "share"), "routes")
    total = sum(spec.nbytes for spec in study.specs) or 1
    for row in study.routes():
        table.add_row(row.route, f"{row.weights:,}", size(row.nbytes), f"{row.nbytes / total:.3%}")
    return table


def _ranks(study: Study) -> Table:
    table = plain_table(("", "least", "at rank", "median", "most", "at rank"), "bytes by rank")
    for label, amounts in study.bytes_by_rank.items():
        low, high = min(amounts, key=amounts.__getitem__), max(amounts, key=amounts.__getitem__)
        middle = float(np.median(list(amounts.values())))
        table.add_row(label, size(amounts[low]), str(low), size(middle), size(amounts[high]), str(high))
    return table


def _links(study: Study) -> Table:
    links = study.links
    table = plain_table(("link", "bytes", "GB/s", "time"), f"busiest links of {len(links):,}")
    for link in links[:_LINKS]:
        table.add_row(link.name, size(link.nbytes), f"{link.rate_gb_per_s:g}", seconds(link.seconds))
    return table


def _show_sparse(console: Console, sparse: Sparse, dense_seconds: float) -> None:
    columns = ("changed", "bytes on the wire", "of dense", "predicted", "of dense")
    table = plain_table(columns, f"sparse refits, delta_base {sparse.delta_base}")
    for one in sparse.refits:
        told = seconds(one.seconds), f"{one.seconds / dense_seconds:.2f}"
        table.add_row(f"{one.changed:.2%}", size(one.wire_bytes), f"{one.wire_ratio:.2%}", *told)
    console.print(table)
    kept = ", ".join(f"{size(nbytes)} with {where}" for where, nbytes in sparse.base_bytes.items())
    console.print(f"base of a trainer rank, at most: {kept}", highlight=False, soft_wrap=True)


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
    if explanation.axes is not None:
        console.print(
            f"its elements lie in another order on some rank: boxes are those of it seen as {escape(_seen_text(explanation.axes))}",
            highlight=False,
            soft_wrap=True,
        )
    if explanation.way:
        console.print(explanation.way, highlight=False, soft_wrap=True)
    for title, boxes in (("held by trainers", explanation.held), ("wanted by engines", explanation.wanted)):
        if not boxes:
            continue
        table = _text_table(title, ("ranks", "boxes"))
        for held, ranks in list(boxes.items())[:_ROWS]:
            # A box a row: no row is longer than the terminal is wide.
            for number, part in enumerate(held):
                table.add_row("" if number else ranges(ranks), escape(_box_text(part)))
        _rest(table, len(boxes), 2)
        console.print(table)
    if not explanation.sendings:
        return
    table = _text_table("sent", ("from", "to", "passed on to", "box"))
    table.add_column("bytes", justify="right")
    for sending in explanation.sendings[:_ROWS]:
        table.add_row(
            str(sending.source),
            ranges(sending.targets),
            ranges(sending.relayed_to),
            escape(_box_text(sending.box)),
            f"{sending.nbytes:,}",
        )
    _rest(table, len(explanation.sendings), 5)
    console.print(table)


def _seen_text(axes: Axes) -> str:
    """The shape that a weight is reshaped to, and the order of its dimensions."""
    return f"{[n for factors in axes.splits for n in factors]}, permuted by {list(axes.order)}"


def _text_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show_problems(console: Console, violations: Iterable[str]) -> None:
    """Print why no plan can be made."""
    console.print("This refit can't be planned:", style="bold")
    for violation in violations:
        console.print(f"- {escape(violation)}", highlight=False, soft_wrap=True)


def _rest(table: Table, count: int, columns: int) -> None:
    if count > _ROWS:
        table.add_row(f"… {count - _ROWS} more", *[""] * (columns - 1))


def _box_text(part: Box) -> str:
    """A box as Python writes slices, e.g. ``[0:4, 8:16]``; ``[]`` for a scalar."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in part) + "]"


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
