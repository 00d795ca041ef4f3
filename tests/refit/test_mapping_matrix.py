"""Every mapping of a small Megatron trainer to small vLLM engines, bit for bit, over gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlrefit.recipes.plan.catalog import GenLayout, TrainLayout, violations
from tests.ahead import FoundAhead, of_all_tests
from tests.spawn import PATIENT_S, run_alone

from .mappings import Worlds, wrong_refits
from .matrix import GEN, TRAIN, covering, engines_of, model, stored, wrong_mappings


def name_of(layout: TrainLayout | GenLayout) -> str:
    sizes = {key: getattr(layout, key, None) for key in ("tp", "ep", "pp", "etp", "dp")}
    return "-".join(f"{key}{size}" for key, size in sizes.items() if size is not None)


EXPERTS = [("experts", train) for train in TRAIN]
DENSE = [("dense", train) for train in TRAIN if train.ep == train.etp == 1]


Wrong = dict[tuple[str, TrainLayout], str]


def try_covering(folder: Path) -> Wrong:
    """What is wrong with each case's mappings that each change runs."""
    return _try([(kind, train, covering(kind, train)) for kind, train in EXPERTS + DENSE])


@of_all_tests
def try_rest(folder: Path) -> Wrong:
    """And with all others."""
    return _try([("experts", train, _rest(train)) for _, train in EXPERTS])


def _rest(train: TrainLayout) -> list[GenLayout]:
    return [gen for gen in engines_of("experts") if gen not in covering("experts", train)]


def _try(cases: list[tuple[str, TrainLayout, list[GenLayout]]]) -> Wrong:
    """Two processes share the cases, since the ranks of one are its threads."""

    def wrong(cases: list[tuple[str, TrainLayout, list[GenLayout]]]) -> Any:
        found = run_alone(wrong_mappings, cases, environment={}, timeout_s=PATIENT_S)
        return zip([(kind, train) for kind, train, _ in cases], found, strict=True)

    with ThreadPoolExecutor(2) as pool:
        return dict(chain.from_iterable(pool.map(wrong, [cases[::2], cases[1::2]])))


@given(
    train=st.sampled_from(TRAIN),
    gen=st.sampled_from(GEN),
    groups=st.sampled_from([1, 2, 4]),
    per_group=st.sampled_from([1, 3]),
    width=st.integers(1, 5),
    experts=st.sampled_from([4, 8]),
    inner=st.sampled_from([4, 8, 12]),
    vocabulary=st.integers(1, 40),
    hidden=st.integers(1, 17),
    bucket=st.integers(1 << 10, 1 << 15),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def _mapping_lands(worlds: Worlds, train: TrainLayout, gen: GenLayout, bucket: int, **sizes: int) -> None:
    small = model(**sizes)
    assume(not violations(small, train) and not violations(small, gen))
    mapping = stored(small, train, gen, bucket, "full")
    assert wrong_refits(worlds, mapping, ("p2p", "golden"), (1, 2)) == []


def try_any_sizes(folder: Path) -> None:
    """Raises with the smallest example that fails."""
    run_alone(_try_any_sizes, environment={}, timeout_s=PATIENT_S)


def _try_any_sizes() -> None:
    worlds = Worlds()
    try:
        _mapping_lands(worlds)
    finally:
        worlds.close()


AHEAD = (try_covering, try_any_sizes, try_rest)


@pytest.fixture(scope="module")
def wrong(found_ahead: FoundAhead) -> Wrong:
    return found_ahead.by(try_covering)


def test_any_two_sizes_of_a_trainer_with_experts_meet_every_engine_and_all_test_the_rest() -> None:
    met = {
        (sizes, gen)
        for _, train in EXPERTS
        for sizes in combinations(_sizes(train), 2)
        for gen in covering("experts", train)
    }
    pairs = {sizes for _, train in EXPERTS for sizes in combinations(_sizes(train), 2)}
    assert met == {(sizes, gen) for sizes in pairs for gen in GEN}
    assert all({*covering("experts", train), *_rest(train)} == {*GEN} for _, train in EXPERTS)
    assert all(covering("dense", train) == engines_of("dense") for _, train in DENSE)


def _sizes(train: TrainLayout) -> list[tuple[str, int]]:
    return [(key, getattr(train, key)) for key in ("tp", "ep", "pp", "etp")]


@pytest.mark.parametrize("case", EXPERTS + DENSE, ids=lambda case: f"{case[0]}-{name_of(case[1])}")
def test_every_mapping_lands_bit_for_bit_by_p2p_and_by_golden(
    wrong: Wrong, case: tuple[str, TrainLayout]
) -> None:
    assert wrong[case] == ""


@pytest.mark.full
@pytest.mark.parametrize("train", [train for _, train in EXPERTS], ids=name_of)
def test_all_other_mappings_of_experts_land_bit_for_bit_too(
    train: TrainLayout, found_ahead: FoundAhead
) -> None:
    assert found_ahead.by(try_rest)["experts", train] == ""


def test_mappings_land_bit_for_bit_whatever_the_sizes(found_ahead: FoundAhead) -> None:
    found_ahead.by(try_any_sizes)
