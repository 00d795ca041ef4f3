"""FP8 blocks and MXFP8 in SGLang's models: what they hold after refits is what SGLang loads from a checkpoint of the same codes and scales.

``make test-sglang`` runs them (docs/sglang.md).
"""

from __future__ import annotations

import importlib.util

import pytest

from rlrefit.integration.quantize.formats import Fp8Blockwise, Mxfp8
from tests.spawn import run_ranks

from .fp8_ranks import CASES, MXFP8_EXPERTS, Fp8Case, Fp8Result, refit_fp8, written
from .models import matrices

pytestmark = [
    pytest.mark.timeout(900),  # SGLang loads for a minute where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]

OCCASIONS = {f"{engine} {refit}" for engine in ("nccl_xfer", "packed_broadcast") for refit in range(3)} | {
    f"sparse {refit}" for refit in range(4)
}
BLACKWELL = [case for case in CASES if "Blackwell" in case]
MXFP8 = [case for case in CASES if "MXFP8" in case]
SHUFFLED = "dense, MXFP8, TRT-LLM"
IN_PLACE = [case for case in CASES if "unknown" not in case and case != SHUFFLED]


Results = dict[str, list[Fp8Result]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Fp8Case]:
    folder = tmp_path_factory.mktemp("checkpoints")
    refused = {MXFP8_EXPERTS: {"experts": True, "mxfp8": "deep_gemm", "runner": "deep_gemm", "refused": True}}
    return {name: written(folder / name, **options) for name, options in {**CASES, **refused}.items()}


@pytest.fixture(scope="module")
def results(cases: dict[str, Fp8Case]) -> Results:
    """All cases in one pair of processes."""
    by_rank = run_ranks(refit_fp8, 2, 2, list(cases.values()), timeout_s=850)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(cases)}


@pytest.fixture(scope="module")
def alone(cases: dict[str, Fp8Case]) -> Results:
    """MXFP8 on one rank."""
    [found] = run_ranks(refit_fp8, 1, 1, [cases[name] for name in MXFP8], timeout_s=850)
    return {name: [result] for name, result in zip(MXFP8, found, strict=True)}


@pytest.mark.parametrize("case", MXFP8)
def test_one_rank_in_mxfp8_holds_after_refits_what_sglang_loads(alone: Results, case: str) -> None:
    [rank] = alone[case]
    assert rank.differing.keys() == OCCASIONS
    assert not any(rank.differing.values()), rank.differing
    assert rank.moved == []
    assert bool(rank.reasons) == (case == SHUFFLED)


@pytest.mark.parametrize("case", CASES)
def test_refits_leave_the_bytes_that_sglang_loads_from_a_checkpoint_where_they_were(
    results: Results, case: str
) -> None:
    for rank in results[case]:
        assert rank.differing.keys() == OCCASIONS
        assert not any(rank.differing.values()), rank.differing
        assert not any(rank.other_numbers.values()), rank.other_numbers
        assert rank.moved == []


@pytest.mark.parametrize("case", CASES)
def test_refits_are_sparse_unless_sglang_quantizes_codes_once_more(results: Results, case: str) -> None:
    sparse = "quantized before" not in case
    assert [rank.sparse for rank in results[case]] == [[False, sparse, sparse, sparse]] * 2


@pytest.mark.parametrize("case", IN_PLACE)
def test_codes_and_scales_go_shard_to_shard(results: Results, case: str) -> None:
    for rank in results[case]:
        assert rank.reasons == {}
        assert rank.routes["misc"] == rank.routes["unused"] == 0


def test_a_kernel_that_is_not_known_takes_sglangs_loader_and_its_processing(
    results: Results,
) -> None:
    for rank in results["dense, unknown kernel"]:
        assert rank.reasons.keys() == {*rank.own, *(f"{name}_scale_inv" for name in rank.own)}
        assert all("for _shuffling may rewrite the layout" in reason for reason in rank.reasons.values())
        assert rank.routes["misc"] == 2 * len(rank.own)


def test_codes_that_a_kernel_shuffles_take_sglangs_loader_and_its_processing(results: Results) -> None:
    for rank in results[SHUFFLED]:
        assert rank.reasons.keys() == {*rank.own, *(f"{name}_scale_inv" for name in rank.own)}
        assert all("shuffled after loading" in reason for reason in rank.reasons.values())


def test_experts_in_mxfp8_are_refused_by_name(results: Results) -> None:
    for rank in results[MXFP8_EXPERTS]:
        assert "mlp.experts" in rank.refused["the engine"]
        assert "MXFP8" in rank.refused["the engine"]


@pytest.mark.parametrize("case", BLACKWELL)
def test_scales_are_packed_where_deepgemm_wants_them_so(results: Results, case: str) -> None:
    for rank in results[case]:
        assert rank.packed == 2 * 4  # of two layers: attention's two, and gate and up in one beside down
        assert set(rank.own.values()) <= {Fp8Blockwise(ue8m0=True)}


@pytest.mark.parametrize("case", ["dense", "experts", "dense, Blackwell", *MXFP8])
def test_the_engine_names_what_it_holds_in_blocks_and_nothing_else(results: Results, case: str) -> None:
    names = matrices(case == "experts")
    for rank in results[case]:
        assert rank.own.keys() == names
        made = (
            Mxfp8(scale_name_end="_scale_inv") if case in MXFP8 else Fp8Blockwise(ue8m0="Blackwell" in case)
        )
        assert set(rank.own.values()) == {made}


@pytest.mark.parametrize("case", CASES)
def test_what_would_leave_codes_without_their_scales_is_refused_by_name(results: Results, case: str) -> None:
    for rank in results[case]:
        # Its loader would cast the numbers.
        assert "trainer_quantize_fp8=true" in rank.refused["BF16"]
        for missing, parameter in (("no scales", "weight_scale_inv"), ("no codes", "weight")):
            assert f"of model.layers.0.self_attn.o_proj.{parameter}; they" in rank.refused[missing]
        assert rank.refused["SGLang's own loader"] == "", "full tensors of codes and scales are taken"
        # Experts of which SGLang makes copies once.
        assert ("MegaMoE computes with copies" in rank.refused["MegaMoE"]) == ("experts" in case)
        if case in MXFP8:
            # As 0.5.23 has it where DeepGEMM's input comes to FlashInfer's layers.
            assert "layer model.layers.0.self_attn.o_proj: what" in rank.refused["another copy"]
            continue
        for kept in ("weight_scale_inv_swizzled", "power_of_two"):
            assert "layer model.layers.0.self_attn.o_proj: SGLang " in rank.refused[kept]
