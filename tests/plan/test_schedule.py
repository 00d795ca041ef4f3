"""Rounds: what every rank can hold, and what well-known layouts come to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.plan import Topology, analyse
from rlrefit.integration.plan.schedule import arrange, peers_at_a_time, slots
from rlrefit.recipes.plan.catalog import all_holdings, open_model, parse_gen, parse_train


@given(
    train=st.integers(1, 40),
    gen=st.integers(1, 40),
    density=st.floats(0.02, 1.0),
    seed=st.integers(0, 2**32 - 1),
    by_size=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_rank_has_more_peers_in_a_block_than_it_has_slots(
    train: int, gen: int, density: float, seed: int, by_size: bool
) -> None:
    random = np.random.default_rng(seed)
    amounts = random.integers(1, 1 << 30, (train, gen)) * (random.random((train, gen)) < density)
    blocks = arrange(amounts, by_size=by_size)
    np.testing.assert_array_equal(blocks >= 0, amounts > 0)
    most = 1
    for block in range(int(blocks.max()) + 1):
        here = blocks == block
        most = max(most, int(here.sum(axis=0).max()), int(here.sum(axis=1).max()))
    assert most <= slots(train, gen)
    assert peers_at_a_time(blocks) == most


@pytest.mark.parametrize(
    ("model", "train", "gen"),
    [
        ("qwen3-8b", "tp=8", "tp=16"),
        ("llama-3.1-405b", "tp=8,pp=14", "tp=16"),
        ("llama-3.1-405b", "tp=8,pp=16", "tp=8,pp=2,dp=4"),
        ("qwen3-235b-a22b", "tp=4,ep=32,pp=4", "tp=8,dp=2,ep=16"),
        ("qwen3-235b-a22b", "tp=4,pp=8,ep=16", "tp=8,dp=16"),
    ],
)
def test_rounds_of_well_known_layouts_come_near_the_speed_of_light(model: str, train: str, gen: str) -> None:
    opened, trainer, engine = open_model(model), parse_train(train), parse_gen(gen)
    specs = opened.specs()
    sources, destinations = all_holdings(opened, trainer, engine, {s.name: i for i, s in enumerate(specs)})
    topology = Topology.blocks(len(sources), len(destinations), 8)
    analysis = analyse(specs, sources, destinations, bucket_bytes=128 << 20, topology=topology)
    assert analysis.busiest_link_ratio <= 1.1
    assert analysis.predicted_seconds <= 1.2 * analysis.bound_seconds
