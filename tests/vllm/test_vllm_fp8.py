"""FP8 engines fed with weights that the trainer has quantized: what they hold is what vLLM loads from such a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_fp8_ranks import Fp8Result, refit_fp8, refit_under_verl, write_case

from examples.verl.on_cpus import named_vllm
from rlrefit.integration.quantize.formats import Fp8Blockwise
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.spawn import PATIENT_S, run_ranks
from tests.vllm_processes import vllm_processes

CASES = {
    "dense": {},
    "dense, rearranged": {"rearranged": True},
    "experts": {"experts": True},
    "experts in parallel": {"experts": True, "in_parallel": True},
    "experts, another library's": {"experts": True, "replaced": True},
}
# Post-load functions that verl has wrapped: refits do with them what they do with vLLM's own.
VERL = {"dense, rearranged, under verl": {"rearranged": True}, "experts, under verl": {"experts": True}}
# Each has parts that other cases have too: attention beside experts is dense, and in place; kernels that rearrange, and verl's
# functions, are told from others by the same look at each.
_MORE = {"dense", "dense, rearranged, under verl"}


ALL = left_to_all([*CASES, *VERL], _MORE)
IN_PLACE = left_to_all(["dense", "experts", "experts in parallel", "experts, under verl"], _MORE)
LAYER = "model.layers.0"
Results = dict[str, list[Fp8Result]]


def refit_all_cases(folder: Path) -> Results:
    return _refit(folder, [case for case in CASES if case not in _MORE])


@of_all_tests
def refit_more_cases(folder: Path) -> Results:
    return _refit(folder, [case for case in CASES if case in _MORE])


def _refit(folder: Path, cases: list[str]) -> Results:
    """In one pair of processes."""
    listed = [write_case(folder / name, **CASES[name]) for name in cases]
    by_rank = run_ranks(refit_fp8, 2, listed, timeout_s=PATIENT_S, made_by=vllm_processes)
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def refit_verls_cases(folder: Path) -> Results:
    return _refit_under_verl(folder, [case for case in VERL if case not in _MORE])


@of_all_tests
def refit_more_of_verls_cases(folder: Path) -> Results:
    return _refit_under_verl(folder, [case for case in VERL if case in _MORE])


def _refit_under_verl(folder: Path, cases: list[str]) -> Results:
    """In another one, which verl patches."""
    listed = [write_case(folder / name, **VERL[name]) for name in cases]
    path = named_vllm(folder)
    by_rank = run_ranks(refit_under_verl, 2, listed, path, timeout_s=PATIENT_S, made_by=vllm_processes)
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


AHEAD = (refit_all_cases, refit_verls_cases, refit_more_cases, refit_more_of_verls_cases)


@pytest.fixture(scope="module")
def usual(found_ahead: FoundAhead) -> Results:
    return found_ahead.by(refit_all_cases) | found_ahead.by(refit_verls_cases)


@pytest.fixture(scope="module")
def whole(usual: Results, found_ahead: FoundAhead) -> Results:
    return usual | found_ahead.by(refit_more_cases) | found_ahead.by(refit_more_of_verls_cases)


@pytest.fixture
def results(request: pytest.FixtureRequest) -> Results:
    full = request.node.get_closest_marker("full") is not None
    found: Results = request.getfixturevalue("whole" if full else "usual")
    return found


@pytest.mark.parametrize("case", ALL)
def test_codes_and_scales_of_the_trainer_make_the_engine_that_vllm_loads(results: Results, case: str):
    for rank in results[case]:
        assert not any(rank.differing.values()), rank.differing
        assert len(rank.differing) == 16
        assert rank.kept[0] == rank.kept[1]


@pytest.mark.parametrize("case", ALL)
def test_refits_are_sparse_since_vllm_leaves_what_is_written_in_place(results: Results, case: str):
    assert [rank.sparse for rank in results[case]] == [[False, True, True, True]] * 2


@pytest.mark.parametrize("case", IN_PLACE)
def test_codes_and_scales_go_shard_to_shard_into_the_live_parameters(results: Results, case: str):
    first, second = results[case]
    for rank in (first, second):
        assert rank.misc == {}
        assert {*rank.own, *(f"{name}_scale_inv" for name in rank.own)} < {*rank.bulk}
    assert first.routes["nccl_xfer"] == {"bulk": len({*first.bulk, *second.bulk}), "misc": 0, "unused": 0}


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("dense, rearranged", "of Rearranging may rewrite the layout"),
        pytest.param(
            "dense, rearranged, under verl",
            "of Rearranging may rewrite the layout",
            marks=pytest.mark.full,
        ),
        ("experts, another library's", "was replaced by a function of vllm_fp8_ranks"),
    ],
)
def test_what_may_be_processed_after_loading_takes_the_misc_path_with_all_codes_and_scales(
    results: Results, case: str, why: str
):
    for rank in results[case]:
        assert {*rank.misc} == {*rank.own, *(f"{name}_scale_inv" for name in rank.own)}
        assert all(why in reason for reason in rank.misc.values())
    quantized = {name for rank in results[case] for name in rank.own}
    assert results[case][0].routes["nccl_xfer"]["misc"] == 2 * len(quantized)


@pytest.mark.parametrize("case", left_to_all(["dense", "experts", "experts in parallel"], _MORE))
def test_the_engine_names_what_it_holds_quantized_and_each_rank_its_own_experts(results: Results, case: str):
    attention = {f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo"}
    parts = ("gate", "up", "down")
    experts = [{f"{LAYER}.mlp.experts.{e}.{part}_proj.weight" for part in parts} for e in range(4)]
    of_ranks = {
        "dense": [{f"{LAYER}.mlp.{part}_proj.weight" for part in parts}] * 2,
        "experts": [set.union(*experts)] * 2,
        "experts in parallel": [experts[0] | experts[1], experts[2] | experts[3]],
    }[case]
    assert [rank.own.keys() for rank in results[case]] == [attention | own for own in of_ranks]
    assert {format for rank in results[case] for format in rank.own.values()} == {Fp8Blockwise()}


@pytest.mark.parametrize("case", ALL)
def test_the_worker_extension_tells_whoever_sends_full_tensors_the_same(results: Results, case: str):
    assert all(rank.told == rank.own for rank in results[case])


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize(
    ("brought", "told"),
    [
        ("BF16", "trainer_quantize_fp8=true"),
        ("no scales", f"{LAYER}.self_attn.o_proj.weight_scale_inv"),
        ("no codes", f"{LAYER}.self_attn.o_proj.weight;"),
    ],
)
def test_weights_without_their_scales_and_scales_without_their_codes_are_refused_by_name(
    results: Results, case: str, brought: str, told: str
):
    assert all(told in rank.refused[brought] for rank in results[case])
