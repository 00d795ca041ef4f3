"""Every mapping of a small Megatron trainer to small vLLM engines, bit for bit, over gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlrefit.recipes.plan.catalog import GenLayout, TrainLayout, violations
from tests.ahead import FoundAhead
from tests.spawn import PATIENT_S, run_alone

from .mappings import Worlds, wrong_refits
from .matrix import GEN, TRAIN, model, stored, wrong_mappings


def name_of(layout: TrainLayout | GenLayout) -> str:
    sizes = {key: getattr(layout, key, None) for key in ("tp", "ep", "pp", "etp", "dp")}
    return "-".join(f"{key}{size}" for key, size in sizes.items() if size is not None)


EXPERTS = [("experts", train) for train in TRAIN]
DENSE = [("dense", train) for train in TRAIN if train.ep == train.etp == 1]


def try_all_cases(folder: Path) -> dict[tuple[str, TrainLayout], str]:
    """What is wrong with each case; two processes share them, since the ranks of one are its threads."""

    def wrong(cases: list[tuple[str, TrainLayout]]) -> Any:
        return zip(cases, run_alone(wrong_mappings, cases, environment={}, timeout_s=PATIENT_S), strict=True)

    cases = EXPERTS + DENSE
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


AHEAD = (try_all_cases, try_any_sizes)


@pytest.fixture(scope="module")
def wrong(found_ahead: FoundAhead) -> dict[tuple[str, TrainLayout], str]:
    return found_ahead.by(try_all_cases)


@pytest.mark.parametrize("case", EXPERTS + DENSE, ids=lambda case: f"{case[0]}-{name_of(case[1])}")
def test_every_mapping_lands_bit_for_bit_by_p2p_and_by_golden(
    wrong: dict[tuple[str, TrainLayout], str], case: tuple[str, TrainLayout]
) -> None:
    assert wrong[case] == ""


def test_mappings_land_bit_for_bit_whatever_the_sizes(found_ahead: FoundAhead) -> None:
    found_ahead.by(try_any_sizes)
