"""Strided views as boxes: which rectangular part of a tensor a view holds, by arithmetic on strides alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .....integration.layout import Box


@dataclass(frozen=True)
class ViewBox:
    """A view of a base tensor that holds exactly one box of it.

    Attributes:
        box: the part of the base tensor, in the base's coordinates.
        axes: for each dimension of the base, the dimension of the view that runs along it, or None
            where the box has extent 1 there and the view has no dimension of its own for it.
    """

    box: Box
    axes: tuple[int | None, ...]


def view_box(
    base_shape: Sequence[int],
    base_stride: Sequence[int],
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> ViewBox | None:
    """The box of a base tensor that a view (``offset`` elements in, ``shape``, ``stride``) holds.

    None if the view is no rectangular part of the base with its dimensions in some order: a step
    other than 1, merged or split dimensions, a broadcast, or a base whose own elements overlap.
    Exact because the base's strides are nested (each covers all smaller ones), so an offset and a
    stride can be read in one way only.
    """
    axes_by_stride = sorted((d for d, n in enumerate(base_shape) if n > 1), key=lambda d: -base_stride[d])
    reach = 1
    for d in reversed(axes_by_stride):
        if base_stride[d] < reach:
            return None
        reach = base_stride[d] * base_shape[d]
    start = [0] * len(base_shape)
    for d in axes_by_stride:
        start[d], offset = divmod(offset, base_stride[d])
        if start[d] >= base_shape[d]:
            return None
    if offset:
        return None
    axes: list[int | None] = [None] * len(base_shape)
    extent = [1] * len(base_shape)
    for v, n in enumerate(shape):
        if n == 1:
            continue
        d = next((d for d in axes_by_stride if base_stride[d] == stride[v]), None)
        if n < 1 or d is None or axes[d] is not None or start[d] + n > base_shape[d]:
            return None
        axes[d], extent[d] = v, n
    box = tuple((s, s + n) for s, n in zip(start, extent, strict=True))
    return ViewBox(box, tuple(axes))
