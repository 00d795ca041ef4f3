"""FP8 engines fed with weights that the trainer has quantized: what they hold is what vLLM loads from such a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_fp8_ranks import Fp8Case, Fp8Result, refit_fp8, write_pair

from rlrefit.integration.quantize.formats import Fp8Blockwise
from tests.ahead import FoundAhead
from tests.spawn import run_ranks
from tests.vllm_processes import vllm_processes

CASES = {
    "dense": {},
    "dense, rearranged": {"rearranged": True},
    "experts": {"experts": True},
    "experts in parallel": {"experts": True, "expert_parallel": True},
    "experts, another library's": {"experts": True, "replaced": True},
}
LAYER = "model.layers.0"


def refit_all_cases(folder: Path) -> dict[str, list[Fp8Result]]:
    """In one pair of processes."""
    listed = []
    for name, options in CASES.items():
        experts = options.get("experts", False)
        trained, served = zip(
            *(write_pair(folder / name, seed, experts=experts) for seed in (1, 2)), strict=True
        )
        listed.append(Fp8Case(trained, served, **options))
    by_rank = run_ranks(refit_fp8, 2, listed, timeout_s=550, made_by=vllm_processes)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(CASES)}


AHEAD = (refit_all_cases,)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> dict[str, list[Fp8Result]]:
    found: dict[str, list[Fp8Result]] = found_ahead.by(refit_all_cases)
    return found


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_of_the_trainer_make_the_engine_that_vllm_loads(results, case):
    for rank in results[case]:
        assert not any(rank.differing.values()), rank.differing
        assert len(rank.differing) == 12
        assert rank.kept[0] == rank.kept[1]


@pytest.mark.parametrize("case", ["dense", "experts", "experts in parallel"])
def test_codes_and_scales_go_straight_into_the_live_parameters(results, case):
    for rank in results[case]:
        assert rank.misc == {}
        assert {f"{name}_scale_inv" for name in rank.own} < set(rank.bulk)
        assert set(rank.own) < set(rank.bulk)


def test_trainer_ranks_send_codes_and_scales_shard_to_shard(results):
    for case in ("dense", "experts", "experts in parallel"):
        first, second = results[case]
        names = {*first.bulk, *second.bulk}
        assert first.routes["nccl_xfer"] == {"bulk": len(names), "misc": 0, "unused": 0}
    quantized = 2 * len(results["dense, rearranged"][0].own)
    assert results["dense, rearranged"][0].routes["nccl_xfer"]["misc"] == quantized


def test_a_kernel_that_is_not_known_to_keep_the_layout_takes_the_misc_path_with_all_codes_and_scales(results):
    for rank in results["dense, rearranged"]:
        assert set(rank.misc) == set(rank.own) | {f"{name}_scale_inv" for name in rank.own}
        assert set(rank.misc.values()) == {
            f"layer {LAYER}.{module}: process_weights_after_loading of Rearranging may rewrite the layout"
            for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        }


def test_post_load_functions_of_another_library_are_called_on_all_that_arrives(results):
    for rank in results["experts, another library's"]:
        assert set(rank.misc) == set(rank.own) | {f"{name}_scale_inv" for name in rank.own}
        assert all("was replaced by a function of vllm_fp8_ranks" in why for why in rank.misc.values())


def test_the_engine_names_what_it_holds_quantized_and_nothing_else(results):
    attention = {f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo"}
    parts = ("gate", "up", "down")
    for rank in results["dense"]:
        assert set(rank.own) == attention | {f"{LAYER}.mlp.{part}_proj.weight" for part in parts}
        assert set(rank.own.values()) == {Fp8Blockwise()}
    for rank in results["experts"]:
        experts = {f"{LAYER}.mlp.experts.{e}.{part}_proj.weight" for e in range(4) for part in parts}
        assert set(rank.own) == attention | experts


@pytest.mark.parametrize("case", CASES)
def test_the_worker_extension_tells_whoever_sends_full_tensors_the_same(results, case):
    for rank in results[case]:
        assert rank.told == rank.own


def test_ranks_of_expert_parallel_engines_name_their_own_experts(results):
    experts = [
        {name.split(".")[5] for name in r.own if ".experts." in name} for r in results["experts in parallel"]
    ]
    assert experts == [{"0", "1"}, {"2", "3"}]


@pytest.mark.parametrize("case", CASES)
def test_weights_that_the_loader_would_cast_without_their_scale_are_refused(results, case):
    for rank in results[case]:
        text = rank.refused["BF16"]
        assert "cast" in text
        assert "trainer_quantize_fp8=true" in text


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("missing", "parameter"), [("no scales", "weight_scale_inv"), ("no codes", "weight")]
)
def test_codes_without_scales_and_scales_without_codes_are_refused_by_name(results, case, missing, parameter):
    for rank in results[case]:
        assert f"of {LAYER}.self_attn.o_proj.{parameter}; they" in rank.refused[missing]
