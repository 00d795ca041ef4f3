"""verl's trainers with updates shard to shard by a RefitCheckpointManager.

trainer.v1.trainer_mode: rlrefit_sync  # or rlrefit_colocate_async, rlrefit_separate_async; the keys of verl's modes apply
actor_rollout_ref.rollout.checkpoint_engine:
  backend: nccl_xfer_shards
  custom_backend_module: rlrefit.workers.frameworks.verl.engine
ray_kwargs.ray_init.runtime_env.env_vars:
  VERL_USE_EXTERNAL_MODULES: rlrefit.workers.frameworks.verl.trainers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.v1 import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)
from verl.utils.config import omega_conf_to_dataclass

from .contract import require_supported_trainer
from .manager import RefitCheckpointManager

require_supported_trainer(PPOTrainer)


class _ShardToShard(PPOTrainer):
    """A trainer of verl whose weights go to the engines by a RefitCheckpointManager.

    Args:
        config: verl's configuration. Its ``trainer_mode`` becomes the one that verl knows this trainer by, since verl compares
            it with its own names and finds the mode's keys under it.

    Raises:
        RefitError: in ``init``, as the manager's.
    """

    mode: str

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.mode
        super().__init__(config)

    def _manager(self, replicas: Sequence[Any]) -> RefitCheckpointManager:
        settings = self.config.actor_rollout_ref.rollout.checkpoint_engine
        return RefitCheckpointManager(
            omega_conf_to_dataclass(settings), self.actor_rollout_wg, list(replicas)
        )


class _InTurns(_ShardToShard):
    """On the engines' GPUs."""

    def _setup(self) -> None:
        super()._setup()
        # verl's own has just been made for the backend `naive`, whatever is configured, and has put the engines to sleep.
        self.checkpoint_manager = self._manager(self.llm_server_manager.get_replicas())

    def on_step_end(self) -> None:
        super().on_step_end()
        # verl drops what the update has told; it logs what it finds here.
        self._pending_sync_metrics = dict(self.checkpoint_manager.metrics)


@register_trainer("rlrefit_sync")
class RefitTrainerSync(_InTurns, PPOTrainerSync):
    """verl's ``sync``."""

    mode = "sync"


@register_trainer("rlrefit_colocate_async")
class RefitTrainerColocateAsync(_InTurns, PPOTrainerColocateAsync):
    """verl's ``colocate_async``."""

    mode = "colocate_async"


@register_trainer("rlrefit_separate_async")
class RefitTrainerSeparateAsync(_ShardToShard, PPOTrainerSeparateAsync):
    """verl's ``separate_async``. Replicas on the trainer's GPUs beside the others get their weights by verl's own hand-over."""

    mode = "separate_async"

    def _setup(self) -> None:
        super()._setup()
        self.standalone_checkpoint_manager = self._manager(self.standalone_server_manager.get_replicas())
