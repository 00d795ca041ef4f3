"""Live refits of every family that vLLM can build on CPUs: what it holds afterwards is what it loads itself."""

from __future__ import annotations

import itertools

import pytest
from vllm_family_ranks import FAMILIES, FamilyResult, refit_families, write_pair
from vllm_ranks import Case, Layout

from tests.spawn import run_ranks
from tests.vllm_processes import vllm_processes

pytestmark = pytest.mark.timeout(600)
SIZES = (1, 2)
CASES = [*itertools.product(FAMILIES, SIZES)]
_DELTA_NET = {"linear_attn.A_log", "linear_attn.dt_bias"}
# Parts of the names of what takes vLLM's own loader; none of the other families does.
MISC = {
    # Turned round as they are loaded, and an attention layer that holds a weight itself.
    "gpt_oss": {"mlp.experts.", "self_attn.sinks"},
    # Mixers compute with what they make of their weights; a router in FP32, which shares its bias with its experts.
    "nemotron_h": {
        "mixer.A_log",
        "mixer.D",
        "mixer.dt_bias",
        "mixer.norm.weight",
        "mixer.gate.",
        "mixer.experts.",
    },
    "qwen3_next": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET,
    "qwen3_5_moe-stacked": _DELTA_NET,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[FamilyResult]]:
    """By family and tensor parallel size, for each rank; every size is one group of processes."""
    pairs = {family: write_pair(tmp_path_factory.mktemp(family), family) for family in FAMILIES}
    found = {}
    for size in SIZES:
        cases = [Case(*pair, Layout(tensor=size)) for pair in pairs.values()]
        by_rank = run_ranks(refit_families, size, cases, timeout_s=550, made_by=vllm_processes)
        found |= {
            (family, size): list(ranks)
            for family, ranks in zip(pairs, zip(*by_rank, strict=True), strict=True)
        }
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
    parts = MISC.get(family, set())
    for rank in results[family, size]:
        assert len(rank.bulk) > 20
        assert {part for part in parts for name in rank.misc if part in name} == parts
        assert [name for name in rank.misc if not any(part in name for part in parts)] == []
