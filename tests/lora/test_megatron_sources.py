"""Bridge's adapters on Megatron ranks: what goes shard to shard is Bridge's own export, bit for bit, refit after refit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrefit.workers.lora import SETTINGS_NAME
from tests.ahead import FoundAhead
from tests.families.cases import WORLD, Layout
from tests.families.checkpoints import write_checkpoint
from tests.spawn import run_ranks

from .megatron_ranks import VERSIONS, Case, examine

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


def examine_adapters(folder: Path) -> dict[str, Any]:
    checkpoints = {
        of: write_checkpoint(of[0], folder / "-".join(map(str, of)), short=of[1])
        for of in {case.checkpoint for case in CASES.values()}
    }
    run_ranks(examine, WORLD, CASES, checkpoints, str(folder))
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in CASES}


AHEAD = (examine_adapters,)


@pytest.mark.parametrize("name", CASES)
def test_merged_shards_are_what_bridge_merges_and_the_trained_weights_stay(
    name: str, found_ahead: FoundAhead
) -> None:
    found = found_ahead.by(examine_adapters)[name]
    assert len(found["merged"]) == VERSIONS
    for version in found["merged"]:
        assert version["wrong"] == []
        assert version["changed"] > 0
        assert all("router" in reason for reason in version["reasons"].values())
    assert found["touched"] == []


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_alone_is_what_bridge_exports_of_it_under_the_names_of_its_checkpoint(
    name: str, found_ahead: FoundAhead
) -> None:
    found = found_ahead.by(examine_adapters)[name]
    assert len(found["alone"]) == VERSIONS
    for version in found["alone"]:
        assert version["wrong"] == []
        assert list(version["reasons"]) == [SETTINGS_NAME]
