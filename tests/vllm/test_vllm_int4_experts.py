"""INT4 engines with experts fed with weights that the trainer has quantized: what they hold is what vLLM loads of such a checkpoint.

`make test-engines` has them with other releases, whose experts' parameters are other ones.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm_fp8_ranks import Fp8Result, refit_fp8, refit_int4_and_cut, write_int4_case, write_kimi_case
from vllm_int4 import CPU, MARLIN, has_one_method_of_experts
from vllm_int4_checks import by_case, check_bytes, check_in_place, check_refusals, check_sparse, codes_of

from rlrefit.integration.quantize.formats import Int4
from rlrefit.recipes.rollout.arguments import int4
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.gpu.vllm_checkpoints import quantize_to_int4
from tests.spawn import PATIENT_S, run_ranks
from tests.vllm_processes import vllm_processes

# Kernel, group, and how the model is made. Linear layers are in INT4 too; beside Triton's experts they have the CPU's kernel.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Marlin": (MARLIN, 32, {}),
    "Marlin, stages": (MARLIN, 128, {"ranks": 1}),
    "Triton": (CPU, 32, {}),
}
# Experts alone are in INT4, by their kernel.
KIMI = {
    "Kimi-K2.5, Marlin": ("kimi_k25", MARLIN),
    "Kimi-K2.5, Triton": ("kimi_k25", CPU),
    "Kimi-K2, Marlin": ("kimi_k2", MARLIN),
}
# All matrices of its decoder layers are, as recipes have it, and with them what latent attention makes of one of them.
LATENT = "Kimi-K2, latent attention"
# Left to make test-engines and make test-all: Kimi-K2.5 has Marlin's experts, a Qwen Triton's, and linear layers in INT4 a module of
# their own.
_MORE = {"Marlin", "Marlin, stages", "Kimi-K2, Marlin", "Kimi-K2.5, Triton"}
ALL = left_to_all([*CASES, *KIMI, LATENT], _MORE)
Results = dict[str, list[Fp8Result]]
# Of two ranks each has 96 columns of experts' second matrix, which cuts groups of 64.
CUT = {"experts": True, "width": 192}


def refit_int4_experts(folder: Path) -> tuple[Results, list[str]]:
    """In one pair of processes; beside the results what each rank told of experts whose groups are cut."""
    cases = sorted({*CASES, *KIMI, LATENT} - _MORE)
    cut = write_int4_case(folder / "cut", CPU, int4(64), **CUT)
    listed = [_written(folder, name) for name in cases]
    by_rank = run_ranks(refit_int4_and_cut, 2, listed, cut, timeout_s=PATIENT_S, made_by=vllm_processes)
    results, told = zip(*by_rank, strict=True)
    return by_case(cases, results), list(told)


@of_all_tests
def refit_more_int4_experts(folder: Path) -> Results:
    cases = sorted(_MORE)
    listed = [_written(folder, name) for name in cases]
    by_rank = run_ranks(refit_fp8, 2, listed, timeout_s=PATIENT_S, made_by=vllm_processes)
    return by_case(cases, by_rank)


AHEAD = (refit_int4_experts, refit_more_int4_experts)


def _written(folder: Path, name: str) -> Any:
    if name in KIMI:
        return write_kimi_case(folder / name, *KIMI[name])
    if name == LATENT:
        return write_kimi_case(folder / name, "kimi_k2", CPU, partial(quantize_to_int4, config=int4(32)))
    kernel, group, options = CASES[name]
    return write_int4_case(folder / name, kernel, int4(group), experts=True, **options)


@pytest.fixture
def ranks(case: str, found_ahead: FoundAhead) -> list[Fp8Result]:
    """What each rank of a case saw."""
    results: Results = (
        found_ahead.by(refit_more_int4_experts) if case in _MORE else found_ahead.by(refit_int4_experts)[0]
    )
    return results[case]


@pytest.mark.parametrize("case", ALL)
def test_codes_and_scales_of_the_trainer_make_the_engine_that_vllm_loads(
    ranks: list[Fp8Result], case: str
) -> None:
    check_bytes(ranks)


@pytest.mark.parametrize("case", left_to_all(CASES, _MORE))
def test_codes_and_scales_go_shard_to_shard_into_the_live_parameters(
    ranks: list[Fp8Result], case: str
) -> None:
    check_in_place(ranks)
    for rank in ranks:
        assert {*rank.own.values()} == {Int4(CASES[case][1])}
        assert len([name for name in rank.own if ".experts." in name]) == 12
        assert len(rank.own) == 4 + 12


@pytest.mark.parametrize("case", left_to_all(KIMI, _MORE))
def test_of_kimi_experts_arrive_as_codes_and_all_else_in_bf16_shard_to_shard(
    ranks: list[Fp8Result], case: str
) -> None:
    check_in_place(ranks)
    for rank in ranks:
        assert {*rank.own.values()} == {Int4(32)}
        assert len(rank.own) == 12
        assert all(".mlp.experts." in name for name in rank.own)
        plain = {*rank.bulk} - codes_of(rank)
        parts = ["self_attn.kv_b_proj", "shared_experts.down_proj", "layers.0.mlp.up_proj", "lm_head"]
        if KIMI[case][0] == "kimi_k25":
            parts += ["vision_tower.encoder.blocks.1.wqkv", "mm_projector.proj.2"]
        for part in parts:
            assert any(name.endswith(f"{part}.weight") for name in plain)


def test_latent_attention_in_int4_arrives_as_codes_shard_to_shard(found_ahead: FoundAhead) -> None:
    ranks = found_ahead.by(refit_int4_experts)[0][LATENT]
    check_in_place(ranks)
    for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        assert all(name in rank.own for rank in ranks)
        assert {f"{name}_packed", f"{name}_scale"} <= {*ranks[0].bulk}


def test_experts_whose_shards_cut_groups_are_refused(found_ahead: FoundAhead) -> None:
    _, told = found_ahead.by(refit_int4_experts)
    # Releases from 0.26 on refuse them themselves, as they load.
    assert all(one.startswith(("RefitError", "ValueError")) for one in told)
    assert all("group" in one for one in told)


@pytest.mark.parametrize("case", ALL)
def test_refits_are_sparse_only_where_vllm_leaves_all_in_the_order_in_which_it_lands(
    ranks: list[Fp8Result], case: str
) -> None:
    # All but Kimi's have linear layers that it puts in order.
    in_place = case == "Kimi-K2.5, Triton" and has_one_method_of_experts()
    check_sparse(ranks, in_place)


@pytest.mark.parametrize("case", ALL)
def test_weights_without_their_scales_and_scales_without_their_codes_are_refused_by_name(
    ranks: list[Fp8Result], case: str
) -> None:
    # From 0.26 on experts' parameters are in a module of their own.
    check_refusals(ranks, ".w2_" if case in KIMI else "self_attn.o_proj.")
