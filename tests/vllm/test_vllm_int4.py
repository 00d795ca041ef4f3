"""INT4 engines fed with weights that the trainer has quantized: what they hold is what vLLM loads from such a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_fp8_ranks import Fp8Result, ShortOfMemory, refit_int4_but, write_int4_case, write_kimi_case
from vllm_int4 import CPU, MARLIN, UNKNOWN, has_one_method_of_experts

from rlrefit.integration.quantize.formats import Int4
from rlrefit.recipes.rollout.arguments import int4
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.spawn import PATIENT_S, run_ranks
from tests.vllm_processes import vllm_processes

# Kernel, group, and how the model is made.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "CPU": (CPU, 32, {}),
    "CPU, stages": (CPU, 128, {"ranks": 1}),
    "Marlin": (MARLIN, 128, {}),
    "Marlin with biases": (MARLIN, 32, {"biases": True}),
    "Marlin, stages": (MARLIN, 32, {"ranks": 1}),
    "Marlin with experts": (MARLIN, 32, {"experts": True}),
    "Marlin with experts, stages": (MARLIN, 128, {"experts": True, "ranks": 1}),
    "Triton's experts": (CPU, 32, {"experts": True}),
}
OTHER = "a kernel that was not read"
# Experts alone are in INT4, by their kernel.
KIMI = {
    "Kimi-K2.5, Marlin": ("kimi_k25", MARLIN),
    "Kimi-K2.5, Triton's experts": ("kimi_k25", CPU),
    "Kimi-K2, Marlin": ("kimi_k2", MARLIN),
}
LISTED = {**CASES, OTHER: (UNKNOWN, 64, {})}
# Of stages, and of Kimi's what Kimi-K2.5 has with Marlin and a Qwen with Triton.
_MORE = {case for case, (*_, options) in CASES.items() if "ranks" in options} | {
    "Kimi-K2, Marlin",
    "Kimi-K2.5, Triton's experts",
}
ALL, IN_PLACE = left_to_all([*LISTED, *KIMI], _MORE), left_to_all(CASES, _MORE)
# Of what codes, and scales, are left out. From 0.26 on experts' parameters are in a module of their own.
LEFT_OUT = dict.fromkeys(KIMI, ".w2_")
Results = dict[str, list[Fp8Result]]
# Beside them what each rank told of experts whose groups are cut, and saw with too little memory.
Found = tuple[Results, list[str], list[ShortOfMemory]]
# Of two ranks each has 96 columns of experts' second matrix, which cuts groups of 64.
CUT = {"experts": True, "width": 192}


def refit_int4(folder: Path) -> Found:
    """In one pair of processes."""
    return _refit(folder, {*LISTED, *KIMI} - _MORE)


@of_all_tests
def refit_more_int4(folder: Path) -> Found:
    return _refit(folder, _MORE)


AHEAD = (refit_int4, refit_more_int4)


def _refit(folder: Path, names: set[str]) -> Found:
    cases = sorted(names)
    listed = []
    for name in cases:
        if name in KIMI:
            listed.append(write_kimi_case(folder / name, *KIMI[name]))
            continue
        kernel, group, options = LISTED[name]
        listed.append(write_int4_case(folder / name, kernel, int4(group), **options))
    cut = write_int4_case(folder / "cut", CPU, int4(64), **CUT)
    short = write_int4_case(folder / "short", MARLIN, int4(64))
    by_rank = run_ranks(refit_int4_but, 2, listed, cut, short, timeout_s=PATIENT_S, made_by=vllm_processes)
    results, told, short_of_memory = zip(*by_rank, strict=True)
    by_case = dict(zip(cases, map(list, zip(*results, strict=True)), strict=True))
    return by_case, list(told), list(short_of_memory)


@pytest.fixture
def ranks(case: str, found_ahead: FoundAhead) -> list[Fp8Result]:
    """What each rank of a case saw."""
    found: Found = found_ahead.by(refit_more_int4 if case in _MORE else refit_int4)
    return found[0][case]


@pytest.mark.parametrize("case", ALL)
def test_codes_and_scales_of_the_trainer_make_the_engine_that_vllm_loads(
    ranks: list[Fp8Result], case: str
) -> None:
    for rank in ranks:
        assert not any(rank.differing.values()), rank.differing
        assert len(rank.differing) == 16
        assert rank.told == rank.own


@pytest.mark.parametrize("case", IN_PLACE)
def test_codes_and_scales_go_shard_to_shard_into_the_live_parameters(
    ranks: list[Fp8Result], case: str
) -> None:
    _, group, options = CASES[case]
    for rank in ranks:
        assert rank.misc == {}
        assert {f"{name}_{part}" for name in rank.own for part in ("packed", "scale")} < {*rank.bulk}
        assert {*rank.own.values()} == {Int4(group)}
        of_experts = {name for name in rank.own if ".experts." in name}
        assert len(of_experts) == (12 if "experts" in options else 0)
        assert len(rank.own) == 4 + (len(of_experts) or 3)
    assert ranks[0].routes["nccl_xfer"]["misc"] == 0


@pytest.mark.parametrize("case", left_to_all(KIMI, _MORE))
def test_of_kimi_experts_arrive_as_codes_and_all_else_in_bf16_shard_to_shard(
    ranks: list[Fp8Result], case: str
) -> None:
    for rank in ranks:
        assert rank.misc == {}
        assert {*rank.own.values()} == {Int4(32)}
        assert len(rank.own) == 12
        assert all(".mlp.experts." in name for name in rank.own)
        codes = {f"{name}_{part}" for name in rank.own for part in ("packed", "scale")}
        plain = {*rank.bulk} - codes
        assert codes < {*rank.bulk}
        parts = ["self_attn.kv_b_proj", "shared_experts.down_proj", "layers.0.mlp.up_proj", "lm_head"]
        if KIMI[case][0] == "kimi_k25":
            parts += ["vision_tower.encoder.blocks.1.wqkv", "mm_projector.proj.2"]
        for part in parts:
            assert any(name.endswith(f"{part}.weight") for name in plain)
    assert ranks[0].routes["nccl_xfer"]["misc"] == 0


@pytest.mark.parametrize("case", [OTHER])
def test_layers_of_a_kernel_that_was_not_read_take_the_misc_path_packed(
    ranks: list[Fp8Result], case: str
) -> None:
    for rank in ranks:
        assert {*rank.misc} == {f"{name}_{part}" for name in rank.own for part in ("packed", "scale")}
        assert all("OtherLinearKernel" in reason for reason in rank.misc.values())


def test_experts_whose_shards_cut_groups_are_refused(found_ahead: FoundAhead) -> None:
    _, told, _ = found_ahead.by(refit_int4)
    # Releases from 0.26 on refuse them themselves, as they load.
    assert all(one.startswith(("RefitError", "ValueError")) for one in told)
    assert all("group" in one for one in told)


def test_layers_that_found_too_little_memory_take_vllms_reload_until_the_next_epoch_finds_enough(
    found_ahead: FoundAhead,
) -> None:
    *_, ranks = found_ahead.by(refit_int4)
    for rank in ranks:
        assert not any(rank.differing.values()), rank.differing
        assert len(rank.differing) == 6
        first, second, third = rank.misc
        assert first > second > third == 0
        assert all("gpu_memory_utilization" in reason for reason in rank.reasons)
        told = [[text for text in warned if "next epoch" in text] for warned in rank.warned]
        assert [len(texts) for texts in told] == [1, 1, 0]


@pytest.mark.parametrize("case", ALL)
def test_refits_are_dense_where_vllm_puts_what_is_written_in_order(ranks: list[Fp8Result], case: str) -> None:
    # All but Kimi's have linear layers that it puts in order, and Triton's experts are in another one only where it loads them so.
    in_order = case == OTHER or (KIMI.get(case, ("", ""))[1] == CPU and has_one_method_of_experts())
    assert [rank.sparse for rank in ranks] == [[False, *[in_order] * 3]] * 2


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize(
    ("brought", "told"),
    [
        ("BF16", "trainer_quantize_int4=true"),
        ("no scales", "weight_scale"),
        ("no codes", "weight_packed"),
    ],
)
def test_weights_without_their_scales_and_scales_without_their_codes_are_refused_by_name(
    ranks: list[Fp8Result], case: str, brought: str, told: str
) -> None:
    layer = "" if brought == "BF16" else LEFT_OUT.get(case, "self_attn.o_proj.")
    assert all(layer + told in rank.refused[brought] for rank in ranks)
