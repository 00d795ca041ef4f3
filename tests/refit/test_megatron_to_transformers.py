"""From real Megatron ranks to real transformers engines: both paths end in the bytes of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ahead import FoundAhead, left_to_all, of_all_tests

from .models import make_model
from .worlds import Scenario, epochs, run_scenarios

SHARDS, GOLDEN, CONVENTIONAL = ("nccl_xfer", "p2p"), ("nccl_xfer", "golden"), ("packed_broadcast", "auto")

# name → (model, trainer layout, tensor parallelism of the engine)
CASES: dict[str, tuple[str, dict[str, int], int]] = {
    "qwen3 TP2 to TP2": ("qwen3", {"tensor_parallel": 2}, 2),
    "qwen3-moe TP2 x EP2 to TP2": ("qwen3-moe", {"tensor_parallel": 2, "expert_parallel": 2}, 2),
    "qwen3-moe TP2 x ETP2 to TP2": (
        "qwen3-moe",
        {"tensor_parallel": 2, "expert_tensor_parallel": 2},
        2,
    ),
    "qwen3 PP2 x VPP2 to TP2": ("qwen3-four-layers", {"pipeline_parallel": 2, "virtual_pipeline": 2}, 2),
    "tied embeddings, PP2 to TP2": ("qwen3-tied", {"pipeline_parallel": 2}, 2),
    "a vocabulary that TP2 pads, to TP1 x DP2": ("qwen3-odd-vocabulary", {"tensor_parallel": 2}, 1),
    "tied embeddings, TP2 to TP1 x DP2": ("qwen3-tied", {"tensor_parallel": 2}, 1),
}
# Its parts are in others here, and a tied embedding that TP cuts is in `tests/families`.
ALONE = ("tied embeddings, TP2 to TP1 x DP2",)
Reports = dict[str, tuple[list[Any], list[Any]]]


def ask_all_cases(folder: Path) -> Reports:
    """What all ranks saw in the cases of each change."""
    return _run(folder, [name for name in CASES if name not in ALONE])


@of_all_tests
def ask_cases_alone(folder: Path) -> Reports:
    """And in those whose parts others have."""
    return _run(folder, ALONE)


def _run(folder: Path, names: Sequence[str]) -> Reports:
    cases = [CASES[name] for name in names]
    models = {
        kind: tuple(make_model(kind, folder / f"{kind}-{seed}", seed) for seed in range(3))
        for kind in {case[0] for case in cases}
    }
    scenarios = [
        Scenario(layout, gen_tp, models[kind], epochs(folder / f"case{index}", SHARDS, GOLDEN, CONVENTIONAL))
        for index, (kind, layout, gen_tp) in enumerate(cases)
    ]
    return dict(zip(names, run_scenarios(scenarios), strict=True))


AHEAD = (ask_all_cases, ask_cases_alone)


_ALL = left_to_all(CASES, ALONE)


@pytest.mark.parametrize("case", _ALL)
def test_shards_golden_and_broadcast_all_land_the_checkpoint_bit_for_bit(
    case: str, found_ahead: FoundAhead
) -> None:
    trainers, engines = found_ahead.by(ask_cases_alone if case in ALONE else ask_all_cases)[case]
    for report in engines:
        assert [epoch["wrong"] for epoch in report] == [[], [], []]
        assert [epoch["version"] for epoch in report] == [2, 2, 2]
    received = engines[0][0]["records"][0]
    assert received["bytes_verified"] == received["bytes_bulk"] + received["bytes_misc"]
    assert received["bytes_kept"] >= received["bytes_bulk"]
    conventional = engines[0][2]["records"][0]
    assert conventional["bytes_bulk"] == 0
    assert conventional["bytes_misc"] > received["bytes_misc"]
    # Only the router of a mixture of experts has no shard rule.
    manifest = trainers[0][0]["manifest"]
    assert manifest["bulk"] > 0
    assert all("router" in reason for reason in manifest["misc_reasons"].values())
    assert bool(manifest["misc_reasons"]) == (CASES[case][0] == "qwen3-moe")
