"""What ``rlrefit plan`` was asked for, and all that is wrong with it."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ...integration.config import RefitConfig
from ...integration.quantize.formats import Fp8Blockwise, Int4, Nvfp4
from ...integration.quantize.int4 import GROUPS
from ...integration.weights.manifest import dtype_name
from ..config.engines import too_large_for
from ..config.errors import ConfigError
from ..config.options import empty_layouts, missing_megatron, output_problems, refit_problems
from .arguments import DTYPES
from .catalog import (
    CatalogError,
    FsdpLayout,
    GenLayout,
    LayoutError,
    Model,
    QuantizedFormat,
    TrainLayout,
    open_model,
    option_of,
    parse_gen,
    parse_train,
    violations,
)
from .hosts import Hosts, HostsError, read_hosts
from .recipe import RecipePlan, layout_text, read_recipe

_DTYPES = dict(zip(DTYPES, (torch.bfloat16, torch.float16, torch.float32), strict=True))
_HEAT_MAPS = (".png", ".html", ".htm")


class PlanProblems(Exception):
    """All that keeps a plan from being made, one sentence each."""

    def __init__(self, violations: list[str]):
        super().__init__("; ".join(violations))
        self.violations = violations


@dataclass(frozen=True)
class PlanOptions:
    """A dry run.

    Attributes:
        model: from the catalogue; quantized, if engines hold it so.
        train: layout of the trainers.
        gen: layout of the engines.
        hosts: where the ranks are.
        bucket_bytes: size of a staging bucket.
        streams: rounds of ``p2p`` that are on the wire at a time.
        compile_ranks: how many ranks' own parts are compiled and measured; None for all.
        explain: a weight to explain; empty for none.
        heat_map: file for the heat map; None for none.
        changed: shares of what travels that change before sparse refits; empty for none.
        delta_base: ``policy.refit.delta_base`` of these.
        replaced: what options took the place of in the recipe, and what is still the recipe's; empty where none did.
    """

    model: Model
    train: TrainLayout | FsdpLayout
    gen: GenLayout
    hosts: Hosts
    bucket_bytes: int
    streams: int
    compile_ranks: int | None
    explain: str
    heat_map: Path | None
    changed: tuple[float, ...]
    delta_base: str
    replaced: str = ""

    @property
    def quantize(self) -> str:
        """As the option of this name."""
        return option_of(self.model.quantize, self.model.activations)


def read_options(arguments: argparse.Namespace) -> PlanOptions:
    """Check the arguments.

    Raises:
        PlanProblems: with everything that is wrong with them, whatever they concern.
    """
    wrong: list[str] = []
    model = train = gen = hosts = recipe = None
    if arguments.recipe:
        try:
            recipe = read_recipe(arguments.recipe, arguments.overrides)
        except ConfigError as error:
            wrong += error.violations
        else:
            model, train, gen = recipe.model, recipe.train, recipe.gen
    else:
        if arguments.overrides:
            named = next((o for o in arguments.overrides if "=" not in o and not o.startswith("~")), None)
            remedy = "give --recipe, or options" if named is None else f"did you mean recipe={named}?"
            wrong.append(
                f"{' '.join(arguments.overrides)}: key=value overrides keys of a recipe, and none is given; {remedy}"
            )
        wrong += [
            f"{name}: is missing; give --{name}, or a recipe that has it with --recipe"
            for name in ("model", "train", "gen")
            if getattr(arguments, name) is None
        ]
    quantize = arguments.quantize or ("off" if recipe is None else recipe.quantize)
    try:
        if arguments.model is not None:
            own = recipe.model.dtype if recipe is not None else _DTYPES[DTYPES[0]]
            model = open_model(arguments.model, _DTYPES[arguments.dtype] if arguments.dtype else own)
        elif model is not None and arguments.dtype is not None:
            model = replace(model, dtype=_DTYPES[arguments.dtype])
        if model is not None and quantize != "off":
            wrong += _unquantizable(arguments, quantize, model)
            format = _format_of(quantize, model, recipe)
            model = replace(model, quantize=format, activations=quantize == "w4a4")
            _ = model.architecture
    except CatalogError as error:
        wrong.append(f"model: {error}")
        model = None
    try:
        train = parse_train(arguments.train) if arguments.train is not None else train
    except LayoutError as error:
        wrong.append(str(error))
    try:
        gen = parse_gen(arguments.gen) if arguments.gen is not None else gen
    except LayoutError as error:
        wrong.append(str(error))
    try:
        hosts = read_hosts(arguments.topology)
        if recipe is not None and recipe.colocated:
            hosts = replace(hosts, shared_gpus=True)
    except HostsError as error:
        wrong.append(f"topology: {error}")
    layouts: list[TrainLayout | FsdpLayout | GenLayout] = [
        layout for layout in (train, gen) if layout is not None
    ]
    for layout in layouts:
        wrong += violations(model, layout) if model is not None else layout.violations()
    wrong += empty_layouts(arguments.train, arguments.gen)
    config = _refit_config(arguments, recipe.refit if recipe is not None else RefitConfig())
    wrong += refit_problems(config)
    if arguments.delta_base is not None and arguments.changed is None:
        wrong.append("delta-base: has no effect without --changed; give --changed too, or leave it out")
    if arguments.changed is not None and config.delta_base == "optimizer" and quantize != "off":
        wrong.append(
            "delta-base: optimizer marks weights, and codes travel, which trainers quantize; give gpu or host"
        )
    if arguments.json and arguments.explain:
        wrong.append("explain: tables for people, which --json has no keys for; leave one of the two out")
    if arguments.enumerate_with_bridge and isinstance(train, FsdpLayout):
        wrong.append("enumerate-with-bridge: Bridge exports Megatron's models, not FSDP2's; leave it out")
    if arguments.enumerate_with_bridge:
        wrong += missing_megatron("enumerate-with-bridge", "leave it out")
    heat_map = Path(arguments.heat_map) if arguments.heat_map else None
    if heat_map is not None:
        wrong += output_problems("heat-map", heat_map, _HEAT_MAPS)
    ranks = None if arguments.compile_ranks == "all" else arguments.compile_ranks
    if ranks is not None and not (ranks.isdecimal() and int(ranks) >= 1):
        wrong.append(f"compile-ranks is {ranks!r}; give all, or a number of at least 1")
    if hosts is not None and hosts.shared_gpus and train is not None and gen is not None:
        wrong += _unshareable(train.world_size, gen.world_size, hosts, is_recipe=recipe is not None)
    if wrong or model is None or train is None or gen is None or hosts is None:
        raise PlanProblems(wrong)
    return PlanOptions(
        model,
        train,
        gen,
        hosts,
        config.bucket_bytes,
        config.streams,
        None if ranks is None else int(ranks),
        arguments.explain,
        heat_map,
        arguments.changed or (),
        config.delta_base,
        _replaced(arguments, recipe) if recipe is not None else "",
    )


def _unshareable(train_ranks: int, gen_ranks: int, hosts: Hosts, *, is_recipe: bool) -> list[str]:
    """Why these ranks can't share GPUs; a recipe is told in its own keys."""
    found = []
    if train_ranks != gen_ranks:
        found.append(
            f"topology: {train_ranks} trainer and {gen_ranks} engine ranks can't share GPUs one to one; give layouts of the "
            "same size"
        )
    if is_recipe:
        larger = "--topology gpus_per_host=…"
        too_large = too_large_for(train_ranks, hosts.gpus_per_host, "a host of this topology", larger)
        found += [too_large] if too_large else []
    elif train_ranks > hosts.gpus_per_host:
        found.append(
            f"topology: {train_ranks} GPUs that a trainer and an engine share each have to be on one host, and gpus_per_host "
            f"is {hosts.gpus_per_host}; raise it, or give smaller layouts"
        )
    return found


def _replaced(arguments: argparse.Namespace, recipe: RecipePlan) -> str:
    whose = {
        "model": recipe.model.name,
        "train": layout_text(recipe.train),
        "gen": layout_text(recipe.gen),
        "dtype": str(recipe.model.dtype).removeprefix("torch."),
        "bucket_mb": recipe.refit.bucket_mb,
        "streams": recipe.refit.streams,
        "quantize": recipe.quantize,
    }
    given = {name: value for name in whose if (value := getattr(arguments, name)) is not None}
    if not given:
        return ""
    taken = ", ".join(
        f"--{name.replace('_', '-')} {value} in place of {whose[name]}" for name, value in given.items()
    )
    kept = ", ".join(f"{name} {value}" for name, value in whose.items() if name not in given)
    return f"recipe {arguments.recipe}: {taken}" + (f"; still the recipe's: {kept}" if kept else "")


def _format_of(quantize: str, model: Model, recipe: RecipePlan | None) -> QuantizedFormat:
    if quantize == "fp8":
        return Fp8Blockwise()
    if quantize != "int4":
        return Nvfp4()
    # FP32 is told as wrong, beside all else.
    dtype = dtype_name(torch.bfloat16 if model.dtype == torch.float32 else model.dtype)
    return Int4(GROUPS[0] if recipe is None else recipe.group, dtype)


def _unquantizable(arguments: argparse.Namespace, quantize: str, model: Model) -> list[str]:
    found = []
    if model.dtype == torch.float32:
        found.append(f"quantize: {quantize} is made of bf16 or fp16; give --dtype bf16")
    if arguments.enumerate_with_bridge:
        found.append(
            f"enumerate-with-bridge: Bridge exports what is not quantized yet; leave it or --quantize {quantize} out"
        )
    if arguments.changed is not None and quantize != "fp8":
        found.append(
            f"changed: most kernels have weights of four bits in an order of their own, for which refits are dense; leave it or --quantize "
            f"{quantize} out"
        )
    return found


def _refit_config(arguments: argparse.Namespace, config: RefitConfig) -> RefitConfig:
    given = {name: getattr(arguments, name) for name in ("bucket_mb", "streams", "delta_base")}
    replaced = {name: value for name, value in given.items() if value is not None}
    if arguments.changed is not None:
        replaced["delta"] = "always"
    return RefitConfig.unchecked(**asdict(config) | replaced)
