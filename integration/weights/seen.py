"""Where two sides see one weight by different axes: the axes by which both see it as boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..layout import Axes, common_axes
from .holdings import HoldingGroup, Holdings
from .manifest import TensorSpec

# Positions of weights that are seen as they are by all, and of those whose axes don't nest.
_AS_IT_IS = -1
_APART = -2


class Seen(NamedTuple):
    """Holdings of all ranks with each weight seen by the same axes.

    Attributes:
        sources: of the trainer ranks.
        destinations: of the engine ranks.
        axes: Hugging Face name \u2192 the common axes, of the weights that some rank sees otherwise than as they are.
    """

    sources: tuple[Holdings, ...]
    destinations: tuple[Holdings, ...]
    axes: dict[str, Axes]


def in_common_axes(
    specs: Sequence[TensorSpec], sources: Sequence[Holdings], destinations: Sequence[Holdings]
) -> Seen:
    """Have all ranks see each weight by the same axes: a trainer's order, and the factors of all.

    A trainer packs what it sends, so that its own order reads memory in rows. Every rank computes the same from the same published
    data. A weight whose factors don't nest is refused on the first rank that sees it by axes, with the reason.
    """
    everyone = (*sources, *destinations)
    kinds: dict[Axes, int] = {}
    for holdings in everyone:
        for group in holdings.groups:
            if group.axes is not None:
                kinds.setdefault(group.axes, len(kinds))
    if not kinds:
        return Seen(tuple(sources), tuple(destinations), {})
    used = np.zeros((len(specs), len(kinds)), dtype=bool)
    for holdings in everyone:
        for group in holdings.groups:
            if group.axes is not None:
                used[group.indices, kinds[group.axes]] = True
    known = list(kinds)
    chosen = np.full(len(specs), _AS_IT_IS, dtype=np.int64)
    positions = np.flatnonzero(used.any(axis=1))
    patterns, pattern_of = np.unique(used[positions], axis=0, return_inverse=True)
    found: list[Axes] = []
    for number, pattern in enumerate(patterns):
        axes = common_axes(known[kind] for kind in np.flatnonzero(pattern).tolist())
        if axes is not None:
            found.append(axes)
        chosen[positions[pattern_of.reshape(-1) == number]] = _APART if axes is None else len(found) - 1
    refusing = _first_that_sees(everyone, chosen)
    converted = tuple(
        replace(
            holdings,
            groups=tuple(part for group in holdings.groups for part in _converted(group, chosen, found)),
            refused=holdings.refused | refusing.get(holdings.rank, {}),
        )
        for holdings in everyone
    )
    axes_of = {specs[i].name: found[chosen[i]] for i in np.flatnonzero(chosen >= 0).tolist()}
    return Seen(converted[: len(sources)], converted[len(sources) :], axes_of)


def _converted(group: HoldingGroup, chosen: np.ndarray, found: Sequence[Axes]) -> list[HoldingGroup]:
    """A group by the axes that were chosen for its weights, which may be several."""
    numbers = chosen[group.indices]
    parts: list[HoldingGroup] = []
    for number in np.unique(numbers).tolist():
        indices = group.indices[numbers == number]
        if number < 0:
            parts.append(replace(group, indices=indices))
            continue
        axes = found[number]
        own = group.axes or Axes.of(axes.full_shape)
        boxes = tuple(piece for box in group.boxes for piece, _ in own.cut(box, axes))
        parts.append(HoldingGroup(boxes, group.dtype, indices, axes))
    return parts


def _first_that_sees(everyone: Sequence[Holdings], chosen: np.ndarray) -> dict[int, dict[str, np.ndarray]]:
    """By rank, the reason to refuse weights whose axes don't nest, with their positions."""
    left = chosen == _APART
    if not left.any():
        return {}
    reason = "its elements lie in another order than on the other side, and no reshape makes boxes of both"
    refusing: dict[int, dict[str, np.ndarray]] = {}
    for holdings in everyone:
        own = np.zeros(len(chosen), dtype=bool)
        for group in holdings.groups:
            if group.axes is not None:
                own[group.indices] = True
        own &= left
        left &= ~own
        if own.any():
            refusing[holdings.rank] = {reason: np.flatnonzero(own)}
    return refusing
