"""Rows of the segment tables that the kernels walk: pairs of strided memory, as few and wide as they can be.

A pair of views is collapsed over dimensions that lie without gaps on both sides, to *outer × rows ×
run*, where a run has no gap on either side; views of more dimensions are split. Each row is then read
and written in the widest unit that all its addresses, strides and runs are multiples of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .strided import Strided

# Bytes of the widest access of a thread.
WIDEST = 16
# A row's bytes stay below this, so that indices inside it fit into 32 bits in any unit.
_LARGEST_ROW = 1 << 30
# Columns of a row, int64: see ``Table.rows``.
COLUMNS = 11

Ints = npt.NDArray[np.int64]


class _Piece(NamedTuple):
    """A part of a pair of views: byte offsets, then counts and byte strides (a: first view, b: second)."""

    offset_a: int
    offset_b: int
    outer: int
    rows: int
    run: int  # in bytes
    outer_a: int
    row_a: int
    outer_b: int
    row_b: int


class Table(NamedTuple):
    """Rows of one unit width and nesting.

    Attributes:
        unit: bytes that one lane group of the kernel moves at a time: 16, 8, 4, 2 or 1.
        nested: whether any row has an outer dimension.
        rows: int64 ``[n, COLUMNS]``: address a, address b, number of units, units of a run, rows, outer and
            row stride of a, of b (in units), first tile, slot.
        tiles: int32 ``[t]``: the row that each tile belongs to.
        nbytes: bytes that the rows hold.
    """

    unit: int
    nested: bool
    rows: Ints
    tiles: npt.NDArray[np.int32]
    nbytes: int


def build_tables(pairs: Iterable[tuple[Strided, Strided, int]], tile_units: int) -> list[Table]:
    """Tables for (view a, view b, slot) triples, one for each unit width and nesting that occurs.

    Args:
        pairs: memory of equal shape and item size; ``slot`` is carried along for the kernel.
        tile_units: units that one program of the kernel handles.

    Raises:
        ValueError: two views of different shapes or item sizes.
    """
    rows: dict[tuple[int, bool], list[tuple[int, ...]]] = defaultdict(list)
    sizes: dict[tuple[int, bool], int] = defaultdict(int)
    for a, b, slot in pairs:
        if a.shape != b.shape or a.itemsize != b.itemsize:
            raise ValueError(
                f"memory of shape {a.shape} and item size {a.itemsize} can't be paired with {b.shape} and "
                f"{b.itemsize}; bytes would land in the wrong place"
            )
        for piece in _pieces(a.shape, a.strides, b.strides, a.itemsize):
            at_a, at_b = a.address + piece.offset_a, b.address + piece.offset_b
            bits = (
                at_a | at_b | piece.run | piece.outer_a | piece.row_a | piece.outer_b | piece.row_b | WIDEST
            )
            unit = bits & -bits
            run = piece.run // unit
            key = unit, piece.outer > 1
            rows[key].append(
                (
                    at_a,
                    at_b,
                    piece.outer * piece.rows * run,
                    run,
                    piece.rows,
                    piece.outer_a // unit,
                    piece.row_a // unit,
                    piece.outer_b // unit,
                    piece.row_b // unit,
                    0,
                    slot,
                )
            )
            sizes[key] += piece.outer * piece.rows * piece.run
    return [
        _table(unit, nested, found, tile_units, sizes[unit, nested])
        for (unit, nested), found in sorted(rows.items(), reverse=True)
    ]


def _table(unit: int, nested: bool, found: list[tuple[int, ...]], tile_units: int, nbytes: int) -> Table:
    rows = np.array(found, dtype=np.int64)
    counts = -(-rows[:, 2] // tile_units)
    rows[:, 9] = np.cumsum(counts) - counts
    return Table(unit, nested, rows, np.repeat(np.arange(len(rows), dtype=np.int32), counts), nbytes)


@lru_cache(maxsize=4096)
def _pieces(
    shape: tuple[int, ...], strides_a: tuple[int, ...], strides_b: tuple[int, ...], itemsize: int
) -> tuple[_Piece, ...]:
    """The pieces of a pair of views, relative to their addresses. Most pairs of a model share their geometry."""
    # Dimensions from the innermost out, as [count, stride a, stride b], merged where neither side has a gap.
    dims = [[itemsize, 1, 1]]
    for n, a, b in zip(reversed(shape), reversed(strides_a), reversed(strides_b), strict=True):
        if n == 0:
            return ()
        count, inner_a, inner_b = dims[-1]
        if n == 1:
            continue
        if a == count * inner_a and b == count * inner_b:
            dims[-1][0] *= n
        else:
            dims.append([n, a, b])
    return tuple(_split(dims, 0, 0))


def _split(dims: list[list[int]], offset_a: int, offset_b: int) -> Iterable[_Piece]:
    """Pieces of at most three dimensions and ``_LARGEST_ROW`` bytes."""
    total = 1
    for n, _, _ in dims:
        total *= n
    if len(dims) > 3 or total >= _LARGEST_ROW:
        n, a, b = dims[-1]
        # Whole steps of the outermost dimension; halves of it are enough where only the size is too large.
        step = 1 if len(dims) > 3 else -(-n // 2)
        if len(dims) == 1:
            step = -(-step // WIDEST) * WIDEST
        for start in range(0, n, step):
            inner = [*dims[:-1], [min(step, n - start), a, b]]
            if inner[-1][0] == 1 and len(inner) > 1:
                inner.pop()
            yield from _split(inner, offset_a + start * a, offset_b + start * b)
        return
    run = dims[0][0]
    rows, row_a, row_b = dims[1] if len(dims) > 1 else (1, 0, 0)
    outer, outer_a, outer_b = dims[2] if len(dims) > 2 else (1, 0, 0)
    yield _Piece(offset_a, offset_b, outer, rows, run, outer_a, row_a, outer_b, row_b)
