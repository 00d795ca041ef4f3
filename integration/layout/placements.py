"""Which part of a tensor each rank of a mesh holds: DTensor's placements as arithmetic on boxes.

A placement stands for each mesh dimension; they are applied from the first mesh dimension to the last,
each to what the ones before it have left. Splitting is that of ``torch.chunk``: parts of
``ceil(n / parts)``, the last of them short or empty. No torch and no communication is needed here;
:mod:`.dtensor` converts from torch's own types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from .boxes import Box
from .mesh import Mesh

Run = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """The mesh dimension cuts tensor dimension ``dim``; negative ones count from the last."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Every rank along the mesh dimension holds the same."""


@dataclass(frozen=True)
class StridedShard:
    """DTensor's ``_StridedShard``: what FSDP2 over tensor parallelism leaves on one tensor dimension.

    The dimension is cut into ``split_factor`` pieces first (those of a mesh dimension further right), then
    each piece along this mesh dimension; a rank holds its part of every piece, one after another.
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise ValueError(
                f"a strided shard over {self.split_factor} pieces; the split factor is at least 1"
            )


Placement = Shard | Replicate | StridedShard


def chunk(length: int, parts: int, index: int) -> Run:
    """The range of part ``index`` when ``torch.chunk`` cuts ``length`` elements into ``parts``; may be empty."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(start + size, length)


def _runs_of(
    shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], rank: int
) -> list[list[Run]] | None:
    """For each tensor dimension the global ranges that ``rank`` holds, ascending and in the order of its
    local tensor; None if it is not in the mesh.

    Raises:
        ValueError: not one placement for each mesh dimension, or a tensor dimension that does not exist.
    """
    cuts = _checked(shape, mesh, placements)
    coordinate = mesh.coordinate(rank)
    if coordinate is None:
        return None
    runs = [[(0, int(n))] for n in shape]
    for placement, dim, parts, index in zip(placements, cuts, mesh.shape, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        length = _length(runs[dim])
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        kept: list[Run] = []
        for piece in range(factor):
            start, stop = chunk(length, factor, piece)
            lo, hi = chunk(stop - start, parts, index)
            kept += _part(runs[dim], start + lo, start + hi)
        runs[dim] = _merged(kept)
    return runs


def local_shape(
    shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], rank: int
) -> tuple[int, ...]:
    """Shape of the local tensor of ``rank``; a dimension of 0 where its shard is empty.

    Raises:
        ValueError: ``rank`` is not in the mesh, or as for :func:`_runs_of`.
    """
    runs = _runs_of(shape, mesh, placements, rank)
    if runs is None:
        raise ValueError(f"rank {rank} is not in the mesh of ranks {mesh.ranks}; it has no local tensor")
    return tuple(_length(r) for r in runs)


def boxes_of(
    shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], rank: int
) -> list[tuple[Box, tuple[slice, ...]]]:
    """What ``rank`` holds: boxes of the full tensor, and where each lies in its local tensor.

    The boxes are disjoint and not empty. A plain shard is one box, a strided one several; a rank with an
    empty shard, or one that is not in the mesh, has none.

    Args:
        shape: of the full tensor.
        mesh: of the ranks that hold it.
        placements: one for each mesh dimension.
        rank: as the mesh counts.

    Raises:
        ValueError: as for :func:`_runs_of`.
    """
    runs = _runs_of(shape, mesh, placements, rank)
    if runs is None:
        return []
    sides: list[list[tuple[Run, slice]]] = []
    for ranges in runs:
        cursor = 0
        side: list[tuple[Run, slice]] = []
        for start, stop in ranges:
            side.append(((start, stop), slice(cursor, cursor + stop - start)))
            cursor += stop - start
        sides.append([part for part in side if part[0][0] < part[0][1]])
    return [(tuple(r for r, _ in cell), tuple(s for _, s in cell)) for cell in product(*sides)]


def _checked(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> list[int]:
    """The tensor dimension of each placement, counted from 0; -1 for a replica."""
    if len(placements) != len(mesh.shape):
        raise ValueError(
            f"{len(placements)} placements for a mesh of {len(mesh.shape)} dimensions; give one for each, "
            "Replicate() where it cuts nothing"
        )
    dims: list[int] = []
    for placement in placements:
        if isinstance(placement, Replicate):
            dims.append(-1)
            continue
        if not -len(shape) <= placement.dim < len(shape):
            raise ValueError(
                f"{placement} cuts a dimension that a tensor of shape {tuple(shape)} does not have"
            )
        dims.append(placement.dim % len(shape))
    return dims


def _length(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _part(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Local elements ``start`` to ``stop`` of what ``runs`` hold, as global ranges."""
    found: list[Run] = []
    cursor = 0
    for lo, hi in runs:
        a, b = max(start, cursor), min(stop, cursor + hi - lo)
        if a < b:
            found.append((lo + a - cursor, lo + b - cursor))
        cursor += hi - lo
    return found


def _merged(runs: Sequence[Run]) -> list[Run]:
    """The same ranges with neighbours joined."""
    joined: list[Run] = []
    for lo, hi in runs:
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return joined
