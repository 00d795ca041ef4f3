"""One weight: its route, who holds and wants which box, and who sends what to whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...integration.layout import Axes, Box
from ...integration.weights.holdings import Holdings
from ...integration.weights.manifest import ManifestEntry
from .catalog import FsdpLayout
from .study import Study


@dataclass(frozen=True)
class _Sending:
    """One piece of the weight on its way from a trainer.

    Attributes:
        source: trainer rank.
        targets: engine ranks that get it from the trainer.
        relayed_to: engine ranks that get it from those.
        box: the piece.
        nbytes: of the piece.
    """

    source: int
    targets: tuple[int, ...]
    relayed_to: tuple[int, ...]
    box: Box
    nbytes: int


@dataclass(frozen=True)
class Explanation:
    """What becomes of one weight.

    Attributes:
        entry: its shape, dtype, route and reason.
        held: boxes → trainer ranks that hold exactly these.
        wanted: boxes → engine ranks that want exactly these.
        sendings: empty unless it goes shard to shard.
        way: what happens to it where it does not; else empty.
        axes: by which all boxes see it, if not as it is.
    """

    entry: ManifestEntry
    held: dict[tuple[Box, ...], list[int]]
    wanted: dict[tuple[Box, ...], list[int]]
    sendings: tuple[_Sending, ...]
    way: str
    axes: Axes | None


def explain(study: Study, name: str) -> Explanation:
    """Explain the weight ``name``, which the model has."""
    entry = study.analysis.manifest[name]
    position = next(i for i, spec in enumerate(study.specs) if spec.name == name)
    held = _by_boxes(study.analysis.seen.sources, position)
    wanted = _by_boxes(study.analysis.seen.destinations, position)
    sendings = tuple(_sendings(study, position)) if entry.route == "bulk" else ()
    axes = study.analysis.seen.axes.get(name)
    return Explanation(entry, held, wanted, sendings, _way(study, entry), axes)


def _way(study: Study, entry: ManifestEntry) -> str:
    first, last = study.analysis.train_ranks, study.analysis.train_ranks + study.analysis.gen_ranks - 1
    engines = f"engine rank {first}" if first == last else f"engine ranks {first}-{last}"
    if entry.route == "misc":
        gathers = "FSDP" if isinstance(study.options.train, FsdpLayout) else "Megatron-Bridge's export"
        made = entry.spec.name in study.options.model.travelling()
        done = "gathers its weight" if made else "gathers it"
        then = ", which quantize it" if made else ""
        return (
            f"{gathers} {done} on the trainers{then}; trainer rank 0 broadcasts all {entry.spec.nbytes:,} bytes to "
            f"{engines}, whose own load_weights puts them in place"
        )
    return f"not sent: {engines} load no weight of this name" if entry.route == "unused" else ""


def _by_boxes(side: Sequence[Holdings], position: int) -> dict[tuple[Box, ...], list[int]]:
    found: dict[tuple[Box, ...], list[int]] = defaultdict(list)
    for holdings in side:
        for group in holdings.groups:
            place = int(np.searchsorted(group.indices, position))
            if place < len(group.indices) and group.indices[place] == position:
                found[group.boxes].append(holdings.rank)
    return dict(found)


def _sendings(study: Study, position: int) -> Iterator[_Sending]:
    analysis = study.analysis
    assignment = analysis.assignment
    owners = {rank for ranks in _by_boxes(analysis.seen.sources, position).values() for rank in ranks}
    number_of_class = next(i for i, c in enumerate(analysis.classes) if position in c.members)
    member = int(np.searchsorted(analysis.classes[number_of_class].members, position))
    found: dict[tuple[int, Box, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for number, ranks in enumerate(assignment.sets):
        if not owners.issuperset(ranks):
            continue
        for receiver in np.flatnonzero(assignment.nbytes[number]).tolist():
            segments = assignment.segments(number, receiver)
            family = assignment.receivers[receiver].ranks
            cursor = 0
            for index, box, nbytes in segments.boxes:
                if index == number_of_class:
                    source, target = (int(a[cursor + member]) for a in (segments.source, segments.target))
                    others = tuple(rank for rank in family if rank != target)
                    found[source, box, nbytes, others].append(target)
                cursor += len(analysis.classes[index].members)
    for (source, box, nbytes, others), targets in sorted(found.items()):
        yield _Sending(source, tuple(sorted(targets)), others, box, nbytes)
