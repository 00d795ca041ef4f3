"""Axes: a tensor seen with its dimensions split and in another order.

Trainers and engines keep some weights in an order of elements that no box of the tensor describes: gate and up columns that
alternate, experts that lie transposed, tiles of a kernel. Nearly always it is a reshape and a transpose. Seen that way the
elements are boxes again, of more dimensions. Two sides that see one tensor in two ways meet in the factors of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import TYPE_CHECKING

from .boxes import Box, volume

if TYPE_CHECKING:
    import torch

# A part of a box, and its index in what holds the box.
_Piece = tuple[Box, tuple[slice, ...]]


@dataclass(frozen=True)
class Axes:
    """A reshape that splits dimensions, and a transpose of what it gives.

    A tensor ``[E, H, 2N]`` of splits ``((E,), (H,), (N, 2))`` and order ``(0, 2, 3, 1)`` is seen as ``[E, N, 2, H]``, whose element
    ``[e, n, g, h]`` is the tensor's ``[e, h, 2n + g]``.

    Attributes:
        splits: for each dimension of the tensor its factors, the slowest first; a dimension of less than 2 has itself alone.
        order: the seen dimensions, as numbers of all factors, counted through all dimensions.

    Raises:
        ValueError: a factor below 2 beside others, or an order that does not have each factor once.
    """

    splits: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not factors or (len(factors) > 1 and min(factors) < 2) for factors in self.splits):
            raise ValueError(
                f"dimensions split into {self.splits}; a dimension has one factor, or several of at least 2"
            )
        if sorted(self.order) != list(range(sum(map(len, self.splits)))):
            raise ValueError(f"order {self.order} does not name each factor of {self.splits} once")

    @staticmethod
    def of(shape: Sequence[int]) -> Axes:
        """A tensor as it is."""
        return Axes(tuple((int(n),) for n in shape), tuple(range(len(shape))))

    @cached_property
    def full_shape(self) -> tuple[int, ...]:
        """Of the tensor itself."""
        return tuple(map(prod, self.splits))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """As the tensor is seen."""
        return tuple(self._factors[i] for i in self.order)

    @property
    def plain(self) -> bool:
        """Whether the tensor is seen as it is."""
        return self == Axes.of(self.full_shape)

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor ``[*full_shape]`` as a view ``[*shape]``."""
        return _split(tensor, self.splits).permute(self.order)

    def bounds(self, box: Box) -> Box:
        """The smallest box of the tensor itself that has all elements of a seen ``box``, which is not empty."""
        ranges = dict(zip(self.order, box, strict=True))
        found: list[tuple[int, int]] = []
        first = 0
        for factors in self.splits:
            low = high = 0
            for i, n in enumerate(factors, first):
                low, high = low * n + ranges[i][0], high * n + ranges[i][1] - 1
            found.append((low, high + 1))
            first += len(factors)
        return tuple(found)

    def common(self, other: Axes) -> Axes | None:
        """The same order with the factors of both; None if those of some dimension don't nest."""
        splits: list[tuple[int, ...]] = []
        for own, others in zip(self.splits, other.splits, strict=True):
            joined = _joined(own, others)
            if joined is None:
                return None
            splits.append(joined)
        places = _refined(self.splits, tuple(splits))
        return Axes(tuple(splits), tuple(i for factor in self.order for i in places[factor]))

    def cut(self, box: Box, finer: Axes) -> tuple[_Piece, ...]:
        """A seen ``box`` as boxes of ``finer`` axes, which have factors of these and any order.

        Returns:
            Disjoint boxes that together have its elements, none of them empty, each with its index in what holds ``box``. There
            is one, unless the box cuts a factor.
        """
        return _cut(self, box, finer)

    def recast(self, view: torch.Tensor, finer: Axes) -> torch.Tensor:
        """What holds a box that :meth:`cut` gave, still seen by these axes, seen by ``finer`` ones.

        Args:
            view: of the piece; any strides.
            finer: as of :meth:`cut`.
        """
        places = _refined(self.splits, finer.splits)
        shapes: list[tuple[int, ...]] = []
        for factor, extent in zip(self.order, view.shape, strict=True):
            shapes.append(_extents(int(extent), [finer._factors[i] for i in places[factor]]))
        flat = [i for factor in self.order for i in places[factor]]
        return _split(view, shapes).permute([flat.index(i) for i in finer.order])

    @cached_property
    def _factors(self) -> tuple[int, ...]:
        return tuple(n for factors in self.splits for n in factors)


def common_axes(seen: Iterable[Axes]) -> Axes | None:
    """Axes that have the factors of all, in the order of the first; None if they don't nest."""
    found: Axes | None = None
    for axes in seen:
        found = axes if found is None else found.common(axes)
        if found is None:
            return None
    return found


@lru_cache(maxsize=4096)
def _cut(axes: Axes, box: Box, finer: Axes) -> tuple[_Piece, ...]:
    if not volume(box):
        return ()
    places = _refined(axes.splits, finer.splits)
    sides: list[list[tuple[Box, slice]]] = []
    for factor, (start, stop) in zip(axes.order, box, strict=True):
        factors = tuple(finer._factors[i] for i in places[factor])
        side: list[tuple[Box, slice]] = []
        cursor = 0
        for ranges in _ranges(start, stop, factors):
            count = prod(b - a for a, b in ranges)
            side.append((ranges, slice(cursor, cursor + count)))
            cursor += count
        sides.append(side)
    flat = [i for factor in axes.order for i in places[factor]]
    where = [flat.index(i) for i in finer.order]
    pieces: list[_Piece] = []
    for cell in product(*sides):
        digits = [r for part, _ in cell for r in part]
        pieces.append((tuple(digits[i] for i in where), tuple(index for _, index in cell)))
    return tuple(pieces)


def _ranges(start: int, stop: int, factors: tuple[int, ...]) -> Iterator[Box]:
    """Numbers ``start`` to ``stop``, in order, as boxes of their digits of ``factors``."""
    if len(factors) == 1:
        yield ((start, stop),)
        return
    rest = factors[1:]
    size = prod(rest)
    head, tail = -(-start // size), stop // size
    if head > tail:  # inside of one step
        yield from (((tail, head), *r) for r in _ranges(start - tail * size, stop - tail * size, rest))
        return
    if start < head * size:
        yield from (((head - 1, head), *r) for r in _ranges(start - (head - 1) * size, size, rest))
    if head < tail:
        yield ((head, tail), *((0, n) for n in rest))
    if tail * size < stop:
        yield from (((tail, tail + 1), *r) for r in _ranges(0, stop - tail * size, rest))


def _extents(count: int, factors: Sequence[int]) -> tuple[int, ...]:
    """The extents of a box of digits that has ``count`` numbers in a row: whole from some digit on, and one before it."""
    found: list[int] = []
    for n in reversed(factors[1:]):
        found.append(min(count, n))
        count //= found[-1]
    return (count, *reversed(found))


def _joined(own: Sequence[int], others: Sequence[int]) -> tuple[int, ...] | None:
    """The factors of both; None where a step of one is no multiple of a smaller one."""
    if own == others:
        return tuple(own)
    steps = sorted(
        {1, *(step for factors in (own, others) for step in accumulate(reversed(factors), int.__mul__))}
    )
    if any(larger % smaller for smaller, larger in pairwise(steps)):
        return None
    return tuple(larger // smaller for smaller, larger in reversed(list(pairwise(steps))))


@lru_cache(maxsize=1024)
def _refined(
    coarse: tuple[tuple[int, ...], ...], fine: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """For each factor of ``coarse`` the numbers of those of ``fine`` that make it."""
    found: list[tuple[int, ...]] = []
    number = 0
    for factors, finer in zip(coarse, fine, strict=True):
        left = list(enumerate(finer, number))
        number += len(finer)
        for factor in factors:
            taken = [left.pop(0)]
            while prod(n for _, n in taken) < factor:
                taken.append(left.pop(0))
            found.append(tuple(i for i, _ in taken))
    return tuple(found)


def _split(tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Each dimension as several, which is always a view."""
    for dim in reversed(range(len(shapes))):
        if len(shapes[dim]) > 1:
            tensor = tensor.unflatten(dim, list(shapes[dim]))
    return tensor
