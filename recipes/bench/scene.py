"""What the refit and its peers have in common in one run: the model, both layouts, this rank's storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...integration.layout import Axes, Box, box_of, common_axes
from ...integration.quantize.formats import Fp8Blockwise
from ...integration.weights.manifest import TensorSpec, dtype_name
from ..plan.catalog import (
    CatalogError,
    Model,
    Param,
    exported_specs,
    gen_storage,
    open_model,
    train_storage,
    violations,
)
from .options import DTYPES, BenchOptions, RunOptions
from .ranks import BenchRanks
from .room import require_room
from .storage import BenchDestination, BenchSource, Storage


@dataclass(frozen=True)
class Scene:
    """One rank's view of a run.

    Attributes:
        options: of the run.
        ranks: of the run.
        specs: all weights, in the order of the export, not quantized.
        held: trainer rank → weight → boxes that it holds.
        wanted: engine's rank (in the run) → weight → boxes that it keeps.
        storage: this rank's.
        endpoint: this rank's side of a refit.
    """

    options: BenchOptions
    ranks: BenchRanks
    specs: list[TensorSpec]
    held: dict[int, dict[str, list[Box]]]
    wanted: dict[int, dict[str, list[Box]]]
    storage: Storage
    endpoint: BenchSource | BenchDestination

    @property
    def wanted_specs(self) -> list[TensorSpec]:
        """The weights that some engine keeps."""
        return [spec for spec in self.specs if any(spec.name in boxes for boxes in self.wanted.values())]

    def advance(self) -> None:
        """Change all weights of the trainers."""
        self.endpoint.advance()

    def change(self, share: float) -> None:
        """Change a share of all weights of the trainers."""
        self.endpoint.change(share)

    def give_memory_back(self) -> None:
        """Have engines whose memory sleeps between refits, and trainers that leave their GPU, give it back and take it anew."""
        if isinstance(self.endpoint, BenchDestination):
            self.endpoint.sleep()
        else:
            self.endpoint.leave()

    def poison(self) -> None:
        """Fill the engines' storage with NaN."""
        if isinstance(self.endpoint, BenchDestination):
            self.endpoint.poison()

    def faults(self) -> list[str]:
        """What the engines hold wrongly, over all of them; a collective of all ranks."""
        mine = self.endpoint.faults() if isinstance(self.endpoint, BenchDestination) else []
        return [
            f"rank {rank}: {fault}" for rank, found in enumerate(self.ranks.collect(mine)) for fault in found
        ]


def set_up(options: BenchOptions, ranks: BenchRanks) -> Scene:
    """Allocate and fill this rank's storage.

    Raises:
        CatalogError, LayoutError: the model or a layout can't be.
        RefitError: a device that a trainer and an engine share has no room for both.
    """
    model = open_shortened(options.model, DTYPES[options.dtype], options.layers)
    served = _served_model(model, options)
    specs = exported_specs(model, options.train)
    trainers = [train_storage(model, options.train, rank) for rank in range(options.train_ranks)]
    engines = [gen_storage(served, options.gen, rank) for rank in range(options.gen_ranks)]
    axes = _common_axes([*trainers, *engines])
    specs = [spec._replace(shape=axes[spec.name].shape) if spec.name in axes else spec for spec in specs]
    by_name = {spec.name: spec for spec in specs}
    refused = _refused(trainers, engines, by_name, served.formats())
    if served.quantize is not None:
        # What a trainer rank can't quantize alone.
        travelling = [train_storage(served, options.train, rank) for rank in range(options.train_ranks)]
        refused |= {n: r for n, r in _refusals(travelling).items() if n in by_name}
    held = {rank: _boxes(params, refused, axes) for rank, params in enumerate(trainers)}
    for name in refused:
        held[0][name] = [box_of(by_name[name].shape)]
    wanted = {}
    for rank, params in enumerate(engines):
        wanted[options.train_ranks + rank] = boxes = _boxes(params, (), axes)
        for name in _loader_only(params):
            boxes.setdefault(name, [box_of(by_name[name].shape)])
    endpoint: BenchSource | BenchDestination
    if ranks.is_source:
        params = trainers[ranks.rank]
        whole = [by_name[name] for name in refused] if ranks.rank == 0 else []
    else:
        params = engines[ranks.rank - options.train_ranks]
        placed = _boxes(params, (), axes)
        whole = [by_name[name] for name in _loader_only(params) if name not in placed]
    if options.colocated:
        require_room(options, ranks, params, whole)
    if ranks.is_source:
        storage = Storage.allocate(params, whole, ranks.device, refused, axes=axes)
        endpoint = BenchSource(specs, storage, refused, ranks.device, leaves=options.leave)
    else:
        storage = Storage.allocate(params, whole, ranks.device, sleeps=options.sleep, axes=axes)
        endpoint = BenchDestination(specs, storage, refused, ranks.device, served.formats())
    return Scene(options, ranks, specs, held, wanted, storage, endpoint)


def open_shortened(name: str, dtype: torch.dtype, layers: int | None) -> Model:
    """A model of the catalogue, with only its first ``layers`` decoder layers (at most all) if that is not None.

    Raises:
        CatalogError: the catalogue can't open it.
    """
    return _shortened(open_model(name, dtype), layers)


def _shortened(model: Model, layers: int | None) -> Model:
    if layers is None:
        return model
    text = model.config.get("text_config")
    if text is None:
        return Model(model.name, _shortened_config(model.config, layers), model.dtype)
    return Model(model.name, {**model.config, "text_config": _shortened_config(text, layers)}, model.dtype)


def _shortened_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Keys of a language model of fewer layers."""
    kinds = {
        key: config[key][:layers] for key in ("hybrid_override_pattern", "layer_types") if config.get(key)
    }
    return {**config, "num_hidden_layers": layers, **kinds}


def _served_model(model: Model, options: RunOptions) -> Model:
    """The model as the engines hold it."""
    return replace(model, quantize=Fp8Blockwise()) if options.is_quantized else model


def model_problems(options: RunOptions) -> list[str]:
    """What is wrong with a run's model, or with its layouts for it, one sentence each."""
    if options.layers is not None and options.layers < 1:
        return []  # said already, and what is wrong with a model of so many layers would mislead
    try:
        whole = open_model(options.model, torch.bfloat16)
        most = whole.architecture.layers
        if options.layers is not None and options.layers > most:
            return [
                f"--layers: {options.layers}, and {whole.name} has {most} decoder layers; give at most {most}, or leave it out for all"
            ]
        model = _shortened(whole, options.layers)
        served = _served_model(model, options)
        return [*violations(model, options.train), *violations(served, options.gen)]
    except CatalogError as error:
        return [f"--model: {error}"]


def _refused(
    trainers: Sequence[Sequence[Param]],
    engines: Sequence[Sequence[Param]],
    by_name: Mapping[str, TensorSpec],
    quantized: Collection[str],
) -> dict[str, str]:
    """Weights that a rule of either side refuses, or that the sides store in different dtypes, with reasons."""
    found = _refusals([*trainers, *engines])
    for param in (param for params in (*trainers, *engines) for param in params):
        for part in param.parts:
            spec = by_name.get(part.name)
            if spec is not None and part.name not in quantized and param.dtype != spec.dtype:
                found[part.name] = f"{param.name} is stored as {dtype_name(param.dtype)}"
    return {name: found[name] for name in by_name if name in found}


def _refusals(ranks: Sequence[Sequence[Param]]) -> dict[str, str]:
    """The first rank's reason for each weight."""
    return {name: param.reason for params in reversed(ranks) for param in params for name in param.refused}


def _loader_only(params: Sequence[Param]) -> list[str]:
    """Weights that a rank's parameters hold where no rule says."""
    return list(dict.fromkeys(name for param in params for name in param.refused))


def _common_axes(ranks: Sequence[Sequence[Param]]) -> dict[str, Axes]:
    """Of weights that some rank sees otherwise than as they are: the axes by which all see them, as a refit would have them."""
    parts = [part for params in ranks for param in params for part in param.parts]
    kinds: dict[str, dict[Axes, None]] = defaultdict(dict)
    for part in parts:
        if part.axes is not None:
            kinds[part.name][part.axes] = None
    found = {name: common_axes(kinds[name]) for name in kinds}
    return {name: axes for name, axes in found.items() if axes is not None}


def _boxes(
    params: Sequence[Param], left_out: Collection[str], seen: Mapping[str, Axes]
) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for param in params:
        for part in param.parts:
            if part.name not in left_out:
                if part.name in seen:
                    own = part.axes or Axes.of(part.full_shape)
                    boxes[part.name] += [piece for piece, _ in own.cut(part.box, seen[part.name])]
                else:
                    boxes[part.name].append(part.box)
    return boxes
