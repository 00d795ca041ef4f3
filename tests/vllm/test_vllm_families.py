"""Live refits of every family that vLLM can build on CPUs: what it holds afterwards is what it loads itself."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from vllm_family_ranks import FAMILIES, FamilyResult, refit_families, write_pair
from vllm_ranks import Case, Layout

from tests.ahead import FoundAhead
from tests.families.checkpoints import config_of
from tests.families.expected import VLLM, is_of, is_prediction
from tests.spawn import run_ranks
from tests.vllm_processes import vllm_processes

SIZES = (1, 2)
CASES = [*itertools.product(FAMILIES, SIZES)]


def refit_all_cases(folder: Path) -> dict[tuple[str, int], list[FamilyResult]]:
    """By family and tensor parallel size, for each rank; every size is one group of processes."""
    pairs = {family: write_pair(folder / family, family) for family in FAMILIES}
    found = {}
    for size in SIZES:
        cases = [Case(*pair, Layout(tensor=size)) for pair in pairs.values()]
        by_rank = run_ranks(refit_families, size, cases, timeout_s=550, made_by=vllm_processes)
        found |= {
            (family, size): list(ranks)
            for family, ranks in zip(pairs, zip(*by_rank, strict=True), strict=True)
        }
    return found


AHEAD = (refit_all_cases,)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> dict[tuple[str, int], list[FamilyResult]]:
    found: dict[tuple[str, int], list[FamilyResult]] = found_ahead.by(refit_all_cases)
    return found


@pytest.mark.parametrize(("family", "size"), CASES)
def test_a_poisoned_model_is_after_a_refit_what_vllm_loads_there_and_back_and_through_its_loader(
    results, family: str, size: int
) -> None:
    for rank in results[family, size]:
        assert rank.differing == {"there": [], "back": [], "all through the loader": []}
        assert rank.alike == []


@pytest.mark.parametrize(("family", "size"), CASES)
def test_all_that_vllm_holds_as_it_is_loaded_goes_in_place(results, family: str, size: int) -> None:
    # Mixtral stands in no table: no trainer of these tests has it.
    parts = VLLM.misc.get(family, ())
    layers = config_of(family, short=True)["num_hidden_layers"]
    for rank in results[family, size]:
        assert len(rank.bulk) > 20
        assert {part for part, _ in parts for name in rank.misc if part in name} == {
            part for part, _ in parts
        }
        assert [name for name in rank.misc if not is_of(name, parts)] == []
        assert [name for name in rank.unused if not is_prediction(name, layers)] == []
        assert bool(rank.unused) == (family == "deepseek_v3")


def test_every_family_of_the_table_is_refitted_here() -> None:
    assert {*VLLM.misc, "mixtral"} == {*FAMILIES}
