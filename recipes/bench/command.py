"""The ``bench`` subcommand: arguments in, tables out."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.markup import escape

from ..config.options import PICTURES, empty_layouts, output_problems
from ..plan.catalog import LayoutError
from .launch import BenchFailed, run_ranks
from .options import PEERS, BenchOptions
from .render import draw_timeline, json_records, show, write_json
from .run import BenchResult, run_rank
from .run_options import common_options
from .scene import model_problems

# Exit codes: 1 a run that failed, 2 options that can't run.
_FAILED, _MISUSED = 1, 2
# Message of the pairwise probe on CPUs, where 2 GiB would take long.
_CPU_PROBE_BYTES = 16 << 20


def main(arguments: argparse.Namespace, console: Console, errors: Console) -> int:
    """Run the benchmark; returns the exit code."""
    try:
        options = _options(arguments)
    except LayoutError as error:
        errors.print(escape(str(error)), highlight=False, soft_wrap=True)
        return _MISUSED
    problems = [
        *empty_layouts(arguments.train, arguments.gen),
        *_output_problems(arguments),
        *options.violations(torch.cuda.device_count()),
        *model_problems(options),
    ]
    if problems:
        errors.print(escape("\n".join(problems)), highlight=False, soft_wrap=True)
        return _MISUSED
    try:
        result = run_ranks(run_rank, options)
    except BenchFailed as error:
        errors.print(escape(str(error)), highlight=False, soft_wrap=True)
        return _FAILED
    show(console, options, result)
    written = _write(arguments, options, result, errors)
    return max(written, _report_faults(options, result, errors))


def _output_problems(arguments: argparse.Namespace) -> list[str]:
    found = []
    if arguments.json is not None:
        found += output_problems("--json", arguments.json)
    if arguments.timeline is not None:
        found += output_problems("--timeline", arguments.timeline, PICTURES)
    return found


def _write(arguments: argparse.Namespace, options: BenchOptions, result: BenchResult, errors: Console) -> int:
    """Write what was asked for; a file that fails keeps nothing else from being written or said."""
    code = 0
    for path, write in (
        (arguments.json, lambda path: write_json(path, json_records(options, result))),
        (arguments.timeline, lambda path: draw_timeline(path, result.refits[0], options.train_ranks)),
    ):
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            errors.print(escape(f"{path} can't be written: {error}"), highlight=False, soft_wrap=True)
            code = _FAILED
    return code


def _report_faults(options: BenchOptions, result: BenchResult, errors: Console) -> int:
    code = 0
    for asked, refit in zip(options.transports, result.refits, strict=True):
        if refit.faults:
            errors.print(
                escape(
                    f"{asked}: not bit-exact in {len(refit.faults)} places, the first in {refit.faults[0]}"
                ),
                highlight=False,
                soft_wrap=True,
            )
            code = _FAILED
    return code


def _options(arguments: argparse.Namespace) -> BenchOptions:
    return BenchOptions(
        **common_options(arguments, () if arguments.colocated else PEERS),
        quantize=arguments.quantize,
        check=arguments.check,
        timeline=arguments.timeline is not None,
        colocated=arguments.colocated,
        sleep=arguments.sleep,
        **({"probe_bytes": _CPU_PROBE_BYTES} if arguments.device == "cpu" else {}),
    )
