"""FP8 engines whose post-load functions verl has wrapped: refits do with them what they do with vLLM's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from vllm_fp8_ranks import Fp8Case, Fp8Result, refit_fp8, write_pair

from tests.ahead import FoundAhead
from tests.spawn import run_ranks
from tests.verl_adapter.vllm_name import named_vllm
from tests.vllm_processes import vllm_processes

CASES = {"dense, rearranged": {"rearranged": True}, "experts": {"experts": True}}


def refit_under_verl(rank: int, cases: list[Fp8Case], path: str) -> list[Fp8Result]:
    """As :func:`refit_fp8`, in a process that verl has patched; ``path`` has vLLM by the name that verl asks for."""
    os.environ.update(VERL_USE_EXTERNAL_MODULES="tests.verl_adapter.cpu_platform", VERL_PLATFORM="cpu")
    sys.path.insert(0, path)
    from verl.utils.vllm.vllm_quant_utils import apply_vllm_quant_patches
    from vllm.model_executor.layers.quantization import fp8

    apply_vllm_quant_patches()
    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod):
        assert method.process_weights_after_loading.__module__ == "verl.utils.vllm.vllm_fp8_utils"
    return refit_fp8(rank, cases)


def refit_all_cases(folder: Path) -> dict[str, list[Fp8Result]]:
    """In one pair of processes."""
    listed = []
    for name, options in CASES.items():
        experts = options.get("experts", False)
        trained, served = zip(
            *(write_pair(folder / name, seed, experts=experts) for seed in (1, 2)), strict=True
        )
        listed.append(Fp8Case(trained, served, **options))
    path = named_vllm(folder)
    by_rank = run_ranks(refit_under_verl, 2, listed, path, timeout_s=550, made_by=vllm_processes)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(CASES)}


AHEAD = (refit_all_cases,)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> dict[str, list[Fp8Result]]:
    found: dict[str, list[Fp8Result]] = found_ahead.by(refit_all_cases)
    return found


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_of_the_trainer_make_the_engine_that_vllm_loads(
    results: dict[str, list[Fp8Result]], case: str
) -> None:
    for rank in results[case]:
        assert not any(rank.differing.values()), rank.differing
        assert len(rank.differing) == 12


def test_verls_functions_that_call_vllms_own_are_no_reason_against_writing_in_place(
    results: dict[str, list[Fp8Result]],
) -> None:
    for rank in results["experts"]:
        assert rank.misc == {}
        assert {f"{name}_scale_inv" for name in rank.own} < set(rank.bulk)


def test_a_kernel_that_rearranges_weights_is_reloaded_through_verls_functions(
    results: dict[str, list[Fp8Result]],
) -> None:
    for rank in results["dense, rearranged"]:
        assert set(rank.misc) == set(rank.own) | {f"{name}_scale_inv" for name in rank.own}
        assert all("of Rearranging may rewrite the layout" in why for why in rank.misc.values())
