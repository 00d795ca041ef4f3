"""Refits between ranks that see weights by different axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitMismatch
from rlrefit.integration.layout import Axes, Fragment, box_of
from rlrefit.integration.weights.holdings import HoldingGroup, Holdings, HoldingsReader, SpecTable
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.weights.seen import in_common_axes

from .synthetic import BF16, SyntheticDestination, SyntheticSource, refit_versions, run_world

SPECS = [
    TensorSpec("gate_up", (4, 6, 8), BF16),
    TensorSpec("down", (4, 4, 6), BF16),
    TensorSpec("apart", (6, 3), BF16),
    TensorSpec("plain", (5,), BF16),
]
# Columns of gate and up alternate in the checkpoint; the trainer has them apart, and all of its matrices transposed.
ALTERNATING = Axes(((4,), (6,), (4, 2)), (0, 2, 3, 1))
TURNED = Axes(((4,), (4,), (6,)), (0, 2, 1))
# Tiles of a kernel, that hold a half of gate and up each.
TILED = Axes(((4,), (2, 3), (2, 4)), (0, 3, 1, 4, 2))
APART = Axes(((2, 3), (3,)), (1, 0, 2)), Axes(((3, 2), (3,)), (1, 0, 2))


def world() -> tuple[list[SyntheticSource], list[SyntheticDestination]]:
    """Two trainers share the experts, two engines cut their columns where none begins, and a third one holds tiles."""
    sources = [
        SyntheticSource(
            SPECS,
            {
                "gate_up": [((e, e + 1), (0, 4), (g, g + 1), (0, 6)) for e in experts for g in (0, 1)],
                "down": [((experts[0], experts[-1] + 1), (0, 6), (0, 4))],
                "apart": [((0, 3), (0, 2), (0, 3))],
                "plain": [((0, 5),)],
            },
            axes={"gate_up": ALTERNATING, "down": TURNED, "apart": APART[0]},
        )
        for experts in (range(2), range(2, 4))
    ]
    cut = [
        SyntheticDestination(
            SPECS,
            {
                "gate_up": [((0, 4), (0, 6), columns)],
                "down": [((0, 4), rows, (0, 6))],
                "apart": [((0, 6), (0, 3))],
                "plain": [((0, 5),)],
            },
        )
        for columns, rows in (((0, 3), (0, 1)), ((3, 8), (1, 4)))
    ]
    tiled = SyntheticDestination(
        SPECS,
        {"gate_up": [box_of(TILED.shape)], "apart": [box_of(APART[1].shape)], "plain": [((0, 5),)]},
        axes={"gate_up": TILED, "apart": APART[1]},
    )
    return sources, [*cut, tiled]


@pytest.mark.parametrize(
    "config",
    [
        RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport=transport, delta=delta)
        for transport, delta in (("p2p", "off"), ("golden", "off"), ("p2p", "always"))
    ],
    ids=lambda config: f"{config.transport} {config.delta}",
)
def test_weights_arrive_bit_for_bit_however_both_sides_see_them(config: RefitConfig):
    refits = refit_versions(1, 2, 3)

    def body(rank: int, session: Any, endpoint: Any) -> Any:
        if config.delta == "always":  # which builds on what the engine holds
            endpoint.poison = lambda: None
        manifest = session.engine.manifest
        return {e.spec.name: e.route for e in manifest}, refits(rank, session, endpoint)

    for found in run_world(*world(), body, config):
        assert not isinstance(found, BaseException), found
        routes, refitted = found
        assert routes == {"gate_up": "bulk", "down": "bulk", "apart": "misc", "plain": "bulk"}
        assert [wrong for _, wrong, _ in refitted] == [[], [], []]


def test_recorded_steps_tell_what_changed_of_weights_that_both_sides_see_otherwise():
    config = RefitConfig(
        bucket_mb=1, timeout_s=20.0, verify="full", transport="p2p", delta="always", delta_base="optimizer"
    )

    def body(rank: int, session: Any, endpoint: Any) -> Any:
        found = []
        for version in (1, 2, 3):
            if session.world.is_source:
                with session.recording_changes():
                    endpoint.set_version(version)
            record = session.refit(version)
            wrong = [] if session.world.is_source else endpoint.wrong(version)
            found.append((record.changed_share is not None, wrong))
        return found

    for found in run_world(*world(), body, config):
        assert found == [(False, []), (True, []), (True, [])]


def test_weights_whose_factors_do_not_nest_are_refused_and_no_others():
    specs = [TensorSpec("a", (6, 3), BF16), TensorSpec("b", (6, 3), BF16)]
    first, both = np.array([0]), np.array([0, 1])
    source = Holdings(0, (HoldingGroup((box_of(APART[0].shape),), BF16, both, APART[0]),))
    engine = Holdings(1, (HoldingGroup((box_of(APART[1].shape),), BF16, first, APART[1]),))
    plain = Holdings(2, (HoldingGroup((((0, 1), (0, 3)),), BF16, both),))
    seen = in_common_axes(specs, [source], [engine, plain])
    [[(_, refused)], *others] = [list(h.refused.items()) for h in (*seen.sources, *seen.destinations)]
    assert refused.tolist() == [0]
    assert others == [[], []]
    assert seen.axes == {"b": APART[0]}
    [left, moved] = seen.destinations[1].groups
    assert left.boxes == (((0, 1), (0, 3)),)
    assert (moved.boxes, moved.axes) == ((((0, 1), (0, 1), (0, 3)),), APART[0])


def test_axes_survive_the_rendezvous_and_those_of_another_shape_are_refused():
    table = SpecTable(SPECS[:1])
    fragment = Fragment(
        "gate_up", (4, 6, 8), box_of(TILED.shape), torch.empty(TILED.shape, dtype=BF16), axes=TILED
    )
    parts = Holdings.from_fragments(0, [fragment], {}, table.positions).to_parts()
    [read] = HoldingsReader(table).holdings(0, parts).groups
    assert (read.boxes, read.axes) == ((fragment.box,), TILED)
    with pytest.raises(RefitMismatch):
        HoldingsReader(SpecTable([TensorSpec("gate_up", (4, 8, 6), BF16)])).holdings(0, parts)
    with pytest.raises(RefitMismatch):
        HoldingsReader(table).holdings(0, [parts[0], [*parts[1][:3], [[[4], [6]], [0, 0]]]])


def test_one_rank_sees_a_weight_in_one_way():
    plain = Fragment("down", (4, 4, 6), ((0, 1), (0, 4), (0, 6)), torch.empty(1, 4, 6, dtype=BF16))
    turned = Fragment(
        "down", (4, 4, 6), ((1, 2), (0, 6), (0, 4)), torch.empty(1, 6, 4, dtype=BF16), axes=TURNED
    )
    with pytest.raises(RefitMismatch) as caught:
        Holdings.from_fragments(0, [plain, turned], {}, SpecTable(SPECS).positions)
    assert caught.value.parameter == "down"
