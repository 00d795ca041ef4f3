"""Half-open boxes of one tensor.

A box is a range per dimension of one Hugging Face tensor, written ``((start, stop), …)``. All of a
refit's geometry is arithmetic on boxes: what a rank holds, what a rank wants, and the intersections
that travel. Plain tuples keep them hashable, comparable and cheap to send as JSON.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product

Box = tuple[tuple[int, int], ...]


def box_of(shape: Sequence[int]) -> Box:
    """The box that covers a whole tensor of ``shape``."""
    return tuple((0, int(n)) for n in shape)


def volume(box: Box) -> int:
    """Number of elements in ``box``; 1 for the box of a scalar (no dimensions), 0 if any range is empty."""
    elements = 1
    for start, stop in box:
        if start >= stop:
            return 0
        elements *= stop - start
    return elements


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of the same tensor, or None where they share no element.

    Raises:
        ValueError: the boxes have different numbers of dimensions, so they cannot be of one tensor.
    """
    if len(a) != len(b):
        raise ValueError(
            f"boxes {a} and {b} have {len(a)} and {len(b)} dimensions; they are not of one tensor"
        )
    common = tuple((max(x0, y0), min(x1, y1)) for (x0, x1), (y0, y1) in zip(a, b, strict=True))
    if any(start >= stop for start, stop in common):
        return None
    return common


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that together hold the elements of ``a`` that are not in ``b``."""
    common = intersect(a, b)
    if common is None:
        return [a]
    pieces: list[Box] = []
    rest = list(a)
    for dim, (start, stop) in enumerate(common):
        lo, hi = rest[dim]
        if lo < start:
            pieces.append((*rest[:dim], (lo, start), *rest[dim + 1 :]))
        if stop < hi:
            pieces.append((*rest[:dim], (stop, hi), *rest[dim + 1 :]))
        rest[dim] = (start, stop)
    return pieces


def subtract_all(a: Box, others: Iterable[Box]) -> list[Box]:
    """Disjoint boxes that together hold the elements of ``a`` that are in none of ``others``."""
    rest = [a]
    for other in others:
        rest = [piece for part in rest for piece in subtract(part, other)]
    return rest


def split(box: Box, max_elements: int) -> list[Box]:
    """Cut ``box`` into boxes of at most ``max_elements``, along the outermost dimensions that need it.

    Raises:
        ValueError: ``max_elements`` is below 1.
    """
    if max_elements < 1:
        raise ValueError(f"cannot cut a box into pieces of {max_elements} elements; give at least 1")
    total = volume(box)
    if total <= max_elements:
        return [box] if total else []
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, max_elements * (stop - start) // total)
    pieces: list[Box] = []
    for lo in range(start, stop, rows):
        piece = (*box[:dim], (lo, min(lo + rows, stop)), *box[dim + 1 :])
        pieces.extend(split(piece, max_elements))
    return pieces


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of the first two boxes that share an element, or None if all are disjoint."""
    order = sorted((i for i in range(len(boxes)) if volume(boxes[i])), key=lambda i: boxes[i])
    for position, i in enumerate(order):
        for j in order[position + 1 :]:
            if boxes[i] and boxes[j][0][0] >= boxes[i][0][1]:
                break  # sorted by the first dimension: nothing later can reach box i
            if intersect(boxes[i], boxes[j]) is not None:
                return i, j
    return None


class BoxIndex:
    """Finds those of many boxes that a box may meet, by their first dimension: experts of one tensor are hundreds of boxes.

    Args:
        boxes: of one tensor, in any order; they may overlap.
    """

    def __init__(self, boxes: Sequence[Box]):
        self._boxes = boxes
        self._order = sorted(range(len(boxes)), key=lambda i: boxes[i][:1])
        first = [boxes[i][0] for i in self._order if boxes[i]]
        self._starts = [start for start, _ in first]
        # How far those up to each place reach.
        self._reach = list(accumulate((stop for _, stop in first), max))

    def near(self, box: Box) -> list[int]:
        """Indices of the boxes whose range of the first dimension meets that of ``box``, ascending; of scalars, all."""
        if not box:
            return list(range(len(self._boxes)))
        start, stop = box[0]
        found = self._order[bisect_right(self._reach, start) : bisect_left(self._starts, stop)]
        return sorted(i for i in found if self._boxes[i][0][1] > start)


def coverage_gap(target: Box, pieces: Iterable[Box]) -> Box | None:
    """A part of ``target`` that no piece covers, or None if the pieces cover it whole.

    The pieces may overlap and may reach beyond the target. Works on the grid that their edges
    make, so its cost grows with the number of distinct edges and not with the tensor's size.
    """
    clipped = [c for c in (intersect(target, p) for p in pieces) if c is not None]
    if volume(target) == 0 or target in clipped:
        return None
    edges = [sorted({lo, hi} | {e for c in clipped for e in c[dim]}) for dim, (lo, hi) in enumerate(target)]
    if not edges:
        return None if clipped else target
    for cell in product(*(list(pairwise(e)) for e in edges)):
        if not any(intersect(cell, c) == cell for c in clipped):
            return cell
    return None
