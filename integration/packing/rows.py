"""Rows of the tables that the kernels walk: pairs of strided memory, as few and wide as they can be.

A pair of views is collapsed over dimensions that lie without gaps on both sides, to *outer × rows ×
run*, where a run has no gap on either side; views of more dimensions are split. Each row is then read
and written in the widest unit that all its addresses, strides and runs are multiples of.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .strided import Strided

# Bytes of the widest access of a thread.
WIDEST = 16
# A row's bytes stay below this, so that indices inside it fit into 32 bits in any unit.
_LARGEST_ROW = (1 << 30) - WIDEST
# Columns of a row, int64: see ``Table.rows``.
COLUMNS = 11

Ints = npt.NDArray[np.int64]
# Of a pair of collapsed memory, in the order of the columns of ``collapse``: all that must be multiples of a unit.
_ALIGNED = (0, 1, 4, 5, 6, 7, 8)


class _RowGeometry(NamedTuple):
    """A row of a pair of views: byte offsets, then counts and byte strides (a: first view, b: second)."""

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


def collapse(pairs: Iterable[tuple[Strided, Strided, int]], most: int = _LARGEST_ROW) -> Ints:
    """Pairs of views as rows, in their order.

    A model's refit has tens of thousands of rows of few geometries: each geometry is worked out once, and what is done
    for each row is done for all of them together.

    Args:
        pairs: (view a, view b, slot); memory of equal shape and item size, and a number that is carried along.
        most: bytes of a row; one element or 16 bytes may have more.

    Returns:
        int64 ``[n, 10]``: address a, address b, then outer count, rows, bytes of a run, outer and row stride of a, of b
        in bytes, and the slot.

    Raises:
        ValueError: two views of different shapes or item sizes.
    """
    geometries: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int], int] = {}
    found: list[tuple[int, int, int, int]] = []
    for a, b, slot in pairs:
        if a.shape != b.shape or a.itemsize != b.itemsize:
            raise ValueError(
                f"memory of shape {a.shape} and item size {a.itemsize} can't be paired with {b.shape} and "
                f"{b.itemsize}; bytes would land in the wrong place"
            )
        key = (a.shape, a.strides, b.strides, a.itemsize)
        found.append((geometries.setdefault(key, len(geometries)), a.address, b.address, slot))
    if not found:
        return np.empty((0, 10), dtype=np.int64)
    relative = [_row_geometries(*key, min(most, _LARGEST_ROW)) for key in geometries]
    kind, address_a, address_b, slots = np.array(found, dtype=np.int64).T
    sizes = np.array([len(held) for held in relative], dtype=np.int64)
    counts = sizes[kind]
    pair = np.repeat(np.arange(len(found)), counts)
    # Of each row its place among those of its pair, and from there among the rows of all geometries.
    inside = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.empty((len(pair), 10), dtype=np.int64)
    rows[:, :9] = np.concatenate(relative)[(np.cumsum(sizes) - sizes)[kind[pair]] + inside]
    rows[:, 0] += address_a[pair]
    rows[:, 1] += address_b[pair]
    rows[:, 9] = slots[pair]
    return rows


def row_bytes(rows: Ints) -> Ints:
    """Bytes that each row of :func:`collapse` holds, int64 ``[n]``."""
    held: Ints = rows[:, 2] * rows[:, 3] * rows[:, 4]
    return held


def build_tables(rows: Ints, tile_units: int) -> list[Table]:
    """Tables for rows of :func:`collapse`, one for each unit width and nesting that occurs; each keeps their order.

    Args:
        rows: int64 ``[n, 10]``.
        tile_units: units that one program of the kernel handles.
    """
    bits = np.bitwise_or.reduce(rows[:, _ALIGNED], axis=1) | WIDEST
    kinds = (bits & -bits) * 2 + (rows[:, 2] > 1)
    return [
        _table(kind // 2, bool(kind % 2), rows[kinds == kind], tile_units)
        for kind in np.unique(kinds)[::-1].tolist()
    ]


def _table(unit: int, nested: bool, rows: Ints, tile_units: int) -> Table:
    found = np.empty((len(rows), COLUMNS), dtype=np.int64)
    nbytes = row_bytes(rows)
    found[:, :2] = rows[:, :2]
    found[:, 2] = nbytes // unit
    found[:, 3] = rows[:, 4] // unit
    found[:, 4] = rows[:, 3]
    found[:, 5:9] = rows[:, 5:9] // unit
    counts = -(-found[:, 2] // tile_units)
    found[:, 9] = np.cumsum(counts) - counts
    found[:, 10] = rows[:, 9]
    tiles = np.repeat(np.arange(len(found), dtype=np.int32), counts)
    return Table(unit, nested, found, tiles, int(nbytes.sum()))


@lru_cache(maxsize=4096)
def _row_geometries(
    shape: tuple[int, ...], strides_a: tuple[int, ...], strides_b: tuple[int, ...], itemsize: int, most: int
) -> Ints:
    """The rows of a pair of views, relative to their addresses: int64 ``[n, 9]``."""
    # Dimensions from the innermost out, as [count, stride a, stride b], merged where neither side has a gap.
    dims = [[itemsize, 1, 1]]
    for n, a, b in zip(reversed(shape), reversed(strides_a), reversed(strides_b), strict=True):
        if n == 0:
            return np.empty((0, 9), dtype=np.int64)
        count, inner_a, inner_b = dims[-1]
        if n == 1:
            continue
        if a == count * inner_a and b == count * inner_b:
            dims[-1][0] *= n
        else:
            dims.append([n, a, b])
    return np.array(list(_split(dims, 0, 0, most)), dtype=np.int64)


def _split(dims: list[list[int]], offset_a: int, offset_b: int, most: int) -> Iterable[_RowGeometry]:
    """Rows of at most three dimensions and ``most`` bytes."""
    total = prod(n for n, _, _ in dims)
    if len(dims) > 3 or (total > most and (len(dims) > 1 or total > WIDEST)):
        n, a, b = dims[-1]
        # Whole steps of the outermost dimension; equal ones are enough where only the size is too large.
        step = 1 if len(dims) > 3 else -(-n // -(-total // most))
        if len(dims) == 1:
            step = -(-step // WIDEST) * WIDEST
        for start in range(0, n, step):
            inner = [*dims[:-1], [min(step, n - start), a, b]]
            if inner[-1][0] == 1 and len(inner) > 1:
                inner.pop()
            yield from _split(inner, offset_a + start * a, offset_b + start * b, most)
        return
    run = dims[0][0]
    rows, row_a, row_b = dims[1] if len(dims) > 1 else (1, 0, 0)
    outer, outer_a, outer_b = dims[2] if len(dims) > 2 else (1, 0, 0)
    yield _RowGeometry(offset_a, offset_b, outer, rows, run, outer_a, row_a, outer_b, row_b)
