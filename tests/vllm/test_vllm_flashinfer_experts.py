"""Unquantized experts that vLLM holds for FlashInfer's CUTLASS: gate and up, swapped after loading, are refitted in place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_vllm_layouts import FAMILIES, OWN_PARTS, UNPADDED, Results, refit_on
from vllm_flashinfer_ranks import SHAPES, place_in_random_shapes, refit_after_reload, refuse
from vllm_ranks import Case, Layout, RankResult

from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.families.checkpoints import write_pair
from tests.families.expected import VLLM, is_of
from tests.spawn import run_ranks
from tests.vllm_processes import vllm_processes

LAYOUTS = {"TP1": Layout(), "TP2": Layout(tensor=2), "EP2": Layout(tensor=2, expert=True)}
# Experts without gates, whose order stays.
GATELESS = "nemotron_h"
# All that have experts, but for GPT-OSS: its loader writes gate and up at once, in rows by turns.
WITH_EXPERTS = (
    *("qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe-stacked", "qwen3_5_moe-vl", "qwen3_vl_moe"),
    *("bailing_moe_v2", "mixtral", "minimax_m2", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "glm_moe_dsa"),
    *("gemma4-moe", GATELESS, f"{GATELESS}-latent"),
)
CASES = [f"{family} {layout}" for family in WITH_EXPERTS for layout in LAYOUTS]
# Names of single experts and of all in one tensor; experts that two ranks cut or hold apart; without gates. One rank takes whole what
# two take in part.
_USUAL = {"qwen3_moe TP2", "qwen3_moe EP2", "qwen3_5_moe-stacked TP2", f"{GATELESS} TP2"}
_MORE = {*CASES} - _USUAL
ALL = left_to_all(CASES, _MORE)


@dataclass(frozen=True)
class Asked:
    """What was found out of single layers: how many orders of random shapes with and without gates, and reasons for none.

    And what differs after vLLM's own reload and a refit in place.
    """

    placed: list[int]
    refused: dict[str, str | None]
    differing: list[str]


def refit_usual_cases(folder: Path) -> Results:
    return _refit(folder, _USUAL)


@of_all_tests
def refit_more_cases(folder: Path) -> Results:
    return _refit(folder, _MORE)


def ask_of_layers(folder: Path) -> Asked:
    cases = [_case(f"{family} TP1", folder) for family in ("qwen3_moe", GATELESS)]
    [placed] = run_ranks(place_in_random_shapes, 1, cases, made_by=vllm_processes)
    [refused] = run_ranks(refuse, 1, cases[0], made_by=vllm_processes)
    [differing] = run_ranks(refit_after_reload, 1, cases[0], made_by=vllm_processes)
    return Asked(placed, refused, differing)


AHEAD = (refit_usual_cases, ask_of_layers, refit_more_cases)


def _refit(folder: Path, names: set[str]) -> Results:
    cases = {name: _case(name, folder) for name in sorted(names)}
    found = Results()
    for ranks in (1, 2):
        found |= refit_on(ranks, {name: case for name, case in cases.items() if case.layout.ranks == ranks})
    return found


def _case(name: str, folder: Path) -> Case:
    family, _, layout = name.partition(" ")
    pair = write_pair(
        family, folder / name.replace(" ", "_"), UNPADDED | FAMILIES[family], router_dtype=torch.float32
    )
    return Case(*pair, LAYOUTS[layout], family=True, flashinfer=True)


@pytest.fixture
def ranks(case: str, found_ahead: FoundAhead) -> list[RankResult]:
    found: Results = found_ahead.by(refit_more_cases if case in _MORE else refit_usual_cases)
    return found[case]


@pytest.fixture(scope="module")
def asked(found_ahead: FoundAhead) -> Asked:
    found: Asked = found_ahead.by(ask_of_layers)
    return found


@pytest.mark.parametrize("case", ALL)
def test_a_refit_gives_what_vllm_loads_and_rearranges_in_place_and_by_its_loader(ranks: list[RankResult]):
    for rank in ranks:
        assert rank.differing == {"there": [], "back": [], "all through the loader": []}
        assert rank.alike == []


@pytest.mark.parametrize("case", ALL)
def test_all_experts_go_in_place(ranks: list[RankResult], case: str):
    parts = (*VLLM.misc.get(case.partition(" ")[0], ()), *OWN_PARTS)
    for rank in ranks:
        assert [name for name in rank.misc if not is_of(name, parts)] == []
        assert [name for name in rank.misc if ".experts." in name] == []
        assert [name for name in rank.bulk if ".experts." in name]


def test_weights_of_random_shapes_are_placed_as_vllm_places_them(asked: Asked):
    gated, gateless = asked.placed
    assert gated > SHAPES / 2
    assert gateless == 0


def test_a_refit_after_vllms_own_reload_writes_what_the_kernel_computes_with(asked: Asked):
    assert asked.differing == []


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("keep_a_copy", "own"),
        ("keep_another_beside", "sums"),
        ("scale", "changed"),
        ("turn_the_live_one", "live ones"),
        ("have_communicators", "communicators"),
        ("pad", "padded"),
    ],
)
def test_a_layer_of_which_more_is_made_than_another_order_is_refused_with_the_reason(
    asked: Asked, what: str, told: str
):
    assert told in (asked.refused[what] or "")


@pytest.mark.parametrize("what", ["have_another_kernel", "have_another_backend"])
def test_other_kernels_are_not_asked(asked: Asked, what: str):
    assert asked.refused[what] is None
