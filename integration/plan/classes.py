"""Classes of weights: equal in shape and dtype, held alike and wanted alike by every rank.

All experts of one pipeline stage and expert-parallel rank are one class, so the geometry of 45,000
weights on 512 ranks is that of some hundred classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..layout import Box
from ..weights.holdings import Holdings, Positions
from ..weights.manifest import TensorSpec

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class TensorClass:
    """Weights that every rank treats alike.

    Attributes:
        members: ascending positions in the specs.
        shape: of each member.
        itemsize: bytes of an element.
        held: each distinct box that some trainer holds, sorted, with the ranks that hold it, ascending.
        wanted: each distinct tuple of boxes that an engine rank wants, with those ranks, ascending.
    """

    members: Positions
    shape: tuple[int, ...]
    itemsize: int
    held: tuple[tuple[Box, tuple[int, ...]], ...]
    wanted: tuple[tuple[tuple[Box, ...], tuple[int, ...]], ...]


def classify(
    specs: Sequence[TensorSpec],
    sources: Sequence[Holdings],
    destinations: Sequence[Holdings],
    bulk: npt.NDArray[np.bool_],
) -> list[TensorClass]:
    """Sort the weights with ``bulk[i]`` true into classes, ordered by their first members."""
    for salt in range(8):
        found = _classify(specs, sources, destinations, bulk, salt)
        if found is not None:
            return found
    raise RuntimeError("hashes of weights' holdings collide for every salt; this can't happen by chance")


def _classify(
    specs: Sequence[TensorSpec],
    sources: Sequence[Holdings],
    destinations: Sequence[Holdings],
    bulk: npt.NDArray[np.bool_],
    salt: int,
) -> list[TensorClass] | None:
    # A weight's key is a hash of its shape and dtype and of the boxes that each rank holds or wants of it. Weights with equal
    # keys form a class; ``_whole_classes`` notices if two different ones collide.
    positions = np.flatnonzero(bulk)
    if not positions.size:
        return []
    kinds: dict[object, int] = {}
    keys = np.array(
        [kinds.setdefault((s.shape, s.dtype), len(kinds)) for s in specs], dtype=np.uint64
    ) * np.uint64(0x9E3779B97F4A7C15)
    patterns: dict[object, int] = {}
    for holdings in (*sources, *destinations):
        for group in holdings.groups:
            pattern = patterns.setdefault(group.boxes, len(patterns))
            # Added up and not xored: each rank's contribution is unique, so the order can't matter.
            keys[group.indices] += np.uint64(_mix((holdings.rank << 32) + pattern + (salt << 56)))
    _, first, class_of_bulk, sizes = np.unique(
        keys[positions], return_index=True, return_inverse=True, return_counts=True
    )
    class_of = np.full(len(specs), -1, dtype=np.int64)
    class_of[positions] = class_of_bulk
    held: list[dict[Box, list[int]]] = [defaultdict(list) for _ in sizes]
    wanted: list[dict[tuple[Box, ...], list[int]]] = [defaultdict(list) for _ in sizes]
    for holdings in sources:
        for boxes, touched in _whole_classes(holdings, class_of, sizes):
            if touched is None:
                return None
            for index in touched:
                for box in boxes:
                    held[index][box].append(holdings.rank)
    for holdings in destinations:
        for boxes, touched in _whole_classes(holdings, class_of, sizes):
            if touched is None:
                return None
            for index in touched:
                wanted[index][boxes].append(holdings.rank)
    members = np.split(positions[np.argsort(class_of_bulk, kind="stable")], np.cumsum(sizes)[:-1])
    return [
        TensorClass(
            members[index],
            specs[int(positions[first[index]])].shape,
            specs[int(positions[first[index]])].dtype.itemsize,
            tuple((box, tuple(ranks)) for box, ranks in sorted(held[index].items())),
            tuple((boxes, tuple(ranks)) for boxes, ranks in sorted(wanted[index].items())),
        )
        for index in np.argsort(first, kind="stable").tolist()
    ]


def _whole_classes(
    holdings: Holdings, class_of: Positions, sizes: Positions
) -> Iterator[tuple[tuple[Box, ...], list[int] | None]]:
    """Each group's boxes with the classes that it touches; None if it touches a class in part (a hash collision)."""
    for group in holdings.groups:
        classes = class_of[group.indices]
        counts = np.bincount(classes[classes >= 0], minlength=len(sizes))
        touched = np.flatnonzero(counts)
        whole = bool((counts[touched] == sizes[touched]).all())
        yield group.boxes, touched.tolist() if whole else None


def _mix(value: int) -> int:
    """splitmix64's finalizer (Steele, Lea, Flood 2014): a bijection of 64-bit values that scatters them."""
    value = (value * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
