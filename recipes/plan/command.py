"""``rlrefit plan``: the dry run of a refit, without GPU, weights or other processes."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from .explain import explain
from .heat_map import write_heat_map
from .options import PlanOptions, PlanProblems, read_options
from .recipe import layout_text
from .render import show_explanation, show_problems, show_study
from .study import json_of_problems, study

# As the command line defines them.
_DONE, _FAILED, _IMPOSSIBLE = 0, 1, 2


def run(arguments: argparse.Namespace) -> int:
    """Plan, print, and return the exit code: 2 where no plan can be made."""
    console = Console()
    try:
        planned = study(read_options(arguments))
    except PlanProblems as problems:
        return _refuse(arguments, problems.violations)
    if arguments.enumerate_with_bridge:
        # Imported here: without it the command needs nothing of Megatron's workers.
        from .with_bridge import differences_from_bridge

        differences = differences_from_bridge(planned)
        if differences:
            return _refuse(arguments, differences)
    options = planned.options
    if options.heat_map is not None:
        try:
            write_heat_map(planned, options.heat_map)
        except OSError as error:
            Console(stderr=True).print(f"the heat map can't be written: {error}", highlight=False)
            return _FAILED
    if options.replaced:
        told = Console(stderr=True) if arguments.json else console
        told.print(options.replaced, highlight=False, markup=False, soft_wrap=True)
    if arguments.json:
        _print_json(planned.as_json(*_layouts(arguments, options)))
        return _DONE
    if options.explain:
        show_explanation(console, explain(planned, options.explain))
    else:
        show_study(console, planned)
    if arguments.enumerate_with_bridge:
        console.print("Megatron-Bridge exports and holds what the plan has", highlight=False)
    if options.heat_map is not None:
        console.print(f"heat map {options.heat_map}", highlight=False, soft_wrap=True)
    return _DONE


def _layouts(arguments: argparse.Namespace, options: PlanOptions) -> tuple[str, str]:
    """Both layouts as the user wrote them, or as the recipe has them."""
    return arguments.train or layout_text(options.train), arguments.gen or layout_text(options.gen)


def _refuse(arguments: argparse.Namespace, violations: list[str]) -> int:
    if arguments.json:
        named = (arguments.model or arguments.recipe or "", arguments.train or "", arguments.gen or "")
        _print_json(json_of_problems(*named, violations))
    else:
        show_problems(Console(stderr=True), violations)
    return _IMPOSSIBLE


def _print_json(data: dict[str, object]) -> None:
    # Not through the width and markup of a terminal.
    Console(soft_wrap=True, markup=False, highlight=False, emoji=False).print(json.dumps(data, indent=2))
