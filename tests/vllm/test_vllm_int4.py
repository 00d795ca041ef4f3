"""INT4 engines fed with weights that the trainer has quantized: what they hold is what vLLM loads from such a checkpoint.

Those with experts are in :mod:`test_vllm_int4_experts`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_fp8_ranks import (
    Fp8Result,
    ShortOfMemory,
    refit_fp8,
    refit_int4_and_short_of_memory,
    write_int4_case,
)
from vllm_int4 import CPU, MARLIN, UNKNOWN
from vllm_int4_checks import by_case, check_bytes, check_in_place, check_refusals, check_sparse, codes_of

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
}
OTHER = "a kernel that was not read"
LISTED = {**CASES, OTHER: (UNKNOWN, 64, {})}
_MORE = {case for case, (*_, options) in CASES.items() if "ranks" in options}
ALL, IN_PLACE = left_to_all(LISTED, _MORE), left_to_all(CASES, _MORE)
Results = dict[str, list[Fp8Result]]
# Beside them what each rank saw with too little memory.
Found = tuple[Results, list[ShortOfMemory]]


def refit_int4(folder: Path) -> Found:
    """In one pair of processes."""
    cases = sorted({*LISTED} - _MORE)
    short = write_int4_case(folder / "short", MARLIN, int4(64))
    listed = [_written(folder, name) for name in cases]
    by_rank = run_ranks(
        refit_int4_and_short_of_memory, 2, listed, short, timeout_s=PATIENT_S, made_by=vllm_processes
    )
    results, short_of_memory = zip(*by_rank, strict=True)
    return by_case(cases, results), list(short_of_memory)


@of_all_tests
def refit_int4_in_stages(folder: Path) -> Results:
    cases = sorted(_MORE)
    listed = [_written(folder, name) for name in cases]
    by_rank = run_ranks(refit_fp8, 2, listed, timeout_s=PATIENT_S, made_by=vllm_processes)
    return by_case(cases, by_rank)


AHEAD = (refit_int4, refit_int4_in_stages)


def _written(folder: Path, name: str) -> Any:
    kernel, group, options = LISTED[name]
    return write_int4_case(folder / name, kernel, int4(group), **options)


@pytest.fixture
def ranks(case: str, found_ahead: FoundAhead) -> list[Fp8Result]:
    """What each rank of a case saw."""
    results: Results = (
        found_ahead.by(refit_int4_in_stages) if case in _MORE else found_ahead.by(refit_int4)[0]
    )
    return results[case]


@pytest.mark.parametrize("case", ALL)
def test_codes_and_scales_of_the_trainer_make_the_engine_that_vllm_loads(
    ranks: list[Fp8Result], case: str
) -> None:
    check_bytes(ranks)


@pytest.mark.parametrize("case", IN_PLACE)
def test_codes_and_scales_go_shard_to_shard_into_the_live_parameters(
    ranks: list[Fp8Result], case: str
) -> None:
    check_in_place(ranks)
    for rank in ranks:
        assert {*rank.own.values()} == {Int4(CASES[case][1])}
        assert len(rank.own) == 4 + 3


@pytest.mark.parametrize("case", [OTHER])
def test_layers_of_a_kernel_that_was_not_read_take_the_misc_path_packed(
    ranks: list[Fp8Result], case: str
) -> None:
    for rank in ranks:
        assert {*rank.misc} == codes_of(rank)
        assert all("OtherLinearKernel" in reason for reason in rank.misc.values())


def test_layers_that_found_too_little_memory_take_vllms_reload_until_the_next_epoch_finds_enough(
    found_ahead: FoundAhead,
) -> None:
    _, ranks = found_ahead.by(refit_int4)
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
    # All of these have linear layers that it puts in order.
    check_sparse(ranks, case == OTHER)


@pytest.mark.parametrize("case", ALL)
def test_weights_without_their_scales_and_scales_without_their_codes_are_refused_by_name(
    ranks: list[Fp8Result], case: str
) -> None:
    check_refusals(ranks, "self_attn.o_proj.")
