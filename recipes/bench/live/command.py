"""The ``bench-live`` subcommand: arguments in, tables out."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.markup import escape

from ...config.options import empty_layouts, output_problems
from ...plan.catalog import LayoutError
from ..launch import BenchFailed, run_ranks
from ..run_options import common_options
from ..scene import model_problems
from .options import PEERS, LiveOptions
from .render import show
from .run import run_rank

# Exit codes: 1 a run that failed or was not bit-exact, 2 options that can't run.
_FAILED, _MISUSED = 1, 2


def main(arguments: argparse.Namespace, console: Console, errors: Console) -> int:
    """Run the benchmark; returns the exit code."""

    def say(text: str, code: int) -> int:
        errors.print(escape(text), highlight=False, soft_wrap=True)
        return code

    try:
        options = _options(arguments)
    except LayoutError as error:
        return say(str(error), _MISUSED)
    problems = [
        *empty_layouts(arguments.train, arguments.gen),
        *options.violations(torch.cuda.device_count()),
        *(output_problems("--json", options.json) if options.json is not None else []),
        *(output_problems("--engine-log", options.engine_log) if options.engine_log is not None else []),
        *model_problems(options),
    ]
    if problems:
        return say("\n".join(problems), _MISUSED)
    if options.json is not None:
        # What stands there afterwards is of this run.
        options.json.unlink(missing_ok=True)
    try:
        result = run_ranks(run_rank, options)
    except BenchFailed as error:
        kept = (
            f"\nthe paths that ran before it are in {options.json}"
            if options.json and options.json.exists()
            else ""
        )
        return say(f"{error}{kept}", _FAILED)
    show(console, options, result)
    return say("not bit-exact: " + "; ".join(result.faults), _FAILED) if result.faults else 0


def _options(arguments: argparse.Namespace) -> LiveOptions:
    return LiveOptions(
        **common_options(arguments, PEERS[arguments.backend]),
        backend=arguments.backend,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        engine_python=arguments.engine_python,
        engine_pythonpath=arguments.engine_pythonpath,
        engine_log=arguments.engine_log,
        json=arguments.json,
        timeout_s=arguments.timeout,
    )
