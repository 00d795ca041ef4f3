"""What groups over shared memory have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import Store

from ..exchanges import Parcel
from ..torch_group import Group
from .pairs import Pair

_ALIGNED = 4096


class SharedGroup(Group, ABC):
    """A group in which a broadcast is an exchange between its root and each of the others, and a maximum one of all.

    Attributes:
        most_bucket_bytes: of a bucket, unless told otherwise.
    """

    most_bucket_bytes: int

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        lanes: int = 1,
        bucket_bytes: int | None = None,
    ):
        """As :class:`Group`, but nobody is waited for yet.

        Args:
            store, name, rank, size, timeout_s, watch: as of :class:`Group`.
            device: of the parcels; a CUDA device where buckets are in GPU memory.
            lanes: exchanges that may be under way at the same time.
            bucket_bytes: the same on all ranks; each pair has two for each direction and lane.
        """
        self._configure(rank, size, device, timeout_s, watch, lanes)
        self._store, self._name = store, name
        nbytes = self.most_bucket_bytes if bucket_bytes is None else bucket_bytes
        self._bucket_bytes = -(-nbytes // _ALIGNED) * _ALIGNED
        self._pairs: dict[int, Pair] = {}
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Note that nobody is connected yet."""

    def prepare_broadcast(self, root: int) -> None:
        self.connect(self._others(root) if self.rank == root else [root])

    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        here = self.rank == root
        sends = [Parcel(rank, buffer) for rank in self._others(root)] if here else []
        self.exchange(sends, [] if here else [Parcel(root, buffer)], stage)

    def prepare_maximum(self, row: torch.Tensor) -> None:
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
