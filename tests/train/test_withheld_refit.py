"""What happens to a run whose weights never reach the engine: the generation KL tells."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console

from rlrefit.recipes.config import load_config
from rlrefit.recipes.policy_batch import PolicyBatch
from rlrefit.recipes.refits import Refits
from rlrefit.recipes.train import train
from rlrefit.recipes.trainer_group import TrainerGroup

from .command import metrics


class WithheldRefits(Refits):
    """Moves the first weights, so that the engine may serve, and none after them."""

    def __init__(self, config: Any, trainers: TrainerGroup, *rest: Any) -> None:
        super().__init__(config, trainers, *rest)
        batch = PolicyBatch(torch.ones(2, 4, dtype=torch.int64), torch.zeros(2, 4))
        self.answers.extend(trainers._group.call("compute_logprobs", batch))

    answers: ClassVar[list[Any]] = []

    def run(self, version: int) -> Any:
        return super().run(version) if version == 0 else None


@pytest.mark.timeout(300)
def test_without_refits_the_reward_stays_and_the_generation_kl_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("grpo_tiny", ["algorithm.steps=7", "validation.every=6", "name=withheld"])
    train(config, Console(file=io.StringIO()), refits=WithheldRefits)
    rows = metrics(tmp_path / "runs" / "withheld")
    # One rank answers for the whole batch: over all ranks it would be gigabytes.
    assert [None if answer is None else answer.shape for answer in WithheldRefits.answers] == [(2, 4), None]
    assert {row["weights/version"] for row in rows} == {0}
    assert rows[0]["generation_kl"] < 1e-6
    # The engine samples from the first weights while the trainer moves away from them.
    assert rows[-1]["generation_kl"] > 1e-2
    assert rows[-1]["reward/mean"] < 2 * rows[0]["reward/mean"]
    assert rows[-1]["val/reward"] == rows[0]["val/reward"]
