"""Which tensors ``nccl.m2n`` can move, and between which meshes: pure arithmetic.

It takes meshes of at most two dimensions with one sharded axis on each side, even shards, consecutive ranks, and tensors of
one to three dimensions (``nccl_m2n.h``, ``ncclDistTensor_t``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod

import torch

from ...layout import Box, box_of
from ...weights.manifest import dtype_name
from ..whole_tensors import WholeTensor

_MAX_TENSOR_DIMS = 3
# Of the library's tables (reshard_limits.h): shards of the trainer that an engine rank receives from, and engine ranks that a
# trainer rank sends to.
_MOST_SHARDS = 16
_MOST_DESTINATIONS = 64
_DTYPES = frozenset(
    (
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
)


@dataclass(frozen=True)
class MeshSide:
    """One side's mesh and placement.

    Attributes:
        start: first rank; the mesh owns the ``dims[0] * dims[1]`` ranks from there, row by row.
        dims: mesh dimensions.
        shard_axis: which of the two mesh dimensions shards; the other replicates.
        shard_dim: the tensor dimension that it cuts into even parts.
        local_shape: shape on each rank.
    """

    start: int
    dims: tuple[int, int]
    shard_axis: int
    shard_dim: int
    local_shape: tuple[int, ...]

    @property
    def shards(self) -> int:
        """Parts of the tensor."""
        return self.dims[self.shard_axis]

    @property
    def topology(self) -> tuple[object, ...]:
        """Equal for sides that the library's grouped calls can join: all but the shape."""
        return self.start, self.dims, self.shard_axis, self.shard_dim


@dataclass(frozen=True)
class MeshTransfer:
    """A tensor that ``nccl.m2n`` can move, with both sides' meshes."""

    tensor: WholeTensor
    source: MeshSide
    destination: MeshSide

    @property
    def topology(self) -> tuple[object, ...]:
        """Of both sides."""
        return self.source.topology, self.destination.topology

    @property
    def source_bytes(self) -> int:
        """Bytes of the tensor on each trainer rank of the mesh."""
        return prod(self.source.local_shape) * self.tensor.dtype.itemsize

    @property
    def destination_bytes(self) -> int:
        """Bytes of the tensor on each engine rank of the mesh."""
        return prod(self.destination.local_shape) * self.tensor.dtype.itemsize

    @property
    def calls(self) -> int:
        """Calls of CUDA that a rank's reshard takes, about: copies and signals for each rank of the other side."""
        return 4 + 4 * max(prod(self.source.dims), prod(self.destination.dims))


def mesh_transfer(tensor: WholeTensor) -> MeshTransfer | str:
    """How ``nccl.m2n`` moves ``tensor``, or the reason why it can't."""
    if not 1 <= len(tensor.shape) <= _MAX_TENSOR_DIMS:
        return f"it has {len(tensor.shape)} dimensions, nccl.m2n takes 1 to {_MAX_TENSOR_DIMS}"
    if tensor.dtype not in _DTYPES:
        return f"nccl.m2n has no {dtype_name(tensor.dtype)}"
    if not prod(tensor.shape):
        return "it has no elements"
    if set(tensor.sources) & set(tensor.destinations):
        return "a rank is on both sides"
    sides = []
    for who, regions in (("trainer", tensor.sources), ("engine", tensor.destinations)):
        side = _side(tensor.shape, regions)
        if isinstance(side, str):
            return f"{who}: {side}"
        sides.append(side)
    source, destination = sides
    if source.shards > _MOST_SHARDS or prod(destination.dims) > _MOST_DESTINATIONS:
        return (
            f"it goes from {source.shards} shards to {prod(destination.dims)} ranks, and nccl.m2n takes {_MOST_SHARDS} to "
            f"{_MOST_DESTINATIONS}"
        )
    return MeshTransfer(tensor, source, destination)


def smallest_shapes(transfer: MeshTransfer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Local shapes on both sides of the smallest tensor that has the transfer's meshes, of as many dimensions."""
    source, destination = transfer.source, transfer.destination
    whole = [1] * len(transfer.tensor.shape)
    for side in (source, destination):
        whole[side.shard_dim] = lcm(whole[side.shard_dim], side.shards)
    return _local(tuple(whole), source.shard_dim, source.shards), _local(
        tuple(whole), destination.shard_dim, destination.shards
    )


def _side(shape: tuple[int, ...], regions: Mapping[int, tuple[Box, ...]]) -> MeshSide | str:
    ranks = sorted(regions)
    count = len(ranks)
    if not ranks:
        return "no rank holds it"
    if ranks != list(range(ranks[0], ranks[0] + count)):
        return "its ranks do not follow each other"
    if any(len(held) != 1 for held in regions.values()):
        return "a rank holds several regions of it"
    boxes = [regions[rank][0] for rank in ranks]
    if all(box == box_of(shape) for box in boxes):
        # All replicate: put as a sharding axis of size 1.
        return MeshSide(ranks[0], (count, 1), 1, 0, shape)
    for dim, size in enumerate(shape):
        for shards in range(2, count + 1):
            if count % shards or size % shards:
                continue
            replicas = count // shards
            if boxes == [_shard(shape, dim, shards, i % shards) for i in range(count)]:
                return MeshSide(ranks[0], (replicas, shards), 1, dim, _local(shape, dim, shards))
            if boxes == [_shard(shape, dim, shards, i // replicas) for i in range(count)]:
                return MeshSide(ranks[0], (shards, replicas), 0, dim, _local(shape, dim, shards))
    return "no mesh of two dimensions with one even sharded axis describes it"


def _local(shape: tuple[int, ...], dim: int, shards: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // shards, *shape[dim + 1 :])


def _shard(shape: tuple[int, ...], dim: int, shards: int, index: int) -> Box:
    step = shape[dim] // shards
    full = box_of(shape)
    return (*full[:dim], (index * step, (index + 1) * step), *full[dim + 1 :])
