"""One tensor between two meshes, against DTensor's own splitting and redistribution."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrefit.integration.comm.group import Group
from rlrefit.integration.comm.torch_group import TorchGroup
from rlrefit.integration.errors import PeerLost, PlanError, RefitMismatch, RefitTimeout
from rlrefit.integration.layout import Mesh, Placement, Replicate, Shard, StridedShard
from rlrefit.integration.transport import P2PTransport, TransferResult
from rlrefit.integration.xferdtensor import cache, op, xferdtensor
from rlrefit.integration.xferdtensor.cache import Transfers
from rlrefit.integration.xferdtensor.reshard import Side

from ..layout.index_tensors import split_by_torch
from ..spawn import run_ranks
from . import dtensor_ranks
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


def all_well(results: list[Any]) -> None:
    assert all(isinstance(result, TransferResult) for result in results), results


@given(data=st.data(), dtype=st.sampled_from(DTYPES), told=st.booleans(), small=st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
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
        all_well(results)


HALVES = (Mesh.line([0, 1]), (Shard(0),))
OTHERS = (Mesh.line([2, 3, 4]), (Shard(1),))


def arguments(group: Group, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Of the transfer of a tensor of (4, 6) from HALVES to OTHERS."""
    return {
        "src": torch.zeros(2, 6, dtype=dtype) if rank < 2 else None,
        "src_mesh": [0, 1],
        "src_placements": [Shard(0)],
        "dst": torch.full((4, 2), 7, dtype=dtype) if rank >= 2 else None,
        "dst_mesh": [2, 3, 4],
        "dst_placements": [Shard(1)],
        "process_group": group,
    }


def call(group: Group, rank: int, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    """That transfer with some arguments changed."""
    given = arguments(group, rank, dtype) | changed
    try:
        return xferdtensor(**given)
    finally:
        if isinstance(given["dst"], torch.Tensor) and changed:
            assert (given["dst"] == 7).all(), "something was written"


@pytest.mark.parametrize(
    ("rank", "changed", "parameter"),
    [
        (3, {"dst_placements": [Shard(0)]}, "dst_placements"),
        (1, {"src_mesh": [1, 0]}, "src_mesh"),
        (4, {"shape": (4, 6)}, "shape"),
        (2, {"verify": "off"}, "verify"),
        (2, {"bucket_bytes": 1 << 20}, "bucket_bytes"),
        (2, {"timeout_s": 20.0}, "timeout_s"),
        (3, {"dtype": torch.int32}, "dtype"),
        (1, {"src": torch.zeros(3, 6)}, "src"),
        (4, {"dst": torch.full((4, 3), 7.0)}, "dst"),
        (1, {"src": torch.zeros(2, 6, 1)}, "src"),
    ],
)
def test_ranks_that_were_called_differently_all_learn_it_before_anything_is_written(
    world: GroupWorld, rank: int, changed: dict[str, Any], parameter: str
) -> None:
    results = world.run(lambda r, group: call(group, r, **(changed if r == rank else {})))
    for result in results:
        assert isinstance(result, RefitMismatch), results
        assert result.parameter == parameter
        # With the value of the rank that differs, or with its shape.
        assert f"rank {rank}" in str(result) or parameter == "src"


def overlapping(rank: int) -> dict[str, Any]:
    storage = torch.full((8, 6), 7.0)
    return {"src": storage[:2], "dst": storage[1:5, :2], "src_mesh": [0, 1], "dst_mesh": [1, 0, 2]}


# Rank 0 on the receiving side alone.
LATER = {"src": None, "src_mesh": [1, 2], "dst_mesh": [0, 3, 4]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"transport": "ipc"}, "no transport 'ipc'.*refit session"),
        ({"verify": "twice"}, "off, sampled or full"),
        ({"src": None}, "rank 0 is in src_mesh, but src is None"),
        ({"dst": torch.zeros(4, 2)}, "rank 0 is not in dst_mesh, but dst is given"),
        ({"src_mesh": None}, "src_mesh and src_placements are needed"),
        ({"dst_mesh": [2, 3, 5]}, "mesh rank 5 is not in the process group of 5 ranks"),
        ({"dst_mesh": [2, 3], "transport": "golden"}, r"ranks \[4\] are in neither mesh"),
        (overlapping(0), "overlap in memory"),
        ({"dst_mesh": [0, 2, 3], "dst": torch.zeros(4, 2, dtype=torch.int8)}, "src is float32 and dst int8"),
        (LATER | {"dst": torch.zeros(4, 2).T[:1].expand(4, 4)}, "dst of rank 0 is expanded"),
        (LATER | {"dst": torch._neg_view(torch.zeros(4, 2))}, "dst of rank 0 is a lazy"),
        (LATER | {"dst": torch.zeros(4, 2, dtype=torch.complex64).conj()}, "dst of rank 0 is a lazy"),
        ({"dst_placements": [Shard(2)], "shape": (4, 6)}, "does not have"),
        ({"dst_placements": [Shard(0)] * 2}, "2 placements for a mesh of 1 dimensions"),
    ],
)
def test_arguments_that_are_wrong_on_their_own_are_refused_at_once(
    world: GroupWorld, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, RefitMismatch), match=message):
        xferdtensor(**(arguments(world.groups[0], 0) | {"timeout_s": 2.0} | changed))


@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_a_source_travels_as_it_shows_though_its_memory_holds_other_values_or_one_for_several(
    world: GroupWorld, transport: str
) -> None:
    conjugate, negative = random_tensor((4, 6), torch.complex64, 1), random_tensor((4, 6), torch.float16, 2)
    shown = [
        conjugate.conj(),
        torch._neg_view(negative),
        random_tensor((1, 6), torch.complex128, 3).expand(4, 6),
    ]

    def body(rank: int, group: Group) -> list[bool]:
        found = []
        for src in shown:
            dst = torch.empty(4, 2, dtype=src.dtype)
            kept = (
                src if rank == 0 else None,
                [0],
                [Replicate()],
                dst if rank > 1 else None,
                [2, 3, 4],
                [Shard(1)],
            )
            if transport == "golden":
                kept = src if rank < 2 else None, [0, 1], [Replicate()], *kept[3:]
            for _ in range(2):
                dst.view(torch.uint8).fill_(POISON)
                xferdtensor(*kept, group, transport=transport, timeout_s=20.0)
                part = src[:, 2 * (rank - 2) : 2 * (rank - 1)].resolve_conj().resolve_neg()
                found.append(rank < 2 or as_bytes(dst) == as_bytes(part))
        return found

    assert world.run(body) == [[True] * 6] * RANKS


def test_a_layout_is_compared_once_when_the_shape_is_given_and_at_each_call_otherwise(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [0] * RANKS
    original = op.gather

    def counting(group: Group, members: Sequence[int], own: Any) -> list[bytes]:
        asked[group.rank] += "settings" in own
        return original(group, members, own)

    monkeypatch.setattr(op, "gather", counting)
    results = transfer(world, (4, 9), torch.float16, HALVES, OTHERS, (1, 2, 3))
    all_well(results)
    assert asked == [1] * RANKS
    transfer(world, (4, 9), torch.float16, HALVES, OTHERS, (1, 2, 3), told=False)
    assert asked == [4] * RANKS


def test_layouts_that_were_dropped_are_agreed_upon_anew_by_all_whatever_else_some_ranks_move(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEPT", 2)
    asked: list[set[int]] = [set() for _ in range(RANKS)]
    original = op.gather
    pair = (Mesh((1,), (0,)), (Replicate(),)), (Mesh((1,), (1,)), (Replicate(),))
    step = 0

    def noting(group: Group, members: Sequence[int], own: Any) -> list[bytes]:
        if len(members) == RANKS:
            asked[group.rank].add(step)
        return original(group, members, own)

    monkeypatch.setattr(op, "gather", noting)
    kept = [1, 2, 1, 1, 2, 3, 1, 1]
    for step, columns in enumerate(kept):
        # Ranks 0 and 1 take part in more layouts than the others, which may not drop what these still keep.
        for other in range(3):
            results = transfer(world, (2, other + 1), torch.float64, *pair, (step,))
            assert not any(isinstance(result, Exception) for result in results), results
        results = transfer(world, (6, columns), torch.float64, HALVES, OTHERS, (1, 2))
        all_well(results)
    assert asked == [{0, 1, 5, 6}] * RANKS
    compiled = Transfers.of(world.groups[0], torch.device("cpu"), 300.0)._compiled
    assert [len(compiled[frozenset(members)]) for members in (range(RANKS), range(2))] == [2, 2]


def test_buckets_are_kept_until_a_transfer_that_broke_has_been_given_up(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, bool]] = []

    def interrupted(transport: P2PTransport, clock: Any) -> TransferResult:
        raise KeyboardInterrupt

    def unbind(transport: P2PTransport, *, failed: bool = False) -> None:
        done.append(("unbind", failed and transport._bound is not None))

    monkeypatch.setattr(P2PTransport, "run", interrupted)
    monkeypatch.setattr(P2PTransport, "unbind", unbind)
    for ended in (True, False):

        def abort(group: Group, ended: bool = ended) -> bool:
            done.append(("abort", ended))
            return ended

        monkeypatch.setattr(TorchGroup, "abort", abort)
        transfers = Transfers(TorchGroup.over(world.groups[0], torch.device("cpu"), 5.0))
        side = Side(Mesh((1,), (0,)), (Replicate(),)), Side(Mesh((1,), (1,)), (Replicate(),))
        request = cache.Request(*side, (2, 3), torch.float32, "p2p", 1 << 20, "full")
        with pytest.raises(KeyboardInterrupt):
            transfers.run(request, torch.zeros(2, 3), None)
    assert done == [("abort", True), ("unbind", True), ("abort", False)]


def test_the_cache_keeps_no_tensor_alive_and_ends_with_its_process_group() -> None:
    def body(rank: int, group: Group) -> weakref.ref[torch.UntypedStorage]:
        src = torch.zeros(2, 6) if rank < 2 else None
        dst = torch.zeros(4, 2) if rank >= 2 else None
        xferdtensor(src, [0, 1], [Shard(0)], dst, [2, 3, 4], [Shard(1)], group)
        tensor = src if src is not None else dst
        assert tensor is not None
        return weakref.ref(tensor.untyped_storage())

    with GroupWorld(RANKS) as small:
        storages = small.run(body)
        gc.collect()
        assert [storage() for storage in storages] == [None] * RANKS
        kept = weakref.ref(Transfers.of(small.groups[0], torch.device("cpu"), 300.0))
    gc.collect()
    assert kept() is None


def test_a_rank_that_does_not_come_ends_the_others_waits() -> None:
    with GroupWorld(RANKS, timeout_s=1.0) as small:
        results = small.run(
            lambda rank, group: None if rank == 3 else call(group, rank, timeout_s=1.0, shape=(4, 6))
        )
    assert all(isinstance(r, RefitTimeout | PeerLost) for i, r in enumerate(results) if i != 3), results


@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_ranks_connect_within_the_limit_before_anything_goes_from_one_to_another(
    world: GroupWorld, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would connect in the first use of a pair, or in the first broadcast, and wait there without a limit."""
    connected: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    greeted: set[int] = set()
    connect, greet = TorchGroup.connect, TorchGroup.connect_broadcast
    exchange, broadcast = TorchGroup.exchange, TorchGroup.broadcast

    def connects(group: TorchGroup, peers: Any) -> None:
        connected[group.rank] |= {*peers}
        connect(group, peers)

    def greets(group: TorchGroup, root: int) -> None:
        greeted.add(group.rank)
        greet(group, root)

    def exchanges(group: TorchGroup, sends: Any, receives: Any, stage: str) -> None:
        assert {parcel.peer for parcel in (*sends, *receives)} <= connected[group.rank]
        exchange(group, sends, receives, stage)

    def broadcasts(group: TorchGroup, buffer: torch.Tensor, root: int, stage: str) -> None:
        assert group.rank in greeted
        broadcast(group, buffer, root, stage)

    for name, call in (
        ("connect", connects),
        ("connect_broadcast", greets),
        ("exchange", exchanges),
        ("broadcast", broadcasts),
    ):
        monkeypatch.setattr(TorchGroup, name, call)
    results = transfer(world, (6, 5), torch.float32, HALVES, OTHERS, (1,), transport=transport, told=False)
    all_well(results)


def test_a_bucket_without_room_is_told_on_every_rank(world: GroupWorld) -> None:
    results = world.run(lambda rank, group: call(group, rank, bucket_bytes=64))
    assert all(isinstance(result, PlanError) for result in results), results
    assert all("bucket_bytes=64 is too small" in str(result) for result in results), results


def test_dtensors_go_from_layout_to_layout_as_redistribute_takes_them() -> None:
    assert run_ranks(dtensor_ranks.body, 4) == [[], [], [], []]
