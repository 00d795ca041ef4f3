"""A TensorRT-LLM engine in the cycle of memory stages, with a trainer on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlrefit.integration.colocated.cycle import ColocatedCycle
from rlrefit.integration.colocated.memory import MemoryWatch, ProcessMemory
from rlrefit.integration.colocated.stages import Stage, StageError
from rlrefit.integration.errors import EngineDirty, RefitError
from tests.sglang.ways import StillTrainer

from .scene import Scene
from .sources import some_weights


class _Trainer(StillTrainer):
    """Tells of its memory."""

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        return [MemoryWatch(torch.device("cpu"), interval_s=0).read("trainer rank 0")]


@pytest.mark.parametrize("multi_stage", [True, False])
def test_the_engine_follows_the_cycle_and_serves_each_version(
    newest_extension: type, multi_stage: bool
) -> None:
    scene = Scene(newest_extension)
    asleep: list[Any] = []

    def refit(version: int) -> Any:
        asleep.append(sorted(scene.driver.asleep()))
        return [scene.sender.refit(version)]

    cycle = ColocatedCycle(scene.driver, _Trainer(), refit, multi_stage_wake_up=multi_stage)
    for version in range(2):
        cycle.to_training()
        with pytest.raises(EngineDirty):
            scene.worker.step("a")
        scene.source.weights = some_weights(seed=version)
        (record,) = cycle.to_generation(version)
        assert record.stage_peaks["refit"] > 0
        assert cycle.generate(lambda: scene.worker.step("a")) == "tokens of a"
        assert scene.driver.version == version
        scene.check()
    assert asleep == [["kv_cache"] if multi_stage else []] * 2


def test_a_refit_that_fails_leaves_the_weights_awake_for_another_one(newest_extension: type) -> None:
    scene = Scene(newest_extension)
    cycle = ColocatedCycle(scene.driver, _Trainer(), lambda version: [scene.sender.refit(version)])
    cycle.to_training()
    scene.worker.fail_at(2)
    with pytest.raises(RefitError, match="out of memory"):
        cycle.to_generation(0)
    assert cycle.state.stage is Stage.WEIGHTS_AWAKE
    with pytest.raises(StageError):
        cycle.generate(lambda: None)
    cycle.to_generation(1)
    assert scene.worker.step("a") == "tokens of a"
    scene.check()
