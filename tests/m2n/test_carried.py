"""What ``nccl.m2n`` carries of any world's weights, in which batches, and what is left to ``p2p``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrefit.integration.layout import Box
from rlrefit.integration.plan import ALIGNMENT, CHECKSUM_BYTES, Message, analyse
from rlrefit.integration.transport.m2n import Carried, MeshSide, ReshardPlan, carry
from rlrefit.integration.transport.whole_tensors import by_weight
from rlrefit.integration.weights.manifest import TensorSpec

from ..plan.worlds import Layouts, both_ends_agree, layouts, plans_of, run_plans

BUCKET = 512
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Dealt:
    """How a mesh deals a weight to a side's ranks: ``shards`` along ``dim``, neighbours apart or alike."""

    shards: int
    dim: int
    alike: bool

    def box(self, shape: tuple[int, ...], ranks: int, rank: int) -> Box:
        index = rank // (ranks // self.shards) if self.alike else rank % self.shards
        step = shape[self.dim] // self.shards
        box = [(0, n) for n in shape]
        box[self.dim] = (index * step, (index + 1) * step)
        return tuple(box)


@st.composite
def meshes(draw: st.DrawFn) -> Layouts:
    """Dense weights and experts on even meshes, of which ``nccl.m2n`` can carry all that a bucket holds."""
    train, gen = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    specs: list[TensorSpec] = []
    held: list[dict[str, list[Box]]] = [{} for _ in range(train)]
    wanted: list[dict[str, list[Box]]] = [{} for _ in range(gen)]
    for kind in range(draw(st.integers(1, 4))):
        shape = tuple(12 * n for n in draw(st.lists(st.integers(1, 2), min_size=1, max_size=2)))
        experts = 4 if draw(st.booleans()) else 0
        dtype = draw(st.sampled_from([torch.bfloat16, torch.uint8]))
        names = [f"l{kind}.experts.{e}.w" for e in range(experts)] or [f"l{kind}.w"]
        specs += [TensorSpec(name, shape, dtype) for name in names]
        by_expert = experts > 0 and draw(st.booleans())
        for side, ranks in ((held, train), (wanted, gen)):
            parts = draw(st.sampled_from([n for n in (1, 2, 3, 4) if ranks % n == 0]))
            dealt = Dealt(parts, draw(st.integers(0, len(shape) - 1)), draw(st.booleans()))
            for rank in range(ranks):
                for number, name in enumerate(names):
                    if by_expert and side is held and train in (2, 4):
                        if number * train // experts == rank:
                            side[rank][name] = [tuple((0, n) for n in shape)]
                    else:
                        side[rank][name] = [dealt.box(shape, ranks, rank)]
    return Layouts(specs, held, wanted)


def carried_of(world: Layouts, bucket_bytes: int = BUCKET, unfit: dict[str, str] | None = None) -> Carried:
    first = len(world.sources)
    return carry(
        world.specs,
        by_weight(dict(enumerate(world.sources))),
        by_weight(dict(enumerate(world.destinations, first))),
        unfit or {},
        bucket_bytes,
    )


def box_on(side: MeshSide, rank: int) -> tuple[Box, tuple[int, ...]]:
    """What the library's own words say that a rank has, and the shape of the whole: ``placements`` over ``dims`` from ``start``."""
    row, column = divmod(rank - side.start, side.dims[1])
    index = (row, column)[side.shard_axis]
    box = [(0, n) for n in side.local_shape]
    step = side.local_shape[side.shard_dim]
    box[side.shard_dim] = (index * step, (index + 1) * step)
    whole = list(side.local_shape)
    whole[side.shard_dim] *= side.dims[side.shard_axis]
    return tuple(box), tuple(whole)


@quick
@given(st.one_of(layouts(), meshes()))
def test_meshes_describe_what_ranks_hold_and_batches_keep_within_a_bucket(world: Layouts) -> None:
    carried = carried_of(world)
    for batch in carried.batches:
        assert len({transfer.topology for transfer in batch}) == 1
        loads: dict[int, int] = {}
        for transfer in batch:
            tensor = transfer.tensor
            for side, regions in (
                (transfer.source, tensor.sources),
                (transfer.destination, tensor.destinations),
            ):
                assert sorted(regions) == list(range(side.start, side.start + prod(side.dims)))
                for rank, (region,) in regions.items():
                    assert (region, tensor.shape) == box_on(side, rank)
                    loads[rank] = loads.get(rank, 0) + prod(side.local_shape) * tensor.dtype.itemsize
        assert max(loads.values()) <= BUCKET


@quick
@given(meshes())
def test_even_meshes_of_ranks_in_a_row_are_carried_as_far_as_a_bucket_holds_them(world: Layouts) -> None:
    carried = carried_of(world, 1 << 20)
    assert carried.names == {spec.name for spec in world.specs}
    assert carried.nbytes == sum(spec.nbytes for spec in world.specs)
    assert carried.left == ()
    # Like meshes are joined: as many batches as there are pairs of meshes.
    topologies = [batch[0].topology for batch in carried.batches]
    assert len(topologies) == len(set(topologies))
    small = carried_of(world, 1)
    assert small.names == frozenset()
    assert sum(count for _, count, _ in small.left) == len(world.specs)
    assert sum(nbytes for _, _, nbytes in small.left) == carried.nbytes


@quick
@given(st.one_of(layouts(), meshes()), st.data())
def test_both_ways_together_write_what_the_whole_plan_writes(world: Layouts, data: st.DataObject) -> None:
    analysis = analyse(world.specs, *world.holdings(), bucket_bytes=4096, fan_out=False)
    unfit = data.draw(st.sets(st.sampled_from([spec.name for spec in world.specs]), max_size=1))
    carried = carried_of(world, unfit=dict.fromkeys(unfit, "it is cast"))
    assert not carried.names & unfit
    plans = [ReshardPlan.of(plan, carried) for plan in plans_of(analysis)]
    by_m2n, by_p2p = [plan.of_carried() for plan in plans], [plan.of_rest() for plan in plans]
    assert both_ends_agree(by_m2n)
    assert both_ends_agree(by_p2p)
    assert names_in(by_m2n) <= carried.names
    assert not names_in(by_p2p) & carried.names
    together = run_plans([*by_m2n, *by_p2p], world)
    for ours, theirs in zip(together, run_plans(plans, world), strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    for plan in (*by_m2n, *by_p2p):
        for messages in (*plan.sends, *plan.receives):
            for message in messages:
                assert well_laid_out(message)


def names_in(plans: list[object]) -> set[str]:
    return {
        segment.name
        for plan in plans
        for messages in (*plan.sends, *plan.receives)  # type: ignore[attr-defined]
        for message in messages
        for segment in message.segments
    }


def well_laid_out(message: Message) -> bool:
    """Whether segments lie one behind another, each aligned, with room for the checksum behind the last."""
    cursor = 0
    for segment in message.segments:
        if segment.offset < cursor or segment.offset % ALIGNMENT:
            return False
        cursor = segment.offset + segment.nbytes
    return message.is_bare or cursor + CHECKSUM_BYTES <= message.nbytes


def test_the_remark_tells_what_goes_which_way_and_why() -> None:
    specs = [TensorSpec("a", (4, 6), torch.bfloat16), TensorSpec("b", (2, 2, 2, 2), torch.bfloat16)]
    whole = {s.name: [tuple((0, n) for n in s.shape)] for s in specs}
    carried = carried_of(Layouts(specs, [whole], [whole]))
    assert carried.names == {"a"}
    assert [(count, nbytes) for _, count, nbytes in carried.left] == [(1, 32)]
    assert "carries 1 weights" in carried.remark
    assert "4 dimensions" in carried.remark
    assert "p2p" not in carried_of(Layouts(specs[:1], [whole], [whole])).remark
