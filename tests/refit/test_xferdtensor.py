"""One tensor between two meshes, against DTensor's own splitting and redistribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrefit.integration.layout import Mesh, Placement, Replicate, Shard, StridedShard
from rlrefit.integration.process_groups import Group
from rlrefit.integration.transport import TransferResult
from rlrefit.integration.xferdtensor import xferdtensor

from ..layout.index_tensors import split_by_torch
from .groups import GroupWorld

RANKS = 5
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.complex64, torch.bool]
POISON = 0xA5


@pytest.fixture(scope="module")
def world() -> Iterator[GroupWorld]:
    with GroupWorld(RANKS) as made:
        yield made


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> tuple[Mesh, tuple[Placement, ...]]:
    grid = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (1, 2), (4, 1), (2, 1, 2)]))
    ranks = draw(st.permutations(range(RANKS)))[: prod(grid)]
    dim = st.integers(-dims, dims - 1) if dims else st.nothing()
    kinds = st.one_of(dim.map(Shard), st.just(Replicate()), st.builds(StridedShard, dim, st.integers(1, 3)))
    return Mesh(grid, tuple(ranks)), tuple(draw(kinds) for _ in grid)


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes of ``dtype``; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = prod(shape) * dtype.itemsize
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype).reshape(tuple(shape))


def in_gaps(shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned storage, and a view of ``shape`` in it that is nowhere contiguous."""
    storage = torch.full((prod(shape) * 3 * dtype.itemsize + 16,), POISON, dtype=torch.uint8)
    strides, step = [], 3
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return storage, storage.view(dtype).as_strided(tuple(shape), tuple(reversed(strides)))


def as_bytes(tensor: torch.Tensor) -> list[int]:
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return packed.view(torch.uint8).tolist()


def transfer(
    world: GroupWorld,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    source: tuple[Mesh, tuple[Placement, ...]],
    destination: tuple[Mesh, tuple[Placement, ...]],
    seeds: Sequence[int],
    told: bool = True,
    **options: Any,
) -> list[Any]:
    """Transfer a changed tensor for each seed; on each rank the last result, or what is wrong."""

    def body(rank: int, group: Group) -> Any:
        result: Any = None
        for seed in seeds:
            whole = random_tensor(shape, dtype, seed)
            src = dst = None
            if source[0].coordinate(rank) is not None:
                held = split_by_torch(whole, *source, rank)
                _, src = in_gaps(held.shape, dtype)
                src.copy_(held)
            if destination[0].coordinate(rank) is not None:
                expected = split_by_torch(whole, *destination, rank)
                storage, dst = in_gaps(expected.shape, dtype)
            given = shape if told else None
            result = xferdtensor(
                src, *source, dst, *destination, group, shape=given, verify="full", **options
            )
            if src is not None:
                assert as_bytes(src) == as_bytes(held), "the source was written"
            if dst is not None:
                assert as_bytes(dst) == as_bytes(expected), f"seed {seed}"
                around = storage.clone().view(-1, dtype.itemsize)
                around[torch.arange(len(around)).as_strided(dst.shape, dst.stride()).flatten()] = POISON
                assert set(around.flatten().tolist()) == {POISON}, (
                    "the destination was written outside of its view"
                )
        return result

    return world.run(body)


@given(data=st.data(), dtype=st.sampled_from(DTYPES), told=st.booleans(), small=st.booleans())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_two_layouts_meet_bit_for_bit_twice(
    world: GroupWorld, data: st.DataObject, dtype: torch.dtype, told: bool, small: bool
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 11), max_size=3)))
    source, destination = data.draw(layouts(len(shape))), data.draw(layouts(len(shape)))
    everyone = {*source[0].ranks, *destination[0].ranks} == set(range(RANKS))
    options: dict[str, Any] = {"told": told}
    if small:
        options["bucket_bytes"] = 5 * 32 * 2
    for transport in ("p2p", "golden") if everyone else ("p2p",):
        results = transfer(world, shape, dtype, source, destination, (1, 2), transport=transport, **options)
        assert all(isinstance(result, TransferResult) for result in results), results
