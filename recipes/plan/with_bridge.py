"""The catalogue's prediction held against what real Megatron-Bridge would export."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...integration.layout import Axes, Box, volume
from ...integration.weights.holdings import Holdings
from ...integration.weights.manifest import TensorSpec
from .catalog import bundled_models, bundled_name
from .offline import OfflineError, OfflineExport, enumerate_offline
from .study import Study

# Names in one sentence.
_NAMED = 3


def differences_from_bridge(study: Study) -> list[str]:
    """Where Bridge disagrees with the plan on the export or on what trainer ranks hold: the first one of each pipeline
    stage, and the last one of all.

    Returns:
        One sentence for each kind of difference, or why Bridge can't be asked; empty if all agrees.
    """
    options = study.options
    world = options.train.world_size
    # Stages differ in their layers, and one has all kinds of shapes that its ranks have; the last rank has the highest
    # place in every group.
    ranks = tuple(dict.fromkeys((*range(0, world, world // options.train.pp), world - 1)))
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.json"
        config.write_text(json.dumps(options.model.config))
        # The folder may have an index of safetensors.
        given = opened_path(options.model.name)
        try:
            export = enumerate_offline(given or config, options.train, ranks, options.model.dtype)
        except OfflineError as error:
            return [f"bridge: {error}"]
    return differences(study, export)


def opened_path(name: str) -> Path | None:
    """The path that a model of this name was opened from; None if it is bundled or of the hub, whatever lies here."""
    bundled = name.lower() in bundled_models() or bundled_name(name) is not None
    return Path(name) if not bundled and Path(name).exists() else None


def differences(study: Study, export: OfflineExport) -> list[str]:
    """Where an export of the study's model and layout disagrees with it, one sentence for each kind."""
    return [*_of_specs(study.specs, export.specs), *_of_ranks(study, export)]


def _of_specs(ours: Iterable[TensorSpec], theirs: Iterable[TensorSpec]) -> Iterator[str]:
    predicted = {spec.name: spec for spec in ours}
    exported = {spec.name: spec for spec in theirs}
    yield from _some("exports", exported.keys() - predicted.keys(), "that the catalogue does not know")
    yield from _some("does not export", predicted.keys() - exported.keys(), "that the plan counts on")
    for name in sorted(predicted.keys() & exported.keys()):
        if predicted[name] != exported[name]:
            shape, dtype = list(exported[name].shape), exported[name].dtype
            yield (
                f"bridge: exports {name} as {dtype}{shape}, the plan has {predicted[name].dtype}"
                f"{list(predicted[name].shape)}"
            )
            return  # one says enough of a model that is read wrongly


def _of_ranks(study: Study, export: OfflineExport) -> Iterator[str]:
    for rank, told in export.ranks.items():
        held = {(held.name, held.box, held.axes) for held in told.held if volume(held.box)}
        predicted = set(_boxes(study.sources[rank], study.specs))
        yield from _some(
            f"trainer rank {rank} holds",
            {name for name, *_ in held - predicted},
            "in parts that the plan lacks",
        )
        yield from _some(
            f"trainer rank {rank} does not hold",
            {name for name, *_ in predicted - held},
            "as the plan has it",
        )


def _boxes(holdings: Holdings, specs: list[TensorSpec]) -> Iterator[tuple[str, Box, Axes | None]]:
    for group in holdings.groups:
        for index in group.indices.tolist():
            for box in group.boxes:
                yield specs[index].name, box, group.axes


def _some(what: str, names: Iterable[str], why: str) -> Iterator[str]:
    found = sorted(names)
    if found:
        rest = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
        yield f"bridge: {what} {', '.join(found[:_NAMED])}{rest} {why}"
