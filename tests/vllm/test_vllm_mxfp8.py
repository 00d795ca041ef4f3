"""MXFP8 engines fed with weights that the trainer has quantized: what they hold is what vLLM loads from such a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_fp8_ranks import Fp8Result, refit_fp8, write_mxfp8_case
from vllm_mxfp8 import EMULATION, FLASHINFER, MARLIN

from rlrefit.integration.quantize.formats import Mxfp8
from rlrefit.recipes.rollout.arguments import mxfp8
from tests.ahead import FoundAhead, of_all_tests
from tests.gpu.vllm_checkpoints import mxfp8_of_modelopt
from tests.spawn import PATIENT_S, run_ranks
from tests.vllm_processes import vllm_processes

CASES = {
    "emulation": (EMULATION, mxfp8_of_modelopt(), {}),
    "Marlin, stages": (MARLIN, mxfp8_of_modelopt(), {"stages": True}),
    "Marlin with experts, compressed-tensors": (MARLIN, mxfp8(), {"experts": True}),
}
# Its tiles are not whole in the MLP.
PADDED = "FlashInfer, padded"
# The cases above have each part of these: the padded one's attention is not padded.
MORE = {
    "emulation, compressed-tensors, stages": (EMULATION, mxfp8(), {"stages": True}),
    "FlashInfer": (FLASHINFER, mxfp8_of_modelopt(), {}),
}
IN_PLACE = [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)]
Results = dict[str, list[Fp8Result]]


def refit_mxfp8(folder: Path) -> Results:
    return _refit({**CASES, PADDED: (FLASHINFER, mxfp8_of_modelopt(), {"intermediate": 320})}, folder)


@of_all_tests
def refit_more_mxfp8(folder: Path) -> Results:
    return _refit(MORE, folder)


def _refit(cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]], folder: Path) -> Results:
    """In one pair of processes."""
    listed = [
        write_mxfp8_case(folder / name, kernel, quantization, **options)
        for name, (kernel, quantization, options) in cases.items()
    ]
    by_rank = run_ranks(refit_fp8, 2, listed, timeout_s=PATIENT_S, made_by=vllm_processes)
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


AHEAD = (refit_mxfp8, refit_more_mxfp8)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> Results:
    return found_ahead.by(refit_mxfp8)


@pytest.fixture
def ranks(case: str, request: pytest.FixtureRequest, found_ahead: FoundAhead) -> list[Fp8Result]:
    """What each rank of a case saw."""
    found: Results = found_ahead.by(refit_more_mxfp8) if case in MORE else request.getfixturevalue("results")
    return found[case]


@pytest.mark.parametrize("case", [*IN_PLACE, PADDED])
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
    for rank in ranks:
        assert rank.misc == {}
        assert {*rank.own, *(f"{name}_scale" for name in rank.own)} < {*rank.bulk}
        assert {*rank.own.values()} == {Mxfp8()}
    assert ranks[0].routes["nccl_xfer"]["misc"] == 0


def test_every_matrix_of_the_decoder_layers_is_quantized(results: Results) -> None:
    parts = {f"self_attn.{part}_proj" for part in "qkvo"} | {
        f"mlp.{part}_proj" for part in ("gate", "up", "down")
    }
    whole = {f"model.layers.0.{part}.weight" for part in parts}
    assert [rank.own.keys() for rank in results["emulation"]] == [whole] * 2
    stages = results["Marlin, stages"]
    assert [len(rank.own) for rank in stages] == [len(whole)] * 2
    assert stages[0].own.keys().isdisjoint(stages[1].own)
    experts = results["Marlin with experts, compressed-tensors"][0].own
    assert {name.partition(".mlp.experts.")[2] for name in experts} - {""} == {
        f"{expert}.{part}_proj.weight" for expert in range(4) for part in ("gate", "up", "down")
    }


def test_scales_that_a_kernel_pads_take_the_misc_path_with_their_codes(results: Results) -> None:
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    for rank in results[PADDED]:
        assert {*rank.misc} == {*names, *(f"{name}_scale" for name in names)}
        assert all("weight_scale has become torch.uint8" in reason for reason in rank.misc.values())


@pytest.mark.parametrize("case", [*IN_PLACE, PADDED])
def test_refits_are_sparse_where_vllm_leaves_what_is_written_in_place(
    ranks: list[Fp8Result], case: str
) -> None:
    stays = case.startswith("emulation")
    assert [rank.sparse for rank in ranks] == [[False, *[stays] * 3]] * 2


@pytest.mark.parametrize("case", [*IN_PLACE, PADDED])
@pytest.mark.parametrize(
    ("brought", "told"),
    [
        ("BF16", "trainer_quantize_fp8=true"),
        ("no scales", "self_attn.o_proj.weight_scale"),
        ("no codes", "self_attn.o_proj.weight;"),
    ],
)
def test_weights_without_their_scales_and_scales_without_their_codes_are_refused_by_name(
    ranks: list[Fp8Result], case: str, brought: str, told: str
) -> None:
    assert all(told in rank.refused[brought] for rank in ranks)
