"""The ``bench-live`` subcommand: arguments in, tables out."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.markup import escape

from ....workers.catalog import CatalogError, LayoutError, parse_gen, parse_train, violations
from ...option_checks import empty_layouts, output_problems
from ..launch import BenchFailed, run_ranks
from ..options import names_of
from ..scene import open_shortened
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
        *_model_problems(options),
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


def _model_problems(options: LiveOptions) -> list[str]:
    if options.layers is not None and options.layers < 1:
        return []  # said already, and what is wrong with a model of so many layers would mislead
    try:
        model = open_shortened(options.model, torch.bfloat16, options.layers)
        return [*violations(model, options.train), *violations(model, options.gen)]
    except CatalogError as error:
        return [f"--model: {error}"]


def _options(arguments: argparse.Namespace) -> LiveOptions:
    peers = names_of(arguments.peers or [",".join(PEERS)])
    return LiveOptions(
        model=arguments.model,
        train=parse_train(arguments.train),
        gen=parse_gen(arguments.gen),
        train_text=arguments.train,
        gen_text=arguments.gen,
        transports=names_of(arguments.transport or ["auto"]),
        peers=() if peers == ("none",) else peers,
        dtype=arguments.dtype,
        refits=arguments.refits,
        warm_up=arguments.warm_up,
        peer_refits=arguments.peer_refits,
        bucket_mb=arguments.bucket_mb,
        streams=arguments.streams,
        layers=arguments.layers,
        verify=arguments.verify,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        engine_python=arguments.engine_python,
        engine_pythonpath=arguments.engine_pythonpath,
        engine_log=arguments.engine_log,
        json=arguments.json,
        device=arguments.device,
        timeout_s=arguments.timeout,
    )
