"""Cutting what is wanted into segments, each of which some trainer holds whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import PlanError
from ..layout import Box, BoxIndex, coverage_gap, intersect, overlap, split, subtract, volume
from ..weights.manifest import TensorSpec
from .classes import TensorClass


class HeldSegment(NamedTuple):
    """A box inside a wanted box, and the indices of the held boxes that contain it."""

    box: Box
    holders: tuple[int, ...]


@lru_cache(maxsize=65536)
def cut(wanted: tuple[Box, ...], held: tuple[Box, ...], max_elements: int) -> tuple[HeldSegment, ...]:
    """Disjoint segments of the ``wanted`` boxes of at most ``max_elements``, each inside of a held box.

    Small held boxes are cut first, so that a rank that holds more counts as a replica of what others
    hold in part. Parts that nobody holds are left out; :func:`check` reports them.
    """
    by_size = sorted(range(len(held)), key=lambda i: (volume(held[i]), held[i]))
    place = {i: number for number, i in enumerate(by_size)}
    held_index = BoxIndex(held)
    segments: list[HeldSegment] = []
    for box in wanted:
        near = held_index.near(box)
        # What no held box seen so far covers.
        open_boxes = [box]
        for index in sorted(near, key=place.__getitem__):
            rest: list[Box] = []
            for part in open_boxes:
                common = intersect(part, held[index])
                if common is None:
                    rest.append(part)
                    continue
                holders = tuple(i for i in near if intersect(common, held[i]) == common)
                segments.extend(HeldSegment(small, holders) for small in split(common, max_elements))
                rest.extend(subtract(part, held[index]))
            open_boxes = rest
            if not open_boxes:
                break
    return tuple(segments)


def check(tensor_class: TensorClass, specs: Sequence[TensorSpec]) -> None:
    """Check that each wanted byte is written exactly once.

    Raises:
        PlanError: two wanted boxes of a rank share elements, or nobody holds a part of one; names the first
            weight, the rank and the box.
    """
    held = tuple(box for box, _ in tensor_class.held)
    for boxes, ranks in tensor_class.wanted:
        clash, gap = _defects(boxes, held)
        name = specs[int(tensor_class.members[0])].name
        if clash is not None:
            raise PlanError(
                f"two fragments want {clash[0]} and {clash[1]}, which share elements; one storage would be filled from "
                "the other's half. Give each wanted box once, or send this weight over the misc path.",
                stage="plan",
                rank=ranks[0],
                parameter=name,
            )
        if gap is not None:
            raise PlanError(
                f"no trainer rank holds {gap[1]} of the wanted box {gap[0]}; the engine would keep old bytes there. "
                "A shard rule leaves a hole: refuse the weight in the source so that it takes the misc path.",
                stage="plan",
                rank=ranks[0],
                parameter=name,
            )


@lru_cache(maxsize=65536)
def _defects(
    wanted: tuple[Box, ...], held: tuple[Box, ...]
) -> tuple[tuple[Box, Box] | None, tuple[Box, Box] | None]:
    clash = overlap(wanted)
    if clash is not None:
        return (wanted[clash[0]], wanted[clash[1]]), None
    index = BoxIndex(held)
    for box in wanted:
        gap = coverage_gap(box, [held[i] for i in index.near(box)])
        if gap is not None:
            return None, (box, gap)
    return None, None
