"""Meshes of ranks: plain tuples, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid, as DTensor's ``DeviceMesh`` has them.

    Attributes:
        shape: ranks along each mesh dimension.
        ranks: all ranks, row-major. Each stands once.
        dim_names: a name for each mesh dimension, or empty.

    Raises:
        ValueError: the numbers do not fit, a rank stands twice, or is negative.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if prod(self.shape) != len(self.ranks) or not self.ranks:
            raise ValueError(
                f"a mesh of shape {self.shape} has {prod(self.shape)} places, but {len(self.ranks)} ranks are given; "
                "give one rank for each place, and at least one"
            )
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(
                f"mesh ranks {self.ranks} are not distinct numbers from 0; a rank has one place in a mesh"
            )
        if self.dim_names and len(self.dim_names) != len(self.shape):
            raise ValueError(
                f"{len(self.dim_names)} names {self.dim_names} for {len(self.shape)} mesh dimensions"
            )

    @staticmethod
    def of(nested: Sequence[Any], dim_names: Sequence[str] = ()) -> Mesh:
        """A mesh from nested lists of ranks, e.g. ``[[0, 1], [2, 3]]``.

        Raises:
            ValueError: the lists are ragged, or as for the class.
        """
        shape: list[int] = []
        level: list[Any] = list(nested)
        while level and isinstance(level[0], Sequence):
            if len({len(part) if isinstance(part, Sequence) else -1 for part in level}) != 1:
                raise ValueError(f"the lists of mesh {nested} are ragged; a mesh is a full grid")
            shape.append(len(level[0]))
            level = [rank for part in level for rank in part]
        if not all(isinstance(rank, int) for rank in level):
            raise ValueError(f"mesh {nested} is not made of ranks in lists of one depth")
        return Mesh((len(nested), *shape), tuple(level), tuple(dim_names))

    @staticmethod
    def line(ranks: Sequence[int]) -> Mesh:
        """A mesh of one dimension."""
        return Mesh((len(ranks),), tuple(ranks))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Place of ``rank`` along each mesh dimension, or None if it is not in the mesh."""
        index = self._index.get(rank)
        if index is None:
            return None
        place: list[int] = []
        for n in reversed(self.shape):
            index, position = divmod(index, n)
            place.append(position)
        return tuple(reversed(place))

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self.ranks)}
