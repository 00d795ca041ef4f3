"""A run that resumes brings the scales that the next refit would have brought."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.recipes.config.load import TrainConfig
from rlrefit.recipes.loop import TrainingLoop
from rlrefit.recipes.policy.batch import PolicyBatch
from rlrefit.recipes.refits import Refits
from rlrefit.recipes.run.checkpoint import CheckpointStore
from rlrefit.recipes.run.files import MetricsFile
from rlrefit.workers.trainers.durable import HashedFile

SCALES = {"model.layers.0.self_attn.attn.k_scale": 0.1, "model.layers.0.self_attn.attn.v_scale": 1 / 3}


class Trainers:
    """Ranks that calibrate, save a file, and keep what refits bring."""

    def __init__(self) -> None:
        self.brought: list[Any] = []

    def calibrate_kv_scales(self, batch: PolicyBatch, margin: float) -> dict[str, float]:
        return SCALES

    def save(self, folder: Path) -> dict[str, Any]:
        with HashedFile(folder / "rank") as file:
            file.write(b"weights")
        return {"rank": file.written}

    def submit_refit(self, version: int, kv_scales: dict[str, float] | None) -> list[Any]:
        self.brought.append(kv_scales)
        return []


@pytest.fixture
def parts(tmp_path: Path) -> Callable[[bool], tuple[Trainers, Refits, TrainingLoop, CheckpointStore]]:
    """Trainers, refits, the loop and its checkpoints of a run that begins."""

    def make(calibrates: bool) -> tuple[Trainers, Refits, TrainingLoop, CheckpointStore]:
        config = TrainConfig()
        config.generation.backend, config.policy.refit.kv_scales = "vllm", calibrates
        trainers: Any = Trainers()
        engines: Any = SimpleNamespace(submit_refit=lambda version: [])
        refits = Refits(config, trainers, engines, tmp_path / "refits.jsonl")
        store = CheckpointStore(tmp_path / "checkpoints", 2, {})
        collector: Any = SimpleNamespace(position={"epoch": 0})
        metrics = MetricsFile(tmp_path / "metrics.jsonl")
        loop = TrainingLoop(config, trainers, refits, collector, store, metrics, lambda row: None)
        return trainers, refits, loop, store

    return make


@pytest.mark.parametrize(("calibrates", "brought"), [(True, SCALES), (False, None)])
def test_a_resumed_run_brings_the_scales_of_the_step_that_was_saved(
    parts: Any, calibrates: bool, brought: dict[str, float] | None
) -> None:
    _, refits, loop, store = parts(True)
    refits.calibrate(PolicyBatch(torch.ones(2, 4, dtype=torch.int64), torch.zeros(2, 4)))
    loop._save(1)
    found = store.latest_good().checkpoint
    trainers, resumed, _, _ = parts(calibrates)
    resumed.load_state(found.extra["refits"])
    resumed._move(1)
    resumed._move(2)
    assert trainers.brought == [brought, None]


def test_checkpoints_of_before_have_no_scales(parts: Any) -> None:
    trainers, refits, _, _ = parts(True)
    refits.load_state({})
    refits._move(1)
    assert trainers.brought == [None]
