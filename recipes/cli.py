"""``rlrefit``: the command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from .bench.arguments import add_arguments as add_bench_arguments
from .configs import described_recipes
from .plan.arguments import add_arguments as add_plan_arguments

# Exit codes: 1 a run that failed, 2 a configuration that can't run, 130 stopped by the user.
FAILED, MISCONFIGURED, STOPPED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rlrefit", description="Shard-to-shard weight refit for RL post-training."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="run a recipe",
        description="Run a recipe: rlrefit train recipe=grpo_tiny [key=value …]. A recipe is the name of a bundled "
        "one or the path of a YAML file; every other argument overrides a key of it.",
    )
    train.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and keys to override")
    train.add_argument("--recipe", metavar="NAME|FILE.yaml", help="the same as recipe=NAME")
    train.add_argument("--list", action="store_true", help="list the bundled recipes and exit")
    plan = commands.add_parser(
        "plan",
        help="plan a refit without carrying it out",
        description="Plan a refit: routes and reasons, bytes by rank and link, predicted time against its bound. "
        "Needs no GPU, no weights and no other process.",
    )
    add_plan_arguments(plan)
    bench = commands.add_parser(
        "bench",
        help="time the refit of a named model",
        description="Time the refit of a named model's true shapes on the GPUs of this host, beside other ways to move "
        "the same weights: rlrefit bench --model qwen3-30b-a3b --train ep=4 --gen tp=4. With --live, between a live "
        "Megatron-core model and a live vLLM or SGLang.",
    )
    add_bench_arguments(bench)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        keys = "" if parsed.command == "bench" else "; keys of a recipe are given as key=value"
        commands.choices[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}{keys}")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    if parsed.command == "bench":
        from .bench.command import main as run_bench

        return run_bench(parsed, Console(), Console(stderr=True))
    _take_recipe(parsed, {"train": train, "plan": plan}[parsed.command])
    if parsed.command == "plan":
        from .plan.command import run as run_plan

        return run_plan(parsed)
    return _list_recipes() if parsed.list else _train(parsed.recipe, parsed.overrides)


def _take_recipe(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Set ``parsed.recipe`` by ``recipe=NAME`` or ``--recipe NAME``, so that one line serves train and plan."""
    named = [o.partition("=")[2] for o in parsed.overrides if o.startswith("recipe=")]
    given = named if parsed.recipe is None else [*named, parsed.recipe]
    if len(given) > 1:
        parser.error(f"one recipe is wanted, and {' and '.join(given)} are given")
    parsed.recipe = given[0] if given else None
    parsed.overrides = [o for o in parsed.overrides if not o.startswith("recipe=")]


class _Version(argparse.Action):
    """``--version``, which looks up the version only where it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        Console().print(f"rlrefit {version('rlrefit')}", highlight=False)
        parser.exit()


def _list_recipes() -> int:
    recipes = described_recipes()
    width = max(map(len, recipes))
    for name, description in recipes.items():
        Console().print(f"{name:{width}}  {description}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _train(recipe: str | None, overrides: Sequence[str]) -> int:
    errors = Console(stderr=True)
    if recipe is None:
        errors.print(escape(_wants_a_recipe(overrides)), highlight=False, soft_wrap=True)
        return MISCONFIGURED
    # Imported here: they load torch, which takes seconds.
    from .config.options import missing_for_recipes

    if missing := missing_for_recipes():
        errors.print(escape(missing), highlight=False, soft_wrap=True)
        return MISCONFIGURED
    from .config.load import ConfigError, load_config

    try:
        config = load_config(recipe, overrides, to_run=True)
    except ConfigError as error:
        errors.print(escape(str(error)), highlight=False, soft_wrap=True)
        return MISCONFIGURED
    return _run(config, errors)


def _wants_a_recipe(overrides: Sequence[str]) -> str:
    bare = next((o for o in overrides if "=" not in o and not o.startswith("~")), None)
    hint = "rlrefit train --list shows all" if bare is None else f"did you mean recipe={bare}?"
    return f"rlrefit train needs one recipe=NAME, e.g. recipe=grpo_tiny; {hint}"


def _run(config: object, errors: Console) -> int:
    from ..integration.errors import RefitError
    from .config.load import ConfigError
    from .rewards.scorer import RewardError
    from .run.checkpoint import LayoutChanged
    from .run.cluster import RunError
    from .train import Interrupted, train

    def say(error: BaseException, code: int) -> int:
        errors.print(escape(str(error)), highlight=False, soft_wrap=True)
        return code

    try:
        train(config, Console())  # type: ignore[arg-type]
    except ConfigError as error:
        return say(error, MISCONFIGURED)
    except Interrupted as stop:
        return say(stop, STOPPED)
    except KeyboardInterrupt:
        return say(Interrupted("stopped before anything was started"), STOPPED)
    except (RunError, RewardError, RefitError, LayoutChanged) as error:
        return say(error, FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
