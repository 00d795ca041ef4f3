"""FSDP2's side of the catalogue beside real transformers models under ``fully_shard``."""

from __future__ import annotations

from typing import Any

import pytest

from rlrefit.integration.weights.manifest import dtype_name
from rlrefit.recipes.plan.catalog import FsdpLayout, Model, exported_specs, train_storage

from .real import ask
from .shrunken import CONFIGS

_NAMES = ("llama", "llama-tied", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
# Eight experts over three ranks, rows that don't divide, the last rank and one in the middle; ranks with nothing.
_CASES: list[tuple[str, FsdpLayout, int]] = [
    *((name, FsdpLayout(3), 2) for name in _NAMES),
    ("qwen3", FsdpLayout(2, 2), 3),
    ("qwen3_moe", FsdpLayout(5), 1),
    ("qwen3_moe", FsdpLayout(5), 4),
]


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    cases = [{"config": CONFIGS[name], **vars(layout), "rank": rank} for name, layout, rank in _CASES]
    return ask("real_fsdp", cases, {})


@pytest.mark.parametrize(
    "index", range(len(_CASES)), ids=[f"{name}-fsdp{at.fsdp}-rank{rank}" for name, at, rank in _CASES]
)
def test_a_rank_under_fsdp_holds_what_the_catalogue_says(index: int, real: list[dict[str, Any]]) -> None:
    name, layout, rank = _CASES[index]
    model, theirs = Model(name, CONFIGS[name]), real[index]
    stored = train_storage(model, layout, rank)
    held: dict[str, list[Any]] = {}
    for param in stored:
        for part in param.parts:
            place = [[list(side) for side in part.box], dtype_name(param.dtype)]
            held.setdefault(part.name, []).append(place)
    assert theirs["refused"] == {}
    assert held == theirs["held"]
    assert sorted(spec.to_json() for spec in exported_specs(model, layout)) == sorted(theirs["specs"])
    buffers = [param.name for param in stored if param.name.endswith("e_score_correction_bias")]
    assert {p.name: list(p.shape) for p in stored if p.name not in buffers} == theirs["parameters"]
