"""INT4 in SGLang's models: what they hold after refits is what SGLang loads from a checkpoint of the same codes and scales.

``make test-sglang`` runs them (docs/sglang.md).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlrefit.integration.quantize.formats import Int4
from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.rollout.arguments import int4, sglang_arguments
from rlrefit.workers.engines.sglang.loader import LOADER
from tests.families.checkpoints import write_pair
from tests.families.eagle import write_head
from tests.gpu.vllm_checkpoints import quantize_to_int4
from tests.spawn import run_alone, run_ranks

from .eagle_ranks import Heads
from .int4_ranks import (
    BesideInt4,
    Int4Case,
    Int4Result,
    refit_beside_int4,
    refit_int4,
    refit_int4_in_buckets,
    written,
    written_kimi,
)
from .models import matrices
from .ways import WAYS

pytestmark = [
    pytest.mark.timeout(900),  # SGLang loads for a minute where its processes share two cores
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]

# Groups, and options of a case.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dense, 32": (32, {}),
    "dense, 128": (128, {"scale_rule": "amax/7"}),
    "experts, Marlin, 32": (32, {"experts": True}),
    "experts, Marlin, 128": (128, {"experts": True}),
    "dense, as in a recipe": (64, {"in_a_recipe": True}),
    "experts, as in a recipe": (64, {"experts": True, "in_a_recipe": True}),
    "experts, Triton, 32": (32, {"experts": True, "runner": "triton"}),
    "experts, Triton, 128": (128, {"experts": True, "runner": "triton"}),
}
# Experts alone are in INT4, in groups of 32: the rule for scales, and what computes with the experts.
KIMI = {"Kimi-K2.5, Marlin": ("amax/7", "auto"), "Kimi-K2.5, Triton": ("amax/7.5", "triton")}
OTHER = "a scheme that was not read"
IN_BUCKETS = ("dense, 128", "experts, Marlin, 32")
REFITS = 3
LISTED = {**CASES, OTHER: (64, {"unknown": True})}
OCCASIONS = {
    *(f"full tensors {refit}" for refit in range(3)),
    "packed by the trainer",
    "partly misc 0",
    "partly misc 1",
    *(f"{engine} {refit}" for engine in ("nccl_xfer", "packed_broadcast") for refit in range(3)),
    *(f"sparse {refit}" for refit in range(4)),
}

Results = dict[str, list[Int4Result]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Int4Case]:
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for name, (group, options) in LISTED.items():
        written_by = {option: value for option, value in options.items() if option != "in_a_recipe"}
        case = written(folder / name, group, **written_by)
        found[name] = _as_in_a_recipe(case, group) if "in_a_recipe" in options else case
    for name, (rule, runner) in KIMI.items():
        # Not in this process, which may have SGLang's own configurations in transformers, which are others.
        found[name] = run_alone(written_kimi, folder / name, rule, runner, environment={})
    return found


def _as_in_a_recipe(case: Int4Case, group: int) -> Int4Case:
    """The case with SGLang started as a recipe starts it from the checkpoint in BF16."""
    keys = ("generation.weight_dtype=int4", "policy.refit.trainer_quantize_int4=true", "ray.address=auto")
    config = load_config("grpo_tiny_sglang", [*keys, f"generation.weight_group={group}"])
    hf_config = json.loads((Path(case.trained[0]) / "config.json").read_text())
    arguments = sglang_arguments(config, hf_config, 1, 0)
    started = {name: arguments[name] for name in ("json_model_override_args", "load_format")}
    return replace(case, started=started, runner=arguments.get("moe_runner_backend", case.runner))


def _refitted(ranks: int, cases: dict[str, Int4Case], cut: Int4Case | None) -> tuple[Results, list[str]]:
    """All cases in one set of processes; and what each of them told of experts whose groups are cut."""
    by_rank = run_ranks(refit_int4, ranks, ranks, list(cases.values()), cut, timeout_s=850)
    results, told = zip(*by_rank, strict=True)
    return {name: [found[i] for found in results] for i, name in enumerate(cases)}, list(told)


@pytest.fixture(scope="module")
def alone(cases: dict[str, Int4Case]) -> Results:
    return _refitted(1, cases, None)[0]


@pytest.fixture(scope="module")
def shared(cases: dict[str, Int4Case], tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[str]]:
    # Of two ranks each has 96 columns of experts' second matrix, which cuts groups of 64.
    cut: Path = tmp_path_factory.mktemp("cut")
    return _refitted(2, cases, written(cut, 64, experts=True, width=192))


@pytest.fixture(scope="module")
def bucketed(cases: dict[str, Int4Case]) -> dict[str, Any]:
    by_rank = run_ranks(refit_int4_in_buckets, 2, 2, [cases[name] for name in IN_BUCKETS], timeout_s=850)
    return {name: [found[i] for found in by_rank] for i, name in enumerate(IN_BUCKETS)}


@pytest.fixture(scope="module")
def in_int4(tmp_path_factory: pytest.TempPathFactory) -> BesideInt4:
    case, packed = run_alone(_write_in_int4, tmp_path_factory.mktemp("int4"), environment={})
    return run_ranks(refit_beside_int4, 1, 1, case, packed, timeout_s=400)[0]


def _write_in_int4(folder: Path) -> tuple[Heads, tuple[str, ...]]:
    # Groups, Marlin's tiles, and vocabularies that SGLang pads on no rank.
    widths = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    sizes = {"vocab_size": 128, "max_position_embeddings": 256, **widths}
    models = write_pair("llama", folder / "llama", sizes)
    first, second = (
        write_head(folder / f"head{index}", index, tokens=64, sizes=sizes, mapping=0) for index in range(2)
    )
    packed = [shutil.copytree(path, folder / f"packed{index}") for index, path in enumerate(models)]
    for path in packed:
        quantize_to_int4(path, int4(32))
    return Heads(models, (first, second), "EAGLE3"), tuple(map(str, packed))


@pytest.fixture(params=[1, 2], ids=["TP1", "TP2"])
def results(request: pytest.FixtureRequest) -> Results:
    return request.getfixturevalue("alone") if request.param == 1 else request.getfixturevalue("shared")[0]


@pytest.mark.parametrize("case", CASES)
def test_experts_are_computed_with_by_what_the_case_or_its_recipe_asks_for(
    cases: dict[str, Int4Case], case: str
) -> None:
    in_a_recipe = "marlin" if "experts" in CASES[case][1] else "auto"
    assert cases[case].runner == (
        in_a_recipe if "in_a_recipe" in CASES[case][1] else CASES[case][1].get("runner", "auto")
    )


@pytest.mark.parametrize("case", [*CASES, *KIMI])
def test_refits_leave_the_bytes_that_sglang_loads_from_a_checkpoint_where_they_were(
    results: Results, case: str
) -> None:
    for rank in results[case]:
        assert rank.differing.keys() == OCCASIONS
        assert not any(rank.differing.values()), rank.differing
        assert rank.moved == []


@pytest.mark.parametrize("case", [*CASES, *KIMI])
def test_codes_and_scales_go_shard_to_shard_into_the_live_parameters(results: Results, case: str) -> None:
    for rank in results[case]:
        assert rank.reasons == {}
        assert {f"{name}_{part}" for name in rank.own for part in ("packed", "scale")} < {*rank.bulk}
        assert rank.routes["nccl_xfer"]["misc"] == rank.routes["nccl_xfer"]["unused"] == 0


@pytest.mark.parametrize("case", CASES)
def test_the_engine_names_what_it_holds_in_int4_and_nothing_else(results: Results, case: str) -> None:
    group, options = CASES[case]
    names = matrices("experts" in options)
    for rank in results[case]:
        assert rank.own == dict.fromkeys(names, Int4(group))


@pytest.mark.parametrize("case", KIMI)
def test_of_kimi_experts_alone_arrive_as_codes_and_image_encoder_and_all_else_in_bf16(
    results: Results, case: str
) -> None:
    projections = ("gate_proj", "up_proj", "down_proj")
    experts = {
        f"language_model.model.layers.1.mlp.experts.{expert}.{projection}.weight"
        for expert in range(4)
        for projection in projections
    }
    for rank in results[case]:
        assert rank.own == dict.fromkeys(experts, Int4(32))
        for part in ("vision_tower.encoder.blocks.1.wqkv.weight", "mm_projector.proj.2.bias"):
            assert part in rank.bulk


@pytest.mark.parametrize("case", CASES)
def test_a_layer_may_get_a_part_of_its_codes_and_scales_over_the_misc_path(
    results: Results, case: str
) -> None:
    # Of two layers: q beside k and v, and up beside gate, of each expert.
    up = 8 if "experts" in CASES[case][1] else 1
    assert all(rank.routes["partly misc"]["misc"] == 2 * 2 * (1 + up) for rank in results[case])


@pytest.mark.parametrize("case", CASES)
def test_refits_are_dense_since_sglang_puts_what_is_written_in_order(results: Results, case: str) -> None:
    assert all(rank.sparse == [False] * 4 for rank in results[case])


@pytest.mark.parametrize("case", CASES)
def test_buckets_are_not_left_to_a_loader_that_cant_write_them(results: Results, case: str) -> None:
    assert all(rank.refused["SGLang's own loader"] == "False" for rank in results[case])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("brought", "told"),
    [
        ("BF16", "trainer_quantize_int4=true"),
        ("no scales", "self_attn.o_proj.weight_scale"),
        ("no codes", "self_attn.o_proj.weight_packed"),
    ],
)
def test_weights_without_their_scales_and_scales_without_their_codes_are_refused_by_name(
    results: Results, case: str, brought: str, told: str
) -> None:
    assert all(told in rank.refused[brought] for rank in results[case])


@pytest.mark.parametrize("case", CASES)
def test_a_refit_without_memory_to_ask_sglang_is_refused_with_the_setting_and_a_later_one_is_taken(
    results: Results, case: str
) -> None:
    # The case's refits come later.
    assert all("mem_fraction_static" in rank.refused["too little memory"] for rank in results[case])


@pytest.mark.parametrize("case", IN_BUCKETS)
def test_buckets_bring_the_bytes_that_sglang_loads_from_a_checkpoint(
    bucketed: dict[str, Any], case: str
) -> None:
    for differing, refused, taken in bucketed[case]:
        assert len(differing) == (REFITS + 2) * len(WAYS)
        # Refused refits have changed nothing.
        assert not any(differing.values()), differing
        assert taken == {LOADER}
        if refused:  # on the first rank
            assert "trainer_quantize_int4=True" in refused["no key"]
            assert refused["another key"].startswith("RefitMismatch")


def test_layers_of_a_scheme_that_was_not_read_are_refused_by_name(results: Results) -> None:
    for rank in results[OTHER]:
        assert "mlp.gate_up_proj" in rank.refused["BF16"]
        assert "layer model.layers.0.mlp.down_proj" in rank.refused["packed"]


def test_experts_whose_shards_cut_groups_are_refused(shared: tuple[Results, list[str]]) -> None:
    assert all("mlp.experts" in one for one in shared[1])


def test_a_head_that_sglang_has_quantized_with_the_model_is_refused_and_the_model_without_it_is_not(
    in_int4: BesideInt4,
) -> None:
    assert in_int4.refused["without a head"] == ""
    assert in_int4.refused["with one"].startswith("drafter.model.layers.0.")


def test_the_head_of_a_model_whose_checkpoint_is_in_int4_is_refitted_as_it_is_trained(
    in_int4: BesideInt4,
) -> None:
    assert {
        "drafter.midlayer.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate_proj.weight_packed",
    } <= in_int4.bulk
    assert in_int4.after_refits == [[], []]


def test_a_model_with_a_trained_head_is_put_in_order_while_the_head_is_on_its_way(
    in_int4: BesideInt4,
) -> None:
    for of_the_model, of_both in zip(in_int4.after_portions[::2], in_int4.after_portions[1::2], strict=True):
        assert of_the_model
        assert all(name.startswith("drafter ") for name in of_the_model)
        assert of_both == []
