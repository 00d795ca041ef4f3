"""The ``bench`` subcommand: arguments in, tables out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ..config.options import PICTURES, empty_layouts, output_problems
from ..plan.catalog import LayoutError
from ..terminal import under_way
from .arguments import foreign_options
from .launch import BenchFailed, run_ranks
from .options import ENGINES, LIVE_PEERS, PEERS, BenchOptions, LiveOptions, common_options
from .render import draw_timeline, json_records, show, show_live, write_json
from .run import BenchResult, run_rank
from .scene import model_problems

# Exit codes: 1 a run that failed or was not bit-exact, 2 options that can't run.
_FAILED, _MISUSED = 1, 2
# Message of the pairwise probe on CPUs, where 2 GiB would take long.
_CPU_PROBE_BYTES = 16 << 20


def main(arguments: argparse.Namespace, console: Console, errors: Console) -> int:
    """Run the benchmark; returns the exit code."""

    def say(text: str, code: int) -> int:
        errors.print(escape(text), highlight=False, soft_wrap=True)
        return code

    if foreign := foreign_options(arguments):
        return say("\n".join(foreign), _MISUSED)
    try:
        options = _live_options(arguments) if arguments.live else _options(arguments)
    except LayoutError as error:
        return say(str(error), _MISUSED)
    problems = [
        *empty_layouts(arguments.train, arguments.gen),
        *_output_problems(arguments),
        *options.violations(torch.cuda.device_count()),
        *model_problems(options),
    ]
    if problems:
        return say("\n".join(problems), _MISUSED)
    if isinstance(options, LiveOptions):
        return _run_live(options, console, say)
    try:
        with under_way(console, f"timing {options.world_size} ranks"):
            result = run_ranks(run_rank, options)
    except BenchFailed as error:
        return say(str(error), _FAILED)
    show(console, options, result)
    written = _write(arguments, options, result, say)
    return max(written, _report_faults(options, result, say))


def _run_live(options: LiveOptions, console: Console, say: Callable[[str, int], int]) -> int:
    # Imported here: only a live run needs Megatron's workers.
    from .live.run import run_rank as run_live_rank

    if options.json is not None:
        # What stands there afterwards is of this run.
        options.json.unlink(missing_ok=True)
    try:
        with under_way(
            console, f"timing {options.world_size} trainer ranks and a live {ENGINES[options.backend]}"
        ):
            result = run_ranks(run_live_rank, options)
    except BenchFailed as error:
        there = options.json is not None and options.json.exists()
        kept = f"\nthe paths that ran before it are in {options.json}" if there else ""
        return say(f"{error}{kept}", _FAILED)
    show_live(console, options, result)
    return say("not bit-exact: " + "; ".join(result.faults), _FAILED) if result.faults else 0


def _output_problems(arguments: argparse.Namespace) -> list[str]:
    found = []
    for name in ("json", "engine_log"):
        if (path := getattr(arguments, name)) is not None:
            found += output_problems(f"--{name.replace('_', '-')}", path)
    if arguments.timeline is not None:
        found += output_problems("--timeline", arguments.timeline, PICTURES)
    return found


def _write(
    arguments: argparse.Namespace,
    options: BenchOptions,
    result: BenchResult,
    say: Callable[[str, int], int],
) -> int:
    """Write what was asked for; a file that fails keeps nothing else from being written or said."""
    code = 0
    files: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (arguments.json, lambda path: write_json(path, json_records(options, result))),
        (arguments.timeline, lambda path: draw_timeline(path, result.refits[0], options.train_ranks)),
    )
    for path, write in files:
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            code = say(f"{path} can't be written: {error}", _FAILED)
    return code


def _report_faults(options: BenchOptions, result: BenchResult, say: Callable[[str, int], int]) -> int:
    code = 0
    for asked, refit, sparse in zip(options.transports, result.refits, result.deltas, strict=True):
        faults = [*refit.faults, *(fault for one in sparse for fault in one.faults)]
        if faults:
            places = f"{len(faults)} places, the first in {faults[0]}"
            code = say(f"{asked}: not bit-exact in {places}", _FAILED)
    return code


def _options(arguments: argparse.Namespace) -> BenchOptions:
    given: dict[str, Any] = {"probe_bytes": _CPU_PROBE_BYTES} if arguments.device == "cpu" else {}
    if arguments.changed is not None:
        given["changed"] = arguments.changed
    if arguments.delta_base is not None:
        given["delta_base"] = arguments.delta_base
    if arguments.quantize is not None:
        given["quantize"] = arguments.quantize
    return BenchOptions(
        **common_options(arguments, () if arguments.colocated else PEERS),
        check=arguments.check is not False,
        timeline=arguments.timeline is not None,
        colocated=arguments.colocated,
        sleep=arguments.sleep,
        leave=arguments.leave,
        **given,
    )


def _live_options(arguments: argparse.Namespace) -> LiveOptions:
    backend = arguments.backend or "vllm"
    names = ("gpu_memory_utilization", "engine_python", "engine_pythonpath", "engine_log", "json")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return LiveOptions(**common_options(arguments, LIVE_PEERS[backend]), backend=backend, **given)
