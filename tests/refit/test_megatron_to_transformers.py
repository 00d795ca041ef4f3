"""From real Megatron ranks to real transformers engines: both paths end in the bytes of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .models import make_model
from .worlds import Scenario, epochs, run_scenario

SHARDS, GOLDEN, CONVENTIONAL = ("nccl_xfer", "p2p"), ("nccl_xfer", "golden"), ("packed_broadcast", "auto")

CASES: dict[str, dict[str, Any]] = {
    "qwen3 TP2 to TP2": {"kind": "qwen3", "layout": {"tensor_parallel": 2}, "gen_tp": 2, "replicas": 1},
    "qwen3 TP2 to TP1 x DP2": {"kind": "qwen3", "layout": {"tensor_parallel": 2}, "gen_tp": 1, "replicas": 2},
    "qwen3-moe TP2 x EP2 to TP2": {
        "kind": "qwen3-moe",
        "layout": {"tensor_parallel": 2, "expert_parallel": 2},
        "gen_tp": 2,
        "replicas": 1,
    },
    "qwen3 PP2 to TP2": {"kind": "qwen3", "layout": {"pipeline_parallel": 2}, "gen_tp": 2, "replicas": 1},
    "tied embeddings, PP2 to TP2": {
        "kind": "qwen3-tied",
        "layout": {"pipeline_parallel": 2},
        "gen_tp": 2,
        "replicas": 1,
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_shards_golden_and_broadcast_all_land_the_checkpoint_bit_for_bit(
    case: dict[str, Any], tmp_path: Path
) -> None:
    models = tuple(make_model(case["kind"], tmp_path / f"seed{seed}", seed) for seed in range(3))
    scenario = Scenario(
        layout=case["layout"],
        train_ranks=2,
        gen_tp=case["gen_tp"],
        replicas=case["replicas"],
        models=models,
        epochs=epochs(SHARDS, GOLDEN, CONVENTIONAL),
    )
    trainers, engines = run_scenario(scenario)
    for report in engines:
        assert [epoch["wrong"] for epoch in report] == [[], [], []]
        assert [epoch["version"] for epoch in report] == [4, 4, 4]
    shards = trainers[0][0]["manifest"]
    assert shards["bulk"] > 0
    # Only the router of a mixture of experts has no shard rule.
    assert all("router" in reason for reason in shards["misc_reasons"].values())
    assert bool(shards["misc_reasons"]) == (case["kind"] == "qwen3-moe")
    received = engines[0][0]["records"][0]
    assert received["bytes_verified"] == received["bytes_bulk"] > 0
    assert received["bytes_kept"] >= received["bytes_bulk"]
    conventional = engines[0][2]["records"][0]
    assert conventional["bytes_bulk"] == 0
    assert conventional["bytes_misc"] > received["bytes_misc"]
