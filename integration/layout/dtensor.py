"""From torch's DTensor to meshes, placements and fragments. Imports ``torch.distributed.tensor`` lazily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .fragments import Fragment
from .mesh import Mesh
from .placements import Placement, Replicate, Shard, StridedShard, boxes_of, local_shape

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The ranks of a ``DeviceMesh``, as its default process group counts them."""
    grid = device_mesh.mesh
    return Mesh(
        tuple(grid.shape),
        tuple(int(r) for r in grid.flatten().tolist()),
        tuple(device_mesh.mesh_dim_names or ()),
    )


def placement_of(placement: object) -> Placement:
    """One of this package's placements from torch's, or the same if it is one already.

    Raises:
        ValueError: ``Partial`` or a placement of another kind: its local values are not parts of the tensor.
    """
    if isinstance(placement, Shard | Replicate | StridedShard):
        return placement
    from torch.distributed.tensor import placement_types as theirs

    if isinstance(placement, theirs._StridedShard):
        return StridedShard(placement.dim, placement.split_factor)
    if isinstance(placement, theirs.Shard):
        return Shard(placement.dim)
    if isinstance(placement, theirs.Replicate):
        return Replicate()
    raise ValueError(
        f"placement {placement} says nothing about which elements a rank holds; redistribute the tensor to "
        "Shard or Replicate first"
    )


def placements_of(placements: Sequence[object]) -> tuple[Placement, ...]:
    """Each of ``placements`` by :func:`placement_of`."""
    return tuple(placement_of(p) for p in placements)


def layout_of(tensor: DTensor) -> tuple[Mesh, tuple[Placement, ...]]:
    """Mesh and placements of a DTensor.

    Raises:
        ValueError: ``Partial`` placements, or shards that are not in the order of the mesh dimensions.
    """
    spec: Any = tensor._spec
    order = spec.shard_order
    if order is not None and order != spec.compute_default_shard_order(spec.placements):
        raise ValueError(
            f"the DTensor's mesh dimensions cut it in the order {order}; only left to right (or _StridedShard) is "
            "known here. Redistribute it to the default order first."
        )
    return mesh_of(tensor.device_mesh), placements_of(tensor.placements)


def local_fragments(
    name: str,
    shape: Sequence[int],
    mesh: Mesh,
    placements: Sequence[Placement],
    rank: int,
    local: torch.Tensor,
) -> list[Fragment]:
    """The fragments that ``rank``'s local tensor holds; none where its shard is empty.

    Args:
        name: of the full tensor.
        shape: of the full tensor.
        mesh: of the ranks that hold it.
        placements: one for each mesh dimension.
        rank: as the mesh counts.
        local: its local tensor, any strides; the fragments are views of it.

    Raises:
        ValueError: the local tensor has not the shape that the placements give it, and either has elements; or ``rank`` is not in
            the mesh.
    """
    expected = local_shape(shape, mesh, placements, rank)
    # FSDP makes (0, 0) of an empty shard of tensor parallelism, where the placements give (1, 0).
    if not local.numel() and 0 in expected:
        return []
    if tuple(local.shape) != expected:
        raise ValueError(
            f"{name}: the local tensor of rank {rank} has shape {tuple(local.shape)}, but placements {placements} "
            f"on a mesh of shape {mesh.shape} give {expected} of {tuple(shape)}; bytes would land in the wrong "
            "place. Give the full shape and the placements that made this tensor."
        )
    return [
        Fragment(name, tuple(shape), box, local[place])
        for box, place in boxes_of(shape, mesh, placements, rank)
    ]


def dtensor_fragments(name: str, tensor: DTensor) -> list[Fragment]:
    """The fragments that this process's part of a DTensor holds; none if it is not in the mesh.

    Raises:
        ValueError: as for :func:`layout_of` and :func:`local_fragments`.
    """
    import torch.distributed as dist

    mesh, placements = layout_of(tensor)
    rank = dist.get_rank()
    if mesh.coordinate(rank) is None:
        return []
    return local_fragments(name, tensor.shape, mesh, placements, rank, tensor.to_local().detach())
