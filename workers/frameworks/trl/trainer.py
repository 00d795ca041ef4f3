"""TRL's ``AsyncGRPOTrainer``, whose ranks send their own shards straight into the live parameters of a vLLM server.

    trainer = RefitAsyncGRPOTrainer(model, reward_funcs, args=args, train_dataset=dataset)

TRL has a ``weight_transfer`` on the main process alone, and every rank gathers each parameter for it. Here the step that does so is
replaced, on every rank. The server is vLLM's with rlrefit's backend; the rest of TRL stays as it is.
"""

from __future__ import annotations

import time
from typing import Any

from trl.experimental.async_grpo import async_grpo_trainer as published

from ....integration.errors import RefitError
from .contract import require_supported
from .transfer import ShardOptions, ShardTransfer

require_supported(published)


class RefitAsyncGRPOTrainer(published.AsyncGRPOTrainer):
    """As TRL's, with arguments of the same names.

    Args:
        args, kwargs: TRL's, without ``weight_transfer``.
        refit: the same on all ranks.

    Attributes:
        refit_record: this rank's :class:`RefitRecord` of the last update as plain data; None before the first.

    Raises:
        RefitError: lists all that is wrong with ``refit``, and with how accelerate runs the training.
    """

    def __init__(self, *args: Any, refit: ShardOptions | None = None, **kwargs: Any) -> None:
        if kwargs.get("weight_transfer") is not None:
            raise RefitError(
                "weight_transfer: this trainer has its own; leave it out, or train by TRL's AsyncGRPOTrainer",
                stage="settings",
            )
        self._shards = ShardTransfer(self, refit or ShardOptions())
        self.refit_record: dict[str, Any] | None = None
        super().__init__(*args, **kwargs | {"weight_transfer": self._shards})
        self._shards.require_served()

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """As TRL's, by a refit. The server pauses and resumes within the transfer's time."""
        marks = []
        version, self.refit_record = self._shards.update(lambda: marks.append(time.time()))
        if self.accelerator.is_main_process:
            self.model_version = version
            if self.rollout_worker:
                self.rollout_worker.update_model_version(version)
        return t0, marks[0], time.time()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._shards.close()
