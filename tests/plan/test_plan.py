"""Plans against brute force: index arrays for the geometry, all subsets of links for the bound."""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.errors import PlanError, RefitMismatch
from rlrefit.integration.layout import box_of, volume
from rlrefit.integration.layout.fragments import local_slice
from rlrefit.integration.plan import Analysis, Topology, analyse
from rlrefit.integration.plan.balance import Demand, balance, least_possible
from rlrefit.integration.weights.holdings import HoldingGroup, Holdings, HoldingsReader, SpecTable
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import whole

from .worlds import Layouts, both_ends_agree, layouts, plans_of, run_plans

BF16 = torch.bfloat16


@given(world=layouts(), bucket=st.integers(1300, 6000), fan_out=st.sampled_from([None, False, True]))
@settings(max_examples=80, deadline=None)
def test_every_wanted_element_is_written_once_with_its_own_value_and_nothing_else_is(
    world: Layouts, bucket: int, fan_out: bool | None
) -> None:
    sources, destinations = world.holdings()
    hosts = [rank // 3 for rank in range(len(sources) + len(destinations))]
    topology = Topology.of_hosts(hosts)
    analysis = analyse(
        world.specs, sources, destinations, bucket_bytes=bucket, topology=topology, fan_out=fan_out
    )
    plans = plans_of(analysis)
    results = run_plans(plans, world)
    for wanted, got in zip(world.destinations, results, strict=True):
        for spec in world.specs:
            expected = np.full(spec.shape, -1)
            numbers = np.arange(expected.size).reshape(spec.shape)
            for box in wanted.get(spec.name, []):
                place = local_slice(box_of(spec.shape), box)
                expected[place] = numbers[place]
            np.testing.assert_array_equal(got[spec.name], expected)
    assert both_ends_agree(plans)
    # What belongs together travels together.
    position = {spec.name: n for n, spec in enumerate(world.specs)}
    for plan in plans:
        for pair in plan.pair_digests:
            sent = [m for r in plan.sends + plan.receives for m in r if (m.source, m.destination) == pair]
            listed = [position[s.name] for m in sorted(sent, key=lambda m: m.round_index) for s in m.segments]
            assert listed == sorted(listed)
    assert all(plan.staging_bytes <= bucket for plan in plans)
    assert len({plan.digest for plan in plans}) == 1
    digests = Counter((pair, digest) for plan in plans for pair, digest in plan.pair_digests.items())
    assert all(plan.rank in pair for plan in plans for pair in plan.pair_digests)
    assert set(digests.values()) <= {2}, "both ends of a pair give it the same digest"


@given(world=layouts())
@settings(max_examples=40, deadline=None)
def test_pair_bytes_are_those_of_the_messages_to_within_one_piece_where_replicas_share(
    world: Layouts,
) -> None:
    sources, destinations = world.holdings()
    analysis = analyse(world.specs, sources, destinations, bucket_bytes=4000, fan_out=False)
    found = np.zeros_like(analysis.pair_bytes)
    for plan in plans_of(analysis):
        for messages in plan.sends:
            for m in messages:
                found[m.source, m.destination] += m.payload_bytes
    np.testing.assert_array_equal(found.sum(axis=0), analysis.pair_bytes.sum(axis=0))
    largest = max((volume(box_of(s.shape)) * s.dtype.itemsize for s in world.specs), default=0)
    # Each replica set has its own cut points.
    slack = largest * max(1, len(analysis.assignment.sets))
    assert np.abs(found - analysis.pair_bytes).max(initial=0) <= slack


@given(world=layouts())
@settings(max_examples=60, deadline=None)
def test_holdings_survive_the_rendezvous(world: Layouts) -> None:
    reader = HoldingsReader(SpecTable(world.specs))
    for holdings in (h for side in world.holdings() for h in side):
        holdings = replace(holdings, refused={"router": np.array([0])})
        read = reader.holdings(holdings.rank, json.loads(json.dumps(holdings.to_parts())))
        assert read.rank == holdings.rank
        assert [(g.boxes, g.dtype, g.indices.tolist()) for g in read.groups] == [
            (g.boxes, g.dtype, g.indices.tolist()) for g in holdings.groups
        ]
        assert {r: i.tolist() for r, i in read.refused.items()} == {"router": [0]}


DEMANDS = st.lists(
    st.builds(
        Demand,
        st.sets(st.integers(0, 4), min_size=1).map(lambda s: tuple(sorted(s))),
        st.integers(0, 1),
        st.integers(1, 1000),
    ),
    min_size=1,
    max_size=6,
)


@given(demands=DEMANDS)
@settings(max_examples=80, deadline=None)
def test_replicas_share_so_that_no_link_carries_more_than_ownership_forces(demands: list[Demand]) -> None:
    topology = Topology((0, 0, 0, 1, 1), nic_gb_per_s=50.0, nvlink_gb_per_s=200.0)
    shares = balance(demands, topology)
    seconds: dict[tuple[bool, int], float] = {}
    rates = {False: 50e9, True: 200e9}

    def link(demand: Demand, rank: int) -> tuple[bool, int]:
        return topology.host_of[rank] == demand.host, rank

    for demand, share in zip(demands, shares, strict=True):
        assert share.min() >= 0
        assert share.sum() == pytest.approx(demand.nbytes)
        for rank, nbytes in zip(demand.replicas, share, strict=True):
            key = link(demand, rank)
            seconds[key] = seconds.get(key, 0.0) + nbytes / rates[key[0]]
    # The least possible maximum, by the duality of flows: over all sets of links, what no other link can carry.
    links = sorted({link(d, r) for d in demands for r in d.replicas})
    least = 0.0
    for size in range(1, len(links) + 1):
        for chosen in combinations(links, size):
            forced = sum(d.nbytes for d in demands if all(link(d, r) in chosen for r in d.replicas))
            least = max(least, forced / sum(rates[inside] for inside, _ in chosen))
    assert max(seconds.values()) <= 1.02 * least
    assert 0.98 * least <= least_possible(demands, shares, topology) <= least * (1 + 1e-9)


def replicated(
    shape: tuple[int, int], count: int, train: int, gen: int, topology: Topology, fan_out: bool | None = None
) -> Analysis:
    """The plan of weights that every rank of both sides holds or wants whole."""
    specs = [TensorSpec(f"w{i}", shape, BF16) for i in range(count)]
    everything = whole(specs)
    sides = Layouts(specs, [everything] * train, [everything] * gen).holdings()
    return analyse(specs, *sides, bucket_bytes=64 << 20, topology=topology, fan_out=fan_out)


def test_engine_copies_of_one_host_fan_out_among_themselves_where_the_trainer_is_the_bottleneck() -> None:
    across = Topology((0, 1, 1, 1, 1))
    analysis = replicated((512, 2048), 32, 1, 4, across)
    total = 32 * 512 * 2048 * 2
    assert analysis.fan_out
    assert analysis.pair_bytes[0].sum() == total, "each byte leaves the trainer once"
    direct = replicated((512, 2048), 32, 1, 4, across, fan_out=False)
    assert direct.pair_bytes[0].sum() == 4 * total
    assert analysis.predicted_seconds < 0.5 * direct.predicted_seconds
    assert analysis.bound_seconds == pytest.approx(total / 50e9, rel=0.01)


def test_copies_on_different_hosts_are_served_directly() -> None:
    assert not replicated((64, 64), 8, 2, 2, Topology((0, 0, 1, 2))).fan_out


def test_a_replica_in_the_engines_host_is_preferred_to_one_behind_the_network() -> None:
    analysis = replicated((64, 64), 64, 2, 1, Topology((0, 1, 0), 50.0, 450.0))
    near, far = analysis.pair_bytes[0, 2], analysis.pair_bytes[1, 2]
    assert near == pytest.approx(9 * far, rel=0.2)


def test_an_oversubscribed_host_uplink_moves_the_sending_to_other_hosts() -> None:
    # Host 0 has three replicas behind one thin uplink, host 1 has one.
    topology = Topology((0, 0, 0, 1, 2, 3, 4, 5), nic_gb_per_s=50.0, host_gb_per_s=50.0)
    analysis = replicated((64, 64), 64, 4, 4, topology, fan_out=False)
    sent = analysis.pair_bytes.sum(axis=1)
    assert sent[:3].sum() == pytest.approx(sent[3], rel=0.15)
    assert analysis.busiest_link_ratio <= 1.1


def test_a_bucket_too_small_for_all_peers_is_an_error_that_names_the_key() -> None:
    specs = [TensorSpec("up", (8, 4), BF16)]
    sides = Layouts(specs, [whole(specs)], [whole(specs)] * 4).holdings()
    with pytest.raises(PlanError, match=r"policy\.refit\.bucket_mb"):
        analyse(specs, *sides, bucket_bytes=100)


@pytest.mark.parametrize(
    "group",
    [
        HoldingGroup((((0, 9), (0, 4)),), BF16, np.array([0])),
        HoldingGroup((((0, 8),),), BF16, np.array([0])),
        HoldingGroup((((3, 3), (0, 4)),), BF16, np.array([0])),
    ],
)
def test_boxes_that_leave_their_tensor_are_refused_when_they_are_read(group: HoldingGroup) -> None:
    table = SpecTable([TensorSpec("up", (8, 4), BF16)])
    with pytest.raises(RefitMismatch, match="up"):
        HoldingsReader(table).holdings(0, Holdings(0, (group,)).to_parts())


# Many more positions than there are weights.
BOMB = base64.b64encode(zlib.compress(bytes(1 << 24))).decode()


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [None],
        [{}, None],
        [{}, {}],
        [{}, [[[[0, 1]]], "bfloat16", "eJxjYGAAAAAEAAE="]],
        [{}, [[[[0, 1]]], "bfloat16", "????"]],
        [{}, [[[[0, 1]]], "os.system", "eJxjYGAAAAAEAAE="]],
        [{"x": BOMB}],
        [{"x": 3}],
    ],
)
def test_malformed_holdings_are_refused(parts: list[object]) -> None:
    with pytest.raises(RefitMismatch, match="malformed"):
        HoldingsReader(SpecTable([TensorSpec("up", (8,), BF16)])).holdings(0, parts)


def test_many_experts_are_one_class_and_a_large_world_is_balanced() -> None:
    specs = [TensorSpec(f"e{e}.{p}", (32, 64), BF16) for e in range(64) for p in ("gate", "up")]
    dense = [TensorSpec(f"d{i}", (32, 64), BF16) for i in range(13)]
    every = [*specs, *dense]
    held = [whole([*specs[16 * ep : 16 * ep + 16], *dense]) for ep in range(8)]
    wanted = [{s.name: [((tp * 8, tp * 8 + 8), (0, 64))] for s in every} for tp in range(4)] * 4
    sides = Layouts(every, held, wanted).holdings()
    analysis = analyse(every, *sides, bucket_bytes=1 << 20, topology=Topology.blocks(8, 16, 8))
    assert len(analysis.classes) == 9
    assert analysis.busiest_link_ratio <= 1.1
    assert analysis.predicted_seconds >= analysis.bound_seconds
