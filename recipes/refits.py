"""The refit as the training loop sees it: meet once, then one call a step."""

from __future__ import annotations

import logging
from pathlib import Path

from ..integration.records import RefitRecord, RefitSummary, summarize
from .cluster import gather
from .config_schema import TrainConfig
from .policy_batch import PolicyBatch
from .rollout import RolloutGroup
from .run_files import append_json_lines
from .trainer_group import TrainerGroup

logger = logging.getLogger(__name__)


class Refits:
    """Joins a trainer and its engines, and moves the weights.

    Args:
        config: ``policy.nccl_xfer_refit`` chooses between shard to shard and the conventional path.
        trainers: the trainer's ranks, built.
        engines: the engines, built.
        records: JSON-lines file for the record of every refit and rank.
    """

    def __init__(
        self, config: TrainConfig, trainers: TrainerGroup, engines: RolloutGroup, records: Path
    ) -> None:
        self._trainers = trainers
        self._engines = engines
        self._records = records
        self._timeout_s = config.ray.timeout_s
        self._kv_scales: dict[str, float] | None = None
        self._engine = "nccl_xfer" if config.policy.nccl_xfer_refit else "packed_broadcast"
        meeting = trainers.open_refit_rendezvous(engines.gen_ranks)
        routes = gather(
            [
                *trainers.submit_init_refit(meeting, self._engine),
                *engines.submit_init_refit(meeting, trainers.ranks, self._engine),
            ],
            self._timeout_s,
        )[0]
        self.routes: dict[str, object] = routes

    def calibrate(self, batch: PolicyBatch) -> None:
        """Have the next refit bring scales for the engines' FP8 KV cache: those of ``batch`` under the present weights.

        Raises:
            RunError: a rank failed, or what goes into its attention is not finite.
        """
        self._kv_scales = self._trainers.calibrate_kv_scales(batch)

    def run(self, version: int) -> RefitSummary | None:
        """Move all weights to all engines and commit ``version``; None if nothing was moved.

        Raises:
            RunError: a rank failed; names it. The engines may be dirty and refuse to generate.
        """
        results = gather(
            [
                *self._trainers.submit_refit(self._engine, version, self._kv_scales),
                *self._engines.submit_refit(self._engine, version),
            ],
            self._timeout_s,
        )
        self._kv_scales = None
        rows = [row for result in results for row in (result if isinstance(result, list) else [result])]
        append_json_lines(self._records, rows)
        return summarize([RefitRecord(**row) for row in rows])
