"""One run of DAPO on a mixture of experts: with refits all is well; once they stop, the generation KL tells."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.policy.batch import PolicyBatch
from rlrefit.recipes.policy.group import TrainerGroup
from rlrefit.recipes.refits import Refits
from rlrefit.recipes.train import train
from tests.ahead import FoundAhead, keeping_time

from .command import metrics
from .shared_cluster import on_shared_cluster

REFITS, STEPS = 2, 5


class WithheldRefits(Refits):
    """Moves the first weights, so that the engine may serve, and the next ones, but none after them."""

    def __init__(self, config: Any, trainers: TrainerGroup, *rest: Any) -> None:
        super().__init__(config, trainers, *rest)
        batch = PolicyBatch(torch.ones(2, 4, dtype=torch.int64), torch.zeros(2, 4))
        self.answers.extend(trainers._group.call("compute_logprobs", batch))

    answers: ClassVar[list[Any]] = []

    def run(self, version: int) -> Any:
        return super().run(version) if version < REFITS else None


@dataclass(frozen=True)
class Withheld:
    """The lines of the run's metrics, and what its trainer ranks answered: the shape, or None."""

    rows: list[dict[str, Any]]
    answers: list[tuple[int, ...] | None]


def _train(folder: Path, ray_address: str) -> Withheld:
    overrides = [
        f"ray.address={ray_address}",
        f"run_root={folder}",
        "model.path=tiny:qwen3-moe",
        "trainer.expert_parallel=2",
        f"algorithm.steps={STEPS}",
        # So fast that few steps lead far away.
        "trainer.optimizer.lr=2.0e-3",
        "algorithm.prompts_per_step=16",
        "algorithm.max_sampling_rounds=2",
        "validation.every=2",
    ]
    train(load_config("dapo_tiny", overrides), Console(file=io.StringIO()), refits=WithheldRefits)
    answers = [None if answer is None else tuple(answer.shape) for answer in WithheldRefits.answers]
    return Withheld(metrics(folder / "dapo_tiny"), answers)


@keeping_time  # Ray gives up starting after half a minute
def train_without_refits(folder: Path) -> Withheld:
    return on_shared_cluster(_train, folder)


AHEAD = (train_without_refits,)


def test_dapo_trains_a_mixture_of_experts_and_without_refits_the_generation_kl_tells(
    found_ahead: FoundAhead,
) -> None:
    found: Withheld = found_ahead.by(train_without_refits)
    # One rank answers for the whole batch: over all ranks it would be gigabytes.
    assert found.answers == [(2, 4), None]
    refitted, withheld = found.rows[:REFITS], found.rows[REFITS:]
    assert [row["weights/version"] for row in refitted] == [0, 1]
    assert all(row["refit/bytes_misc"] > 0 for row in refitted)  # of the router
    assert all(row["sampling/generated"] >= 16 * 8 for row in found.rows)
    assert max(row["generation_kl"] for row in refitted) <= 1e-3
    assert refitted[-1]["generation_kl"] < 1e-6
    assert len(withheld) == STEPS - REFITS
    assert {row["weights/version"] for row in withheld} == {REFITS - 1}
    # The engine samples from the same weights while the trainer moves away from them.
    assert withheld[-1]["generation_kl"] > 1e-2
    assert withheld[-1]["reward/mean"] < 2 * refitted[-1]["reward/mean"]
    validated = [row["val/reward"] for row in withheld if row["val/reward"] is not None]
    assert len(validated) > 1
    assert len(set(validated)) == 1
