"""What is handed to ``nccl.m2n``, and what is copied before and behind it. The library itself runs on GPUs alone."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.comm import waiting
from rlrefit.integration.comm.group import Group
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitTimeout, TransportUnavailable
from rlrefit.integration.layout import Fragment, Shard, box_of
from rlrefit.integration.layout.fragments import local_slice
from rlrefit.integration.plan import analyse
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.transport import streams
from rlrefit.integration.transport.checksums import add_due
from rlrefit.integration.transport.m2n import M2nTransport, ReshardPlan, library, transport
from rlrefit.integration.transport.m2n.bound import BoundReshards, Describer
from rlrefit.integration.transport.messages import LocalMessages
from rlrefit.integration.transport.streams import Stream
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.xferdtensor import xferdtensor
from tests.plan.worlds import Layouts
from tests.refit.groups import GroupWorld
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, run_world, value_of, whole

from .test_carried import carried_of

EXPERTS, ROWS, COLUMNS = 4, 6, 8
GATES = [TensorSpec(f"l.experts.{e}.gate.weight", (ROWS, COLUMNS), torch.float32) for e in range(EXPERTS)]
DENSE = TensorSpec("dense", (12, COLUMNS), torch.float32)
SPECS = [*GATES, DENSE, TensorSpec("norm", (COLUMNS,), torch.float32)]
WHOLE = whole(SPECS)
# Two trainers with two experts each and halves of the dense weight; two engine ranks with rows of each expert.
WORLD = Layouts(
    SPECS,
    [
        {s.name: [box_of(s.shape)] for s in (*GATES[2 * r : 2 * r + 2], SPECS[-1])}
        | {"dense": [((6 * r, 6 * r + 6), (0, COLUMNS))]}
        for r in range(2)
    ],
    [WHOLE | {s.name: [((3 * r, 3 * r + 3), (0, COLUMNS))] for s in GATES} for r in range(2)],
)
# The library's words, noted as they are given.
WORDS = SimpleNamespace(
    Replicate=lambda: "R",
    Shard=lambda dim: f"S{dim}",
    Mesh=lambda dims, start_rank: (tuple(dims), start_rank),
    DistTensor=lambda buffer, **told: SimpleNamespace(address=buffer, **told),
)


@pytest.fixture(scope="module")
def groups() -> Any:
    with GroupWorld(4) as made:
        yield made


def fragments_of(rank: int, storage: dict[str, list[torch.Tensor]]) -> list[Fragment]:
    layout = [*WORLD.sources, *WORLD.destinations][rank]
    shapes = {spec.name: spec.shape for spec in SPECS}
    return [
        Fragment(name, shapes[name], box, view)
        for name, boxes in layout.items()
        for box, view in zip(boxes, storage[name], strict=True)
    ]


def bind(rank: int, group: Group, storage: dict[str, list[torch.Tensor]], verify: str = "full") -> Any:
    """A rank's batches over storages of its boxes."""
    carried = carried_of(WORLD, 1 << 20)
    analysis = analyse(SPECS, *WORLD.holdings(), bucket_bytes=1 << 20, fan_out=False)
    messages = LocalMessages(ReshardPlan.of(analysis.compile(rank), carried).of_carried())
    fragments: dict[str, list[Fragment]] = defaultdict(list)
    for fragment in fragments_of(rank, storage):
        fragments[fragment.name].append(fragment)
    return carried, BoundReshards(carried.batches, messages, fragments, group, verify, Describer(WORDS), 2)


def fused() -> tuple[dict[str, list[torch.Tensor]], torch.Tensor]:
    """An engine rank's storages, its gates in the upper halves of one parameter of all experts, full of NaN."""
    w13 = torch.full((EXPERTS, 6, COLUMNS), float("nan"))
    storage = {s.name: [w13[e, :3]] for e, s in enumerate(GATES)}
    for spec in SPECS[EXPERTS:]:
        storage[spec.name] = [torch.full(spec.shape, float("nan"))]
    return storage, w13


def trainer(rank: int) -> dict[str, list[torch.Tensor]]:
    """A trainer rank's storages, each in memory of its own."""
    by_name = {spec.name: value_of(spec, 1) for spec in SPECS}
    return {
        name: [by_name[name][local_slice(box_of(by_name[name].shape), box)].clone() for box in boxes]
        for name, boxes in WORLD.sources[rank].items()
    }


def memory_at(told: Any) -> torch.Tensor:
    """What a descriptor describes, where it says that it lies."""
    count = torch.Size(told.local_shape).numel()
    raw = (ctypes.c_uint8 * (4 * count)).from_address(told.address)
    return torch.frombuffer(raw, dtype=torch.float32).view(told.local_shape)


def test_all_ranks_tell_the_library_the_same_in_the_same_order(groups: GroupWorld) -> None:
    def told(rank: int, group: Group) -> Any:
        storage = trainer(rank) if rank < 2 else fused()[0]
        _, bound = bind(rank, group, storage)
        found = []
        for batch in bound.batches:
            for pair in batch.pairs:
                found.append([(d.local_shape, d.dtype, d.mesh, d.placements) for d in pair])
                assert [bool(d.address) for d in pair] == [rank < 2, rank >= 2]
        return found

    first, *others = groups.run(told)
    assert isinstance(first, list), first
    assert len(first) == 3
    assert all(one == first for one in others)
    gates = next(pair for pair in first if len(pair[0][0]) == 3)
    assert gates[0] == ((2, ROWS, COLUMNS), torch.float32, ((1, 2), 0), ["R", "S0"])
    assert gates[1] == ((EXPERTS, 3, COLUMNS), torch.float32, ((1, 2), 2), ["R", "S1"])


def test_a_trainer_hands_over_experts_stacked_and_all_else_where_it_lies(groups: GroupWorld) -> None:
    def handed(rank: int, group: Group) -> Any:
        if rank >= 2:
            return bind(rank, group, fused()[0])[1].staging_bytes
        storage = trainer(rank)
        carried, bound = bind(rank, group, storage)
        assert bound.staging_bytes == 2 * ROWS * COLUMNS * 4  # and nothing else
        for batch, transfers in zip(bound.batches, carried.batches, strict=True):
            batch.gathered.launch()
            for (source, _), transfer in zip(batch.pairs, transfers, strict=True):
                held = [storage[name][0] for name in transfer.tensor.names if name in storage]
                if transfer.tensor.stacked:
                    assert torch.equal(memory_at(source), torch.stack(held))
                else:
                    assert source.address == held[0].data_ptr()
        return 0

    assert groups.run(handed) == [0, 0, EXPERTS * 3 * COLUMNS * 4, EXPERTS * 3 * COLUMNS * 4]


def test_an_engine_copies_what_arrived_into_its_fused_parameter_and_nowhere_else(groups: GroupWorld) -> None:
    def received(rank: int, group: Group) -> Any:
        if rank < 2:
            bind(rank, group, trainer(rank))
            return None
        storage, w13 = fused()
        carried, bound = bind(rank, group, storage)
        arrived = torch.randn(EXPERTS, 3, COLUMNS)
        for batch, transfers in zip(bound.batches, carried.batches, strict=True):
            for (_, destination), transfer in zip(batch.pairs, transfers, strict=True):
                if transfer.tensor.stacked:
                    memory_at(destination).copy_(arrived)
                else:
                    assert destination.address == storage[transfer.tensor.names[0]][0].data_ptr()
            batch.scattered.launch()
        return torch.equal(w13[:, :3], arrived) and bool(w13[:, 3:].isnan().all())

    assert groups.run(received) == [None, None, True, True]


@pytest.mark.parametrize("verify", ["off", "sampled", "full"])
def test_both_sides_add_up_the_same_checksums_of_equal_weights(groups: GroupWorld, verify: str) -> None:
    """Each side's sums are made of its own storage. In the refits of one turn, every message is compared once."""

    def sums(rank: int, group: Group) -> Any:
        storage = trainer(rank) if rank < 2 else fused()[0]
        if rank >= 2:
            for name, boxes in WORLD.destinations[rank - 2].items():
                value = value_of(next(s for s in SPECS if s.name == name), 1)
                for box, view in zip(boxes, storage[name], strict=True):
                    view.copy_(value[local_slice(box_of(value.shape), box)])
        _, bound = bind(rank, group, storage, verify)
        rows, verified = bound.checksums, 0
        for refit in range(2):
            rows.begin_sent(refit)
            rows.begin_landed(refit)
            for batch in bound.batches:
                batch.gathered.launch()
                for checks, into in ((batch.sent_checks, rows.sent), (batch.landed_checks, rows.landed)):
                    add_due(checks, refit, into)
            rows.exchange.start("verify")
            rows.exchange.finish("verify")
            rows.compare()
            assert rows.damaged() == []
            verified += rows.verified_bytes(refit)
        if rank == 2 and verify == "full":
            storage["dense"][0][3, 3] += 1
            rows.begin_landed(1)
            for batch in bound.batches:
                for check in batch.landed_checks:
                    check.checksums.add_to(rows.landed)
            rows.compare()
            assert [s.name for one in rows.damaged() for s in one.message.segments].count("dense") == 1
        return verified

    kept = sum(3 * COLUMNS * 4 for _ in GATES) + sum(s.nbytes for s in SPECS[EXPERTS:])
    found = groups.run(sums)
    assert found[:2] == [0, 0], found
    assert all(n == {"off": 0, "full": 2 * kept}.get(verify, n) for n in found[2:])
    assert verify != "sampled" or all(0 < n <= 2 * kept for n in found[2:])


def test_a_session_is_refused_on_all_ranks_where_one_lacks_the_library() -> None:
    sources = [SyntheticSource(SPECS, layout) for layout in WORLD.sources]
    engines = [SyntheticDestination(SPECS, layout) for layout in WORLD.destinations]
    config = RefitConfig(bucket_mb=1, timeout_s=20.0, transport="m2n")
    results = run_world(sources, engines, lambda *_: "a session", config)
    assert [type(error) for error in results] == [TransportUnavailable] * 4
    assert {(error.blamed, error.stage) for error in results} == {(0, "connect")}
    assert all("needs GPUs" in str(error) for error in results)
    assert all(storage.isnan().all() for engine in engines for storage in engine._wanted.values())


def test_xferdtensor_is_refused_on_all_ranks_where_one_lacks_the_library(groups: GroupWorld) -> None:
    def call(rank: int, group: Group) -> Any:
        src, dst = (torch.ones(4, 4), None) if rank < 2 else (None, torch.zeros(8, 2))
        try:
            xferdtensor(src, [0, 1], [Shard(0)], dst, [2, 3], [Shard(1)], group, transport="m2n")
        except TransportUnavailable as error:
            return type(error), error.blamed, dst is None or not dst.any()
        return None

    assert groups.run(call) == [(TransportUnavailable, 0, True)] * 4


def test_more_memory_than_one_rank_has_is_refused_on_all_of_them(
    groups: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a group, which asks for a communicator with a bucket's memory, and of a session, which asks for one for each stream."""
    asked: list[tuple[int, int]] = []

    def unavailable(_: torch.device, pack_bytes: int, lanes: int) -> str:
        asked.append((pack_bytes, lanes))
        return "not so much" if len(asked) == 3 else ""

    def call(rank: int, group: Group) -> Any:
        src, dst = (torch.ones(4, 4), None) if rank < 2 else (None, torch.zeros(8, 2))
        try:
            xferdtensor(
                src, [0, 1], [Shard(0)], dst, [2, 3], [Shard(1)], group, transport="m2n", bucket_bytes=8192
            )
        except TransportUnavailable as error:
            return str(error)
        return None

    monkeypatch.setattr("rlrefit.integration.xferdtensor.cache.unavailable", unavailable)
    assert all("not so much" in told for told in groups.run(call))
    assert asked == [(8192, 1)] * 4
    asked.clear()
    monkeypatch.setattr("rlrefit.integration.transport.unavailable", unavailable)
    sources = [SyntheticSource(SPECS, layout) for layout in WORLD.sources]
    engines = [SyntheticDestination(SPECS, layout) for layout in WORLD.destinations]
    config = RefitConfig(bucket_mb=1, streams=3, timeout_s=20.0, transport="m2n")
    results = run_world(sources, engines, lambda *_: "a session", config)
    assert [type(error) for error in results] == [TransportUnavailable] * 4
    assert asked == [(1 << 20, 3)] * 4


def transport_of(rank: int, group: Group) -> M2nTransport:
    """A rank's transport, bound and connected. Its library is played, and what would warm it up needs a GPU."""
    storage = trainer(rank) if rank < 2 else fused()[0]
    analysis = analyse(SPECS, *WORLD.holdings(), bucket_bytes=1 << 20, fan_out=False)
    plan = ReshardPlan.of(analysis.compile(rank), carried_of(WORLD, 1 << 20))
    communicators: Any = SimpleNamespace(m2n=WORDS, lanes=2, pack_bytes=0, in_time=lambda *_: None)
    made = M2nTransport(group, communicators, rank, plan, "full")
    made.bind(fragments_of(rank, storage))
    made.connect([{"turns": {}}] * 4)
    return made


@pytest.mark.parametrize(("ends", "reshards_end"), [(True, True), (False, True), (False, False)])
def test_what_a_failed_refit_may_still_use_is_kept_until_the_gpu_has_ended_it(
    groups: GroupWorld, monkeypatch: pytest.MonkeyPatch, ends: bool, reshards_end: bool
) -> None:
    kept: list[object] = []
    looked_at: list[Stream] = []

    def ended(done: Any, _: float) -> bool:
        return bool(done()) and ends

    monkeypatch.setattr(waiting, "_left_running", kept)
    monkeypatch.setattr(waiting, "_gpu_is_stuck", False)
    monkeypatch.setattr(library, "_process", library._Process())
    monkeypatch.setattr(transport, "gpu_ends_within", lambda *_: reshards_end)
    monkeypatch.setattr(streams, "gpu_ends_within", ended)
    monkeypatch.setattr(
        type(streams.make_stream(torch.device("cpu"))), "record", lambda s, _: looked_at.append(s)
    )

    def late(*_: Any) -> None:
        raise RefitTimeout("a reshard does not return", stage="transfer")

    def free(rank: int, group: Group) -> Any:
        made = transport_of(rank, group)
        used = [*made._reshards.buckets, *made._bound.buckets.values()]  # type: ignore[union-attr]
        for sums in (made._reshards.checksums, made._bound.checksums):  # type: ignore[union-attr]
            used += [sums.sent, sums.expected, sums.landed]
        alive = [weakref.ref(one) for one in used]
        del used, sums
        everything = {made._pack, made._unpack, *made._wires, *made._lane_streams}
        made._communicators.in_time = late
        with pytest.raises(RefitTimeout):
            made.run(StageClock(torch.device("cpu")))
        assert bool(library._process.lost) != reshards_end, "before any communicator is given up"
        assert waiting.gpu_is_stuck() != reshards_end
        made.unbind(failed=True)
        gc.collect()
        return [one() is not None for one in alive], everything <= set(looked_at)

    for alive, all_streams in groups.run(free):
        assert set(alive) == {not ends}
        assert all_streams
