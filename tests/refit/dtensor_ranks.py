"""What ranks of a process group do in the tests of xferdtensor over DTensors; run in processes of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from rlrefit.integration.xferdtensor import xferdtensor

SHAPE = (13, 6)
LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Replicate(), Shard(1))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((4,), (Replicate(),)),
]


def weight(version: int) -> torch.Tensor:
    """The whole tensor at a version."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(version)).to(torch.bfloat16)


def empty_like(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    """A DTensor of the same layout, full of NaN."""
    return distribute_tensor(torch.full_like(whole, float("nan")), mesh, placements, src_data_rank=None)


def between_dtensors(rank: int) -> list[str]:
    """Every layout to every other, as DTensors on the default group; says what differs from ``redistribute``."""
    group = dist.group.WORLD
    assert group is not None
    meshes = {grid: init_device_mesh("cpu", grid) for grid, _ in LAYOUTS}
    wrong: list[str] = []
    for number, (grid, placements) in enumerate(LAYOUTS):
        for other, wanted in LAYOUTS[number:]:
            for version in (1, 2):
                whole = weight(version)
                src = distribute_tensor(whole, meshes[grid], placements, src_data_rank=None)
                dst = empty_like(whole, meshes[other], wanted)
                xferdtensor(src, None, None, dst, None, None, group, shape=SHAPE, verify="full")
                if grid == other and not any(isinstance(p, _StridedShard) for p in (*placements, *wanted)):
                    expected = src.redistribute(meshes[other], wanted).to_local()
                else:
                    expected = distribute_tensor(whole, meshes[other], wanted, src_data_rank=None).to_local()
                if not torch.equal(dst.to_local(), expected):
                    wrong.append(f"{placements} to {wanted}, version {version}")
                if not torch.equal(dst.full_tensor(), whole):
                    wrong.append(f"{placements} to {wanted}, version {version}, whole")
    return wrong


def one_sided_in_a_subgroup(rank: int) -> list[str]:
    """Ranks 1 and 3 to rank 2, in a group that counts them 0, 2 and 1; DeviceMeshes count as the world does."""
    ranks = [1, 2, 3]
    group = dist.new_group(ranks)
    if rank not in ranks:
        return []
    wrong: list[str] = []
    for transport in ("p2p", "golden"):
        for version in (1, 2):
            whole = weight(version)
            src = whole.chunk(2)[rank // 3].clone() if rank != 2 else None
            dst = torch.full(SHAPE, float("nan"), dtype=torch.bfloat16) if rank == 2 else None
            source = DeviceMesh("cpu", [1, 3], _init_backend=False)
            xferdtensor(
                src, source, [Shard(0)], dst, [1], [Replicate()], group, transport=transport, verify="full"
            )
            if dst is not None and not torch.equal(dst, whole):
                wrong.append(f"{transport}, version {version}")
    return wrong


def body(rank: int) -> list[str]:
    """All of the above."""
    return between_dtensors(rank) + one_sided_in_a_subgroup(rank)
