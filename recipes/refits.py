"""The refit as the training loop sees it: meet once, then one call a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..integration.records.record import RefitRecord, RefitSummary, summarize
from .config.schema import TrainConfig
from .policy.batch import PolicyBatch
from .policy.group import TrainerGroup
from .rollout.base import RolloutGroup
from .run.cluster import gather
from .run.files import append_json_lines

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# By how much keys and values may exceed the calibration's. vLLM clips beyond, and SGLang may store NaN. FP8 has a mantissa of its
# own for each power of two, so twice the room costs little but the smallest numbers.
_KV_MARGINS = {"vllm": 1.05, "sglang": 2.0}


class Refits:
    """Joins a trainer and its engines, and moves the weights.

    Args:
        config: the recipe, whose ``refit_engine`` moves the weights.
        trainers: the trainer's ranks, built.
        engines: the engines, built.
        records: JSON-lines file for the record of every refit and rank.

    Attributes:
        routes: numbers of weights by route; empty until trainer and engines have met.
    """

    def __init__(
        self, config: TrainConfig, trainers: TrainerGroup, engines: RolloutGroup, records: Path
    ) -> None:
        self._trainers = trainers
        self._engines = engines
        self._records = records
        self._timeout_s = config.ray.timeout_s
        self._calibrates = config.policy.refit.kv_scales
        self._kv_scales: dict[str, float] | None = None
        self._engine = config.refit_engine
        self._backend = config.generation.backend
        self._on_met: Callable[[dict[str, object]], None] = lambda routes: None
        self.routes: dict[str, object] = {}

    def begin(self, first_step: int, on_met: Callable[[dict[str, object]], None]) -> None:
        """Have the trainer ready for the first step.

        Args:
            first_step: of the run.
            on_met: called with the routes, once they are known.

        Raises:
            RunError: a rank failed; names it.
        """
        self._on_met = on_met
        self._meet()

    def calibrate(self, batch: PolicyBatch) -> None:
        """Have the next refit bring scales for the engines' FP8 KV cache: those of ``batch`` under the present weights.

        Raises:
            RunError: a rank failed, or what goes into its attention is not finite.
        """
        self._kv_scales = self._trainers.calibrate_kv_scales(batch, _KV_MARGINS[self._backend])

    def state(self) -> dict[str, Any]:
        """What the next refit brings besides the weights, as JSON has it, for a checkpoint."""
        return {"kv_scales": self._kv_scales}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`; one of a run that calibrated no scales has none."""
        if self._calibrates:
            self._kv_scales = state.get("kv_scales")

    def run(self, version: int) -> RefitSummary | None:
        """Move all weights to all engines and commit ``version``; None if nothing was moved.

        Raises:
            RunError: a rank failed; names it. The engines may be dirty and refuse to generate.
        """
        return self._summary(self._move(version))

    def generate(self, work: Callable[[], Result]) -> Result:
        """Do the engines' work."""
        return work()

    def hand_over(self) -> None:
        """Have the trainer ready for its work, whatever the engines have to give up for it."""

    def train(self, work: Callable[[], Result]) -> Result:
        """Do the trainer's work."""
        return work()

    def stage_metrics(self) -> dict[str, Any]:
        """Of the memory stages since the last call; none where trainer and engines have devices of their own."""
        return {}

    def _meet(self) -> None:
        meeting = self._trainers.open_refit_rendezvous(self._engines.gen_ranks)
        self.routes = gather(
            [
                *self._trainers.submit_join_refit(meeting, self._engine),
                *self._engines.submit_join_refit(meeting, self._trainers.ranks, self._engine),
            ],
            self._timeout_s,
        )[0]
        self._on_met(self.routes)

    def _move(self, version: int) -> list[RefitRecord]:
        results = gather(
            [
                *self._trainers.submit_refit(version, self._kv_scales),
                *self._engines.submit_refit(version),
            ],
            self._timeout_s,
        )
        self._kv_scales = None
        rows = [row for result in results for row in (result if isinstance(result, list) else [result])]
        return [RefitRecord(**row) for row in rows]

    def _summary(self, records: list[RefitRecord]) -> RefitSummary:
        append_json_lines(self._records, [record.to_json() for record in records])
        return summarize(records)
