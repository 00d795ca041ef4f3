"""Refits of vLLM models in parallel layouts: fragments and misc loads give what vLLM itself would have loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_checkpoints import dense_config, moe_config, quantize_checkpoint, read_checkpoint, write_checkpoint
from vllm_ranks import Case, Layout, RankResult, refit_there_and_back

from tests.ahead import FoundAhead
from tests.spawn import run_ranks
from tests.vllm_processes import vllm_processes

pytestmark = pytest.mark.timeout(600)

CONFIGS = {
    "dense": dense_config(),
    "one_kv_head": dense_config(kv_heads=1),
    "tied": dense_config(tied=True),
    "dense_fp32": dense_config(),
    "tied_fp32": dense_config(tied=True),
    "moe": moe_config(),
    "moe_packable": moe_config(expert_size=32),
    "fp8": dense_config(),
}
# Packed layouts are tried in float32, which oneDNN packs on every x86 CPU.
SINGLE = {
    "dense packed": ("dense_fp32", Layout(), True),
    "tied": ("tied", Layout(), False),
    "tied packed": ("tied_fp32", Layout(), True),
    "moe": ("moe", Layout(), False),
    "moe packable": ("moe_packable", Layout(), False),
    "fp8": ("fp8", Layout(), False),
    "quantized online": ("dense", Layout(), False),
}
DOUBLE = {
    "dense TP2": ("dense", Layout(tensor=2), False),
    "replicated KV head TP2": ("one_kv_head", Layout(tensor=2), False),
    "moe TP2": ("moe", Layout(tensor=2), False),
    "moe EP2": ("moe", Layout(tensor=2, expert=True), False),
    "tied PP2": ("tied", Layout(pipeline=2), False),
    "dense TP2 packed": ("dense_fp32", Layout(tensor=2), True),
    "fp8 TP2": ("fp8", Layout(tensor=2), False),
}


def _checkpoints(root: Path) -> dict[str, tuple[str, str]]:
    dtypes = {name: torch.float32 if name.endswith("fp32") else torch.bfloat16 for name in CONFIGS}
    found = {
        name: [write_checkpoint(root / f"{name}_{seed}", config, seed, dtypes[name]) for seed in (1, 2)]
        for name, config in CONFIGS.items()
    }
    for path in found["fp8"]:
        quantize_checkpoint(path)
    return {name: (str(a), str(b)) for name, (a, b) in found.items()}


def _run(cases: dict, checkpoints: dict, ranks: int) -> dict[str, list[RankResult]]:
    listed = [
        Case(*checkpoints[model], layout, packed, "fp8" if name == "quantized online" else None)
        for name, (model, layout, packed) in cases.items()
    ]
    by_rank = run_ranks(refit_there_and_back, ranks, listed, timeout_s=550, made_by=vllm_processes)
    return {name: [results[i] for results in by_rank] for i, name in enumerate(cases)}


def refit_all_cases(folder: Path) -> dict[str, list[RankResult]]:
    """Every number of ranks is one group of processes."""
    checkpoints = _checkpoints(folder)
    return _run(SINGLE, checkpoints, 1) | _run(DOUBLE, checkpoints, 2)


AHEAD = (refit_all_cases,)


@pytest.fixture(scope="module")
def results(found_ahead: FoundAhead) -> dict[str, list[RankResult]]:
    found: dict[str, list[RankResult]] = found_ahead.by(refit_all_cases)
    return found


@pytest.mark.parametrize("case", [*SINGLE, *DOUBLE])
def test_a_refit_gives_what_vllm_loads_from_the_new_checkpoint_and_back_again(results, case):
    for rank in results[case]:
        assert rank.differing == []
        assert rank.differing_after_return == []
        assert rank.version == 2


@pytest.mark.parametrize("case", [*SINGLE, *DOUBLE])
def test_the_twin_leaves_no_trace_in_the_process(results, case):
    assert all(rank.process_state_untouched for rank in results[case])


@pytest.mark.parametrize("case", ["tied", "moe", "dense TP2", "moe TP2", "moe EP2", "tied PP2"])
def test_unpacked_weights_all_take_the_bulk_path(results, case):
    assert all(rank.misc == {} for rank in results[case])


def test_tensor_parallel_ranks_want_the_two_halves(results):
    first, second = results["dense TP2"]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert first.bulk[name] == [((0, 64), (0, 64))]
    assert second.bulk[name] == [((64, 128), (0, 64))]
    name = "model.layers.1.mlp.down_proj.weight"
    assert first.bulk[name] == [((0, 64), (0, 48))]
    assert second.bulk[name] == [((0, 64), (48, 96))]


def test_the_padded_vocabulary_is_no_part_of_any_box(results):
    first, second = results["dense TP2"]
    assert first.parameters["lm_head.weight"] == second.parameters["lm_head.weight"] == (64, 64)
    assert first.bulk["lm_head.weight"] == [((0, 64), (0, 64))]
    assert second.bulk["lm_head.weight"] == [((64, 120), (0, 64))]


def test_a_replicated_kv_head_is_the_same_box_on_both_ranks(results):
    first, second = results["replicated KV head TP2"]
    name = "model.layers.0.self_attn.k_proj.weight"
    assert first.bulk[name] == second.bulk[name] == [((0, 32), (0, 64))]


def test_expert_parallel_ranks_want_their_own_experts_whole(results):
    for rank, own in zip(results["moe EP2"], ({"0", "1"}, {"2", "3"}), strict=True):
        wanted = {name for name in rank.bulk if ".mlp.experts." in name}
        assert {name.split(".")[5] for name in wanted} == own
        assert all(box == ((0, 24), (0, 64)) for n in wanted if "gate_proj" in n for box in rank.bulk[n])


def test_pipeline_stages_want_their_own_layers_and_the_tied_embedding_on_both(results, tmp_path):
    first, second = results["tied PP2"]
    assert not any(".layers.1." in name for name in first.bulk)
    assert not any(".layers.0." in name for name in second.bulk)
    assert "model.embed_tokens.weight" in first.bulk
    assert "model.embed_tokens.weight" in second.bulk
    assert {*first.bulk, *second.bulk} == set(
        read_checkpoint(write_checkpoint(tmp_path / "tied", CONFIGS["tied"], 1))
    )


@pytest.mark.parametrize("case", ["dense packed", "dense TP2 packed"])
def test_packed_linear_weights_go_to_misc_and_say_so(results, case):
    for rank in results[case]:
        assert not any("_proj" in name for name in rank.bulk)
        reason = rank.misc["model.layers.0.mlp.down_proj.weight"]
        assert reason == (
            "layer model.layers.0.mlp.down_proj: process_weights_after_loading changed the shape of weight "
            f"from {(64, 96 // len(results[case]))} to (0,)"
        )
        assert "oneDNN may compute with a packed copy" in rank.misc["lm_head.weight"]
        assert "model.norm.weight" in rank.bulk


@pytest.mark.parametrize("case", ["dense packed", "tied packed", "dense TP2 packed"])
def test_a_part_of_a_fused_module_is_an_error_by_name_and_the_old_weights_stay(results, case):
    for rank in results[case]:
        text = rank.failures["a part of a fused module"]
        assert "model.layers.0.self_attn.qkv_proj" in text or "incomplete" in text
        assert "uninitialised memory" in text
        assert rank.failures["a part of a fused module, old weights back"] == "True"


@pytest.mark.parametrize("case", ["dense packed", "tied packed", "dense TP2 packed"])
def test_a_refit_without_its_misc_tensors_is_an_error_and_the_old_weights_stay(results, case):
    for rank in results[case]:
        assert "incomplete" in rank.failures["nothing at all"]
        assert rank.failures["nothing at all, old weights back"] == "True"


@pytest.mark.parametrize("case", ["dense packed", "tied packed", "dense TP2 packed"])
def test_a_tensor_that_comes_twice_is_an_error_and_the_old_weights_stay(results, case):
    for rank in results[case]:
        assert "came twice" in rank.failures["twice"]
        assert "q_proj" in rank.failures["twice"]
        assert rank.failures["twice, old weights back"] == "True"


@pytest.mark.parametrize("case", ["fp8", "quantized online", "fp8 TP2"])
def test_an_fp8_engine_is_reloaded_and_processed_once_in_each_refit(results, case):
    """After start-up its parameters are plain and transposed, and the model's own loader dies of them half-way."""
    for rank in results[case]:
        assert rank.bare_load in ("AttributeError", "AssertionError", "RuntimeError", "ValueError")
        assert not any("_proj" in name for name in rank.bulk)
        assert "model.norm.weight" in rank.bulk
        assert rank.processed == [{1}, {1}]


@pytest.mark.parametrize("case", [*SINGLE, *DOUBLE])
def test_a_manifest_without_any_one_tensor_is_refused_by_the_ranks_that_want_it(results, case):
    for rank in results[case]:
        assert len(rank.without) > 11
        wanted = {*rank.bulk, *rank.misc}
        assert {name for name, text in rank.without.items() if text} == wanted & rank.without.keys()


@pytest.mark.parametrize("case", ["dense packed", "fp8", "quantized online", "dense TP2 packed", "fp8 TP2"])
def test_the_refusal_of_half_a_fused_module_says_what_comes_and_what_does_not(results, case):
    for rank in results[case]:
        text = rank.without["model.layers.0.mlp.up_proj.weight"]
        assert f"{6144 // len(results[case])} elements of model.layers.0.mlp.gate_up_proj.weight" in text
        assert "only model.layers.0.mlp.gate_proj.weight comes" in text
        assert "Megatron-Bridge has no mapping" in text


def test_an_engine_that_quantizes_as_it_loads_is_followed_through_its_loader(results):
    [rank] = results["quantized online"]
    assert rank.misc["model.layers.1.mlp.up_proj.weight"] == (
        "layer model.layers.1.mlp.gate_up_proj: process_weights_after_loading changed the shape of weight from (192, 64) to "
        "(64, 192)"
    )


def test_other_engines_process_nothing_after_loading(results):
    assert all(rank.processed == [set(), set()] for rank in results["dense TP2"])
