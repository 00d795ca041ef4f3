"""What groups over shared memory have in common."""

from __future__ import annotations

import torch

from ..exchanges import Parcel
from ..process_groups import Group


class SharedGroup(Group):
    """A group in which a broadcast is an exchange between its root and each of the others, and a maximum one of all."""

    def prepare_broadcast(self, root: int) -> None:
        self.connect(self._others(root) if self.rank == root else [root])

    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        here = self.rank == root
        sends = [Parcel(rank, buffer) for rank in self._others(root)] if here else []
        self.exchange(sends, [] if here else [Parcel(root, buffer)], stage)

    def prepare_maximum(self) -> None:
        self.connect(self._others(self.rank))

    def maximum(self, row: torch.Tensor, stage: str) -> None:
        theirs = {rank: torch.empty_like(row) for rank in self._others(self.rank)}
        self.exchange(
            [Parcel(rank, row) for rank in theirs], [Parcel(rank, one) for rank, one in theirs.items()], stage
        )
        for one in theirs.values():
            torch.maximum(row, one, out=row)

    def _others(self, root: int) -> list[int]:
        return [rank for rank in range(self.size) if rank != root]
