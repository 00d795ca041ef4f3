"""The oracle of layouts: tensors whose elements are their own places, split by DTensor's own placements."""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor import Shard as TheirShard
from torch.distributed.tensor.placement_types import _StridedShard

from rlrefit.integration.layout import Mesh, Placement, Shard, StridedShard


def theirs(placement: Placement, dims: int) -> TheirShard | TheirReplicate | _StridedShard:
    """Torch's placement for ours, of a tensor of ``dims`` dimensions."""
    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim % dims, split_factor=placement.split_factor)
    return TheirShard(placement.dim % dims) if isinstance(placement, Shard) else TheirReplicate()


def index_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    """int64 of ``shape``: 0, 1, 2, …"""
    return torch.arange(prod(shape)).reshape(shape)


def split_by_torch(
    whole: torch.Tensor, mesh: Mesh, placements: tuple[Placement, ...], rank: int
) -> torch.Tensor:
    """What DTensor's placements leave of ``whole`` when they split it one after another."""
    left = whole
    for placement, parts, place in zip(placements, mesh.shape, mesh.coordinate(rank) or (), strict=True):
        their = theirs(placement, whole.ndim)
        if not isinstance(their, TheirReplicate):
            left = their._split_tensor(left, parts, with_padding=False)[0][place]
    return left
