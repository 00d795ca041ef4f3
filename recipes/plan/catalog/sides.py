"""What each rank of a trainer or an engine stores of a model, and the same as compact holdings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from ....integration.layout import Axes, Box
from ....integration.quantize.formats import Nvfp4
from ....integration.weights.holdings import HoldingGroup, Holdings, Positions
from ....integration.weights.manifest import TensorSpec
from .fsdp_units import FSDP_FAMILIES, fsdp_params
from .layouts import FsdpLayout, GenCoordinates, GenLayout, LayoutError, TrainCoordinates, TrainLayout
from .model import Model
from .quantized import Quantized, option_of, quantized_layers
from .sections import Section, Stage
from .storage import Param
from .units import Mesh, Place, Shard, Unit

Side = Literal["train", "fsdp", "gen"]
Layout = TrainLayout | FsdpLayout | GenLayout
_Held = tuple[tuple[Box, ...], torch.dtype, Axes | None]


def violations(model: Model, layout: Layout) -> list[str]:
    """Why ``model`` can't be laid out so, one sentence each; empty if it can."""
    found = layout.violations()
    if found:
        return found
    side = _side(layout)
    try:
        stages = layout.stage_layers(model.architecture.layers)
    except LayoutError as error:
        found.append(str(error))
    else:
        cut = [
            pair
            for pair in model.architecture.sharing
            if not any(set(pair) <= set(stage) for stage in stages)
        ]
        if side == "gen" and cut:
            found.append(
                f"gen: layer {cut[0][0]} takes keys and values of layer {cut[0][1]}, which vLLM would have on another pipeline stage; give "
                "a smaller pp"
            )
    if side == "fsdp":
        return found + _unknown_to_fsdp(model)
    if side == "train" and layout.pp > 1 and not model.architecture.pipelined:
        found.append(
            f"train: Megatron-Bridge builds a {model.config.get('model_type')} model of this kind on one pipeline stage alone; give pp = 1"
        )
    at = layout.coordinates(0)
    sizes: dict[Mesh, int] = {"tp": at.tp.size, "etp": at.etp.size, "ep": at.ep.size}
    sections = model.architecture.sections
    units = dict.fromkeys(unit for section in sections for unit in section.units)
    for unit in units:
        divisions = unit.train_divisions(sizes) if side == "train" else unit.gen_divisions(sizes)
        for what, length, mesh in divisions:
            if length % sizes[mesh]:
                found.append(f"{side}: {what} can't be divided: {length} by {mesh} = {sizes[mesh]}")
    if at.ep.size > 1 and not any(mesh == "ep" for unit in units for *_, mesh in unit.train_divisions(sizes)):
        found.append(f"{side}: ep is {at.ep.size}, and the model has no experts to share; give ep = 1")
    if not found:
        place = _place(model, layout, at)
        layers = [unit for unit in units if isinstance(unit, Quantized)]
        if side == "gen":
            cuts, experts = [cut for unit in layers for cut in unit.gen_cuts(place)], "ep = tp"
        else:
            cuts, experts = [cut for unit in layers for cut in unit.train_cuts(place)], "etp"
        option = option_of(model.quantize, model.activations)
        found += [
            f"{side}: {cut}; give another tp (or, for experts, {experts}), or leave --quantize {option} out"
            for cut in cuts
        ]
    return list(dict.fromkeys(found))


def padded_by_marlin(model: Model, layout: GenLayout) -> str:
    """A matrix in NVFP4 of a rank that Marlin's tiles do not divide, with its sizes; empty if they divide all."""
    if not isinstance(model.quantize, Nvfp4):
        return ""
    place = _place(model, layout, layout.coordinates(0))
    for unit in dict.fromkeys(unit for _, unit in quantized_layers(model.architecture)):
        for param in unit.unit.gen(place):
            rows, columns = param.shape[-2:]
            # vLLM's marlin_padded_nk.
            if rows % 64 or columns % 64 or (rows % 128 and columns % 128):
                return f"{param.name}, {rows} by {columns} on a rank"
    return ""


def exported_specs(model: Model, layout: TrainLayout | FsdpLayout) -> list[TensorSpec]:
    """All weights that a trainer exports: ``model.specs()``, of which transformers has no prediction layers."""
    if not isinstance(layout, FsdpLayout):
        return model.specs()
    known = {
        section.hf + weight.name
        for section in _sections(model, layout, 0)
        for unit in section.units
        for weight in unit.weights()
    }
    return [spec for spec in model.specs() if spec.name in known]


def train_storage(model: Model, layout: TrainLayout | FsdpLayout, rank: int) -> list[Param]:
    """The parameters that Megatron-core or FSDP2 stores on trainer rank ``rank``; of a quantized model, what travels.

    Raises:
        LayoutError: the model can't be laid out so; see :func:`violations`.
    """
    return list(_storage(model, layout, rank))


def gen_storage(model: Model, layout: GenLayout, rank: int) -> list[Param]:
    """The parameters that vLLM stores on engine rank ``rank`` (counted from 0 among the engine ranks).

    Raises:
        LayoutError: the model can't be laid out so; see :func:`violations`.
    """
    return list(_storage(model, layout, rank))


def train_holdings(
    model: Model,
    layout: TrainLayout | FsdpLayout,
    rank: int,
    positions: Mapping[str, int],
    first_rank: int = 0,
) -> Holdings:
    """What trainer rank ``rank`` holds; see :func:`all_holdings` for all ranks at once."""
    return HoldingsOf(model, positions).rank(layout, rank, first_rank)


def gen_holdings(
    model: Model, layout: GenLayout, rank: int, positions: Mapping[str, int], first_rank: int = 0
) -> Holdings:
    """What engine rank ``rank`` wants; ``first_rank`` is its number in the refit world less ``rank``."""
    return HoldingsOf(model, positions).rank(layout, rank, first_rank)


def all_holdings(
    model: Model, train: TrainLayout | FsdpLayout, gen: GenLayout, positions: Mapping[str, int]
) -> tuple[list[Holdings], list[Holdings]]:
    """What all trainer ranks hold and all engine ranks want, with their numbers in the refit world.

    Args:
        model: from :func:`~.model.open_model`.
        train: the trainer's layout.
        gen: the engines' layout.
        positions: Hugging Face name → position in the list of specs.

    Raises:
        LayoutError: the model can't be laid out so; see :func:`violations`.
    """
    made = HoldingsOf(model, positions)
    sources = [made.rank(train, rank) for rank in range(train.world_size)]
    return sources, [made.rank(gen, rank, train.world_size) for rank in range(gen.world_size)]


class HoldingsOf:
    """Makes holdings of one model, and remembers what its layers have in common.

    Args:
        model: from :func:`~.model.open_model`.
        positions: Hugging Face name → position in the list of specs.
    """

    def __init__(self, model: Model, positions: Mapping[str, int]):
        self._model = model
        self._positions = positions
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._rows: dict[tuple[str, tuple[str, ...]], Positions] = {}
        self._known: dict[tuple[object, ...], Holdings] = {}

    def rank(self, layout: Layout, rank: int, first_rank: int = 0) -> Holdings:
        """What ``rank`` of one side holds or wants, as rank ``first_rank + rank`` of the refit world.

        Raises:
            LayoutError: the model can't be laid out so.
        """
        _check(self._model, layout)
        at = layout.coordinates(rank)
        key = (layout, at)
        if key not in self._known:
            self._known[key] = self._make(layout, at)
        return replace(self._known[key], rank=first_rank + rank)

    def _make(self, layout: Layout, at: TrainCoordinates | GenCoordinates) -> Holdings:
        place = _place(self._model, layout, at)
        by_units: dict[tuple[Unit, ...], list[Section]] = defaultdict(list)
        for section in _sections(self._model, layout, at.stage):
            by_units[section.units].append(section)
        groups: dict[_Held, list[Positions]] = defaultdict(list)
        refused: dict[str, list[Positions]] = defaultdict(list)
        side = _side(layout)
        for units, sections in by_units.items():
            kind = self._kind(side, units, place)
            for held, names in kind.held.items():
                groups[held].append(self._indices(sections, names))
            for reason, names in kind.refused.items():
                refused[reason].append(self._indices(sections, names))
        return Holdings(
            0,
            tuple(
                HoldingGroup(boxes, dtype, _joined(found), axes)
                for (boxes, dtype, axes), found in groups.items()
            ),
            {reason: _joined(found) for reason, found in refused.items()},
        )

    def _kind(self, side: Side, units: tuple[Unit, ...], place: Place) -> _Kind:
        key = (side, id(units), place)
        if key not in self._kinds:
            self._kinds[key] = _Kind(side, units, place)
        return self._kinds[key]

    def _indices(self, sections: list[Section], names: tuple[str, ...]) -> Positions:
        return np.concatenate([self._row(section.hf, names) for section in sections])

    def _row(self, prefix: str, names: tuple[str, ...]) -> Positions:
        """Positions of one layer's weights; layers of many ranks ask for the same ones."""
        key = (prefix, names)
        if key not in self._rows:
            self._rows[key] = np.array([self._positions[prefix + name] for name in names], dtype=np.int64)
        return self._rows[key]


class _Kind:
    """What one place stores of one kind of layer.

    Attributes:
        held: boxes, dtype and axes → the names, without prefix, of the weights that are held as exactly these.
        refused: reason → names.
    """

    def __init__(self, side: Side, units: tuple[Unit, ...], place: Place):
        boxes: dict[str, list[Box]] = defaultdict(list)
        dtypes: dict[str, tuple[torch.dtype, Axes | None]] = {}
        refused: dict[str, list[str]] = defaultdict(list)
        for param in _params(side, units, place):
            for part in param.parts:
                boxes[part.name].append(part.box)
                dtypes[part.name] = param.dtype, part.axes
            for name in param.refused:
                refused[param.reason].append(name)
        held: dict[_Held, list[str]] = defaultdict(list)
        for name, found in boxes.items():
            held[tuple(found), *dtypes[name]].append(name)
        self.held = {key: tuple(names) for key, names in held.items()}
        self.refused = {reason: tuple(dict.fromkeys(names)) for reason, names in refused.items()}


def _storage(model: Model, layout: Layout, rank: int) -> Iterator[Param]:
    _check(model, layout)
    if not 0 <= rank < layout.world_size:
        raise LayoutError(f"rank {rank} is not among the {layout.world_size} of {layout}")
    at = layout.coordinates(rank)
    place = _place(model, layout, at)
    side = _side(layout)
    for section in _sections(model, layout, at.stage):
        own = {"train": section.megatron, "fsdp": section.hf, "gen": section.vllm}[side]
        for param in _params(side, section.units, place):
            yield param.under(own, section.hf)


def _params(side: Side, units: tuple[Unit, ...], place: Place) -> Iterator[Param]:
    for unit in units:
        if side == "fsdp":
            yield from unit.fsdp(place) if isinstance(unit, Quantized) else fsdp_params(unit, place)
        else:
            yield from unit.train(place) if side == "train" else unit.gen(place)


def _side(layout: Layout) -> Side:
    if isinstance(layout, FsdpLayout):
        return "fsdp"
    return "train" if isinstance(layout, TrainLayout) else "gen"


def _unknown_to_fsdp(model: Model) -> list[str]:
    family = model.config.get("model_type")
    if family in FSDP_FAMILIES:
        return []
    return [
        f"train: how FSDP2 holds a {family} model is not in the catalogue, only {', '.join(FSDP_FAMILIES)}; give "
        "Megatron's sizes (tp, pp, ep)"
    ]


def _place(model: Model, layout: Layout, at: TrainCoordinates | GenCoordinates) -> Place:
    multiple = layout.vocabulary_multiple if isinstance(layout, TrainLayout) else 1
    shard = at.fsdp if isinstance(at, TrainCoordinates) else Shard()
    return Place(at.tp, at.etp, at.ep, model.dtype, multiple, shard)


def _sections(model: Model, layout: Layout, stage: int) -> Iterator[Section]:
    """The sections of one pipeline stage."""
    layers = frozenset(layout.stage_layers(model.architecture.layers)[stage])
    ends = {"first": 0, "last": layout.pp - 1}
    side = _side(layout)
    for section in model.architecture.sections:
        at: Stage = section.gen if side == "gen" else section.train
        if at is None or (section.second and layout.pp == 1):
            continue
        if side == "fsdp" and section.gen is None:
            continue  # prediction layers, which transformers leaves out as vLLM does
        if at in layers if isinstance(at, int) else at == "every" or stage == ends[at]:
            yield section


@lru_cache(maxsize=256)
def _faults(model: Model, layout: Layout) -> tuple[str, ...]:
    return tuple(violations(model, layout))


def _check(model: Model, layout: Layout) -> None:
    found = _faults(model, layout)
    if found:
        raise LayoutError("; ".join(found))


def _joined(found: list[Positions]) -> Positions:
    return np.sort(np.concatenate(found))
