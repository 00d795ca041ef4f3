"""Placements against DTensor's own arithmetic, and against torch's splitting of index tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor import Shard as TheirShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlrefit.integration.layout import (
    Mesh,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    boxes_of,
    dtensor_fragments,
    layout_of,
    local_fragments,
    local_shape,
    mesh_of,
    placement_of,
    placements_of,
    volume,
)

from .index_tensors import index_tensor, split_by_torch, theirs

Case = tuple[tuple[int, ...], Mesh, tuple[Placement, ...]]


@st.composite
def cases(draw: st.DrawFn, max_dims: int = 3) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=max_dims)))
    grid = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(prod(grid))))
    dims = st.integers(-len(shape), len(shape) - 1) if shape else st.nothing()
    kinds = st.one_of(st.just(Replicate()), dims.map(Shard), st.builds(StridedShard, dims, st.integers(1, 4)))
    placements = tuple(draw(kinds) for _ in grid)
    return shape, Mesh(grid, tuple(ranks)), placements


@given(cases())
@settings(max_examples=80, deadline=None)
def test_every_rank_holds_the_elements_that_dtensor_would_give_it(case: Case) -> None:
    shape, mesh, placements = case
    whole = index_tensor(shape)
    for rank in mesh.ranks:
        expected = split_by_torch(whole, mesh, placements, rank)
        assert local_shape(shape, mesh, placements, rank) == tuple(expected.shape)
        local = torch.full(expected.shape, -1)
        for box, place in boxes_of(shape, mesh, placements, rank):
            assert volume(box) > 0
            local[place] = whole[tuple(slice(a, b) for a, b in box)]
        assert torch.equal(local, expected)


@given(cases())
@settings(max_examples=80, deadline=None)
def test_shapes_and_first_offsets_are_those_of_dtensors_own_function(case: Case) -> None:
    shape, mesh, placements = case
    converted = [theirs(p, len(shape)) for p in placements]
    for rank, coordinate in zip(mesh.ranks, product(*map(range, mesh.shape)), strict=True):
        assert mesh.coordinate(rank) == coordinate
        expected, offset = _compute_local_shape_and_global_offset(
            shape, mesh.shape, list(coordinate), converted
        )
        assert local_shape(shape, mesh, placements, rank) == expected
        boxes = boxes_of(shape, mesh, placements, rank)
        if 0 in expected:
            assert boxes == []
        else:
            assert tuple(start for start, _ in boxes[0][0]) == offset


def test_a_plain_shard_and_a_scalar_are_one_box_and_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    plain = boxes_of((8, 3), Mesh.of([[0, 1], [2, 3]]), [Shard(0), Shard(0)], 1)
    assert plain == [(((2, 4), (0, 3)), (slice(0, 2), slice(0, 3)))]
    mesh = Mesh.line([3, 4])
    assert boxes_of((), mesh, [Replicate()], 4) == [((), ())]
    assert boxes_of((), mesh, [Replicate()], 0) == []
    with pytest.raises(ValueError, match="rank 0 is not in the mesh"):
        local_shape((), mesh, [Replicate()], 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh((2, 2), (0, 1, 2)), "4 places, but 3 ranks"),
        (lambda: Mesh((2,), (1, 1)), "one place in a mesh"),
        (lambda: Mesh((2,), (-1, 1)), "distinct numbers from 0"),
        (lambda: Mesh((2,), (0, 1), ("dp", "tp")), "2 names"),
        (lambda: Mesh((0,), ()), "at least one"),
        (lambda: Mesh.of([[0, 1], [2]]), "ragged"),
        (lambda: Mesh.of([[0, 1], 2]), "ragged"),
        (lambda: Mesh.of([0.5, 1]), "ranks in lists"),
        (lambda: StridedShard(0, 0), "at least 1"),
        (lambda: boxes_of((4,), Mesh.line([0]), [], 0), "0 placements for a mesh of 1"),
        (lambda: boxes_of((4,), Mesh.line([0]), [Shard(1)], 0), "does not have"),
        (lambda: boxes_of((), Mesh.line([0]), [Shard(0)], 0), "does not have"),
        (lambda: placement_of(Partial()), "Shard or Replicate first"),
    ],
)
def test_what_is_no_layout_is_refused_with_a_reason(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_nested_lists_make_a_mesh() -> None:
    mesh = Mesh.of([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("pp", "dp", "tp"))
    assert (mesh.shape, mesh.size, mesh.coordinate(6)) == ((2, 2, 2), 8, (1, 1, 0))
    assert mesh.coordinate(8) is None
    assert Mesh.of([4, 2]) == Mesh.line([4, 2])


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of 8 ranks that never talks; this process is rank 5."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


LAYOUTS: list[tuple[tuple[int, ...], tuple[object, ...]]] = [
    ((2, 4), (TheirReplicate(), TheirShard(0))),
    ((2, 4), (TheirShard(1), TheirShard(0))),
    ((2, 4), (TheirShard(0), TheirShard(0))),
    ((4, 2), (_StridedShard(0, split_factor=2), TheirShard(0))),
    ((2, 2, 2), (TheirReplicate(), _StridedShard(1, split_factor=2), TheirShard(1))),
    ((8,), (TheirShard(0),)),
]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("grid", "placements"), LAYOUTS)
@pytest.mark.parametrize("shape", [(16, 8), (13, 7), (3, 2)])
def test_a_dtensor_becomes_the_fragments_of_its_local_tensor(
    grid: tuple[int, ...], placements: tuple[object, ...], shape: tuple[int, ...]
) -> None:
    device_mesh = init_device_mesh("cpu", grid)
    whole = index_tensor(shape)
    tensor = distribute_tensor(whole, device_mesh, placements, src_data_rank=None)
    local = tensor.to_local()
    expected, offset = compute_local_shape_and_global_offset(tensor.shape, device_mesh, placements)
    fragments = dtensor_fragments("w", tensor)
    assert tuple(local.shape) == expected
    assert sum(f.view.numel() for f in fragments) == local.numel()
    if fragments:
        assert tuple(start for start, _ in fragments[0].box) == offset
    for fragment in fragments:
        assert fragment.full_shape == shape
        assert fragment.view.equal(whole[tuple(slice(a, b) for a, b in fragment.box)])
        assert fragment.view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


@pytest.mark.usefixtures("process_group")
def test_a_mesh_keeps_the_ranks_and_names_of_torchs_own() -> None:
    device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert mesh_of(device_mesh) == Mesh((2, 4), tuple(range(8)), ("dp", "tp"))
    assert mesh_of(device_mesh["tp"]) == Mesh((4,), (4, 5, 6, 7), ("tp",))
    assert placements_of([TheirShard(1), _StridedShard(0, split_factor=3), TheirReplicate()]) == (
        Shard(1),
        StridedShard(0, 3),
        Replicate(),
    )


@pytest.mark.usefixtures("process_group")
def test_a_dtensor_elsewhere_has_no_fragments_here() -> None:
    device_mesh = DeviceMesh("cpu", [0, 1, 2])
    tensor = DTensor.from_local(torch.zeros(0), device_mesh, [TheirShard(0)], shape=(6,), stride=(1,))
    assert dtensor_fragments("w", tensor) == []


def test_a_local_tensor_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.norm: the local tensor of rank 1 has shape \(4,\)"):
        local_fragments("model.norm", (7,), Mesh.line([0, 1]), [Shard(0)], 1, torch.zeros(4))


def test_no_local_elements_where_the_placements_give_some_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.norm: the local tensor of rank 1 has shape \(0,\)"):
        local_fragments("model.norm", (7,), Mesh.line([0, 1]), [Shard(0)], 1, torch.zeros(0))


@pytest.mark.usefixtures("process_group")
def test_what_fsdp_makes_of_an_empty_shard_of_tensor_parallelism_has_no_fragments() -> None:
    device_mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tp"))
    layer = parallelize_module(torch.nn.Linear(1, 5), device_mesh["tp"], RowwiseParallel())
    weight = fully_shard(layer, mesh=device_mesh["shard"]).weight
    assert isinstance(weight, DTensor)
    mesh, placements = layout_of(weight)
    assert tuple(weight.to_local().shape) != local_shape((5, 1), mesh, placements, dist.get_rank())
    assert dtensor_fragments("w", weight) == []


@pytest.mark.usefixtures("process_group")
def test_a_dtensor_with_partial_values_or_cut_in_another_order_of_mesh_dimensions_is_refused() -> None:
    partial = DTensor.from_local(torch.zeros(3), init_device_mesh("cpu", (8,)), [Partial()])
    spec = DTensorSpec(
        init_device_mesh("cpu", (2, 4)),
        (TheirShard(0), TheirShard(0)),
        TensorMeta(torch.Size([8]), (1,), torch.float32),
        shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),),
    )
    reordered = DTensor(torch.zeros(1), spec, requires_grad=False)
    for tensor, told in ((partial, "Shard or Replicate first"), (reordered, "left to right")):
        with pytest.raises(ValueError, match=told):
            dtensor_fragments("w", tensor)
