"""FP8 blocks in SGLang's models: what they hold after refits is what SGLang loads from a checkpoint of the same codes and scales.

``make test-sglang`` runs them (docs/sglang.md).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from rlrefit.integration.quantize.formats import Fp8Blockwise
from rlrefit.integration.quantize.fp8_blockwise import ScaleFormat
from tests.gpu.vllm_checkpoints import write_checkpoint
from tests.spawn import run_ranks

from .fp8_ranks import CASES, Fp8Case, Fp8Result, refit_fp8

pytestmark = [
    pytest.mark.timeout(900),  # SGLang loads for a minute where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]

OCCASIONS = {f"{engine} {refit}" for engine in ("nccl_xfer", "packed_broadcast") for refit in range(3)} | {
    f"sparse {refit}" for refit in range(4)
}
BLACKWELL = [case for case in CASES if "Blackwell" in case]
IN_PLACE = [case for case in CASES if "unknown" not in case]
# Qwen3's, of each of two layers.
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PARTS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Fp8Result]]:
    """All cases in one pair of processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    listed = []
    for name, case in CASES.items():
        options = dict(case)
        experts = options.pop("experts", False)
        # Others than powers of two have to be quantized once more.
        trained_so = options.get("blackwell") and not options.get("quantized_before")
        scale = ScaleFormat.UE8M0 if trained_so else ScaleFormat.FP32
        kinds: dict[str, dict[str, Any]] = {
            "trained": {"fp8": False},
            "served": {"fp8": True, "scale": scale},
        }
        trained, served = (
            tuple(
                write_checkpoint(folder / f"{name} {kind} {seed}", seed, experts=experts, **kinds[kind])
                for seed in (1, 2)
            )
            for kind in ("trained", "served")
        )
        listed.append(Fp8Case(trained, served, **options))
    by_rank = run_ranks(refit_fp8, 2, listed, timeout_s=850)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_refits_leave_the_bytes_that_sglang_loads_from_a_checkpoint_where_they_were(
    results: dict[str, list[Fp8Result]], case: str
) -> None:
    for rank in results[case]:
        assert rank.differing.keys() == OCCASIONS
        assert not any(rank.differing.values()), rank.differing
        assert not any(rank.other_numbers.values()), rank.other_numbers
        assert rank.moved == []


@pytest.mark.parametrize("case", CASES)
def test_refits_are_sparse_unless_sglang_quantizes_codes_once_more(
    results: dict[str, list[Fp8Result]], case: str
) -> None:
    sparse = "quantized before" not in case
    assert [rank.sparse for rank in results[case]] == [[False, sparse, sparse, sparse]] * 2


@pytest.mark.parametrize("case", IN_PLACE)
def test_codes_and_scales_go_shard_to_shard(results: dict[str, list[Fp8Result]], case: str) -> None:
    for rank in results[case]:
        assert rank.reasons == {}
        assert rank.routes["misc"] == rank.routes["unused"] == 0


def test_a_kernel_that_is_not_known_takes_sglangs_loader_and_its_processing(
    results: dict[str, list[Fp8Result]],
) -> None:
    for rank in results["dense, unknown kernel"]:
        assert rank.reasons.keys() == {*rank.own, *(f"{name}_scale_inv" for name in rank.own)}
        assert all("for _shuffling may rewrite the layout" in reason for reason in rank.reasons.values())
        assert rank.routes["misc"] == 2 * len(rank.own)


@pytest.mark.parametrize("case", BLACKWELL)
def test_scales_are_packed_where_deepgemm_wants_them_so(
    results: dict[str, list[Fp8Result]], case: str
) -> None:
    for rank in results[case]:
        assert rank.packed == 2 * 4  # of two layers: attention's two, and gate and up in one beside down
        assert set(rank.own.values()) <= {Fp8Blockwise(ue8m0=True)}


@pytest.mark.parametrize("case", ["dense", "experts", "dense, Blackwell"])
def test_the_engine_names_what_it_holds_in_blocks_and_nothing_else(
    results: dict[str, list[Fp8Result]], case: str
) -> None:
    mlp = [f"mlp.experts.{expert}." for expert in range(8)] if case == "experts" else ["mlp."]
    modules = [*LINEAR, *(f"{where}{part}" for where in mlp for part in PARTS)]
    names = {f"model.layers.{layer}.{module}.weight" for layer in range(2) for module in modules}
    for rank in results[case]:
        assert rank.own.keys() == names
        assert set(rank.own.values()) == {Fp8Blockwise(ue8m0="Blackwell" in case)}


@pytest.mark.parametrize("case", CASES)
def test_what_would_leave_codes_without_their_scales_is_refused_by_name(
    results: dict[str, list[Fp8Result]], case: str
) -> None:
    for rank in results[case]:
        # Its loader would cast the numbers.
        assert "trainer_quantize_fp8=true" in rank.refused["BF16"]
        for missing, parameter in (("no scales", "weight_scale_inv"), ("no codes", "weight")):
            assert f"of model.layers.0.self_attn.o_proj.{parameter}; they" in rank.refused[missing]
        assert rank.refused["SGLang's own loader"] == "", "full tensors of codes and scales are taken"
        # Experts of which SGLang makes copies once.
        assert ("MegaMoE computes with copies" in rank.refused["MegaMoE"]) == ("experts" in case)
        for kept in ("weight_scale_inv_swizzled", "power_of_two"):
            assert "layer model.layers.0.self_attn.o_proj: SGLang " in rank.refused[kept]
