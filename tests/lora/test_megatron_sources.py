"""Bridge's adapters on Megatron ranks: what goes shard to shard is Bridge's own export, bit for bit, refit after refit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrefit.workers.lora import SETTINGS_NAME
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.families.cases import WORLD, Layout
from tests.families.checkpoints import write_checkpoint
from tests.spawn import run_ranks

from .megatron_ranks import REFUSED, VERSIONS, Case, examine

_LATENT = [
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
]
CASES = {
    "TP2 PP2": Case("qwen3", Layout(tp=2, pp=2)),
    "TP4": Case("llama", Layout(tp=4)),
    "TP2, canonical": Case("qwen3", Layout(tp=2), "CanonicalLoRA"),
    "TP2 EP2, experts share an adapter": Case("qwen3_moe", Layout(tp=2, ep=2)),
    "PP2 EP2, an adapter of each expert": Case(
        "qwen3_moe", Layout(pp=2, ep=2), fields={"share_expert_adapters": False}
    ),
    "TP2 EP2, latent attention": Case(
        "deepseek_v3", Layout(tp=2, ep=2), fields={"target_modules": [*_LATENT, "linear_fc1", "linear_fc2"]}
    ),
}


# In which one rank of a group of tensor parallelism can't send, of which the other has to hear.
WAYS = ("disabled", "ungathered", "replaced", "away", "factor replaced", "factor away")
OTHERS = {
    "exchanged": Case("llama", Layout(tp=4), exchanged=True),
    REFUSED: Case("qwen3_moe", Layout(tp=2, etp=2)),
}


# Cut by TP as "exchanged" is, over as many ranks, and dense as the first case is.
ALONE = "TP4"


def examine_adapters(folder: Path) -> dict[str, Any]:
    return _examine({name: case for name, case in (CASES | OTHERS).items() if name != ALONE}, folder)


@of_all_tests
def examine_alone(folder: Path) -> dict[str, Any]:
    return _examine({ALONE: CASES[ALONE]}, folder)


def _examine(cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    checkpoints = {
        of: write_checkpoint(of[0], folder / "-".join(map(str, of)), short=of[1])
        for of in {case.checkpoint for case in cases.values()}
    }
    run_ranks(examine, WORLD, cases, checkpoints, str(folder))
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in cases}


AHEAD = (examine_adapters, examine_alone)
_ALL = left_to_all(CASES, (ALONE,))


def _found(name: str, found_ahead: FoundAhead) -> dict[str, Any]:
    return found_ahead.by(examine_alone if name == ALONE else examine_adapters)[name]


@pytest.mark.parametrize("name", _ALL)
def test_merged_shards_are_what_bridge_merges_and_the_trained_weights_stay(
    name: str, found_ahead: FoundAhead
) -> None:
    found = _found(name, found_ahead)
    assert len(found["merged"]) == VERSIONS
    for version in found["merged"]:
        assert version["wrong"] == []
        assert version["changed"] > 0
        assert all("router" in reason for reason in version["reasons"].values())
    assert found["touched"] == []


@pytest.mark.parametrize("name", _ALL)
def test_the_adapter_alone_is_what_bridge_exports_of_it_under_the_names_of_its_checkpoint(
    name: str, found_ahead: FoundAhead
) -> None:
    found = _found(name, found_ahead)
    assert len(found["alone"]) == VERSIONS
    for version in found["alone"]:
        assert version["wrong"] == []
        assert list(version["reasons"]) == [SETTINGS_NAME]


@pytest.mark.parametrize("way", ["merged", "alone"])
def test_an_adapter_that_bridge_splits_in_another_way_than_its_weight_goes_through_bridge(
    way: str, found_ahead: FoundAhead
) -> None:
    for version in found_ahead.by(examine_adapters)["exchanged"][way]:
        assert version["wrong"] == []
        split = {name for name, reason in version["reasons"].items() if "in another order" in reason}
        assert {name.split(".mlp.")[1].split("_")[0] for name in split} == {"gate", "up"}
        assert {*version["reasons"]} - split <= {SETTINGS_NAME}


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("none", "the model has no adapter"),
        ("dora", "is no plain LoRA"),
        ("expert tensor parallelism", "expert_tensor_parallel_size=1"),
        ("disabled", "adapters are disabled"),
        *((f"{way} elsewhere", "rank 1 of the trainer can't send") for way in WAYS),
        ("other scaling", "other ranks or scalings"),
        ("trained beside", "are no factors"),
        ("quantized, alone", "model.layers.0.self_attn.k_proj.weight"),
        ("quantized, merged", "model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_adapters_that_would_reach_the_engine_as_something_else_are_refused(
    case: str, told: str, found_ahead: FoundAhead
) -> None:
    assert told in found_ahead.by(examine_adapters)[REFUSED][case]
