"""verl's trainers that share GPUs with their engines, with updates shard to shard.

trainer.v1.trainer_mode: rlrefit_sync  # or rlrefit_colocate_async; verl's keys of `sync` and `colocate_async` apply
actor_rollout_ref.rollout.checkpoint_engine:
  backend: nccl_xfer_shards
  custom_backend_module: rlrefit.workers.frameworks.verl.engine
ray_kwargs.ray_init.runtime_env.env_vars:
  VERL_USE_EXTERNAL_MODULES: rlrefit.workers.frameworks.verl.trainers
"""

from __future__ import annotations

from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerColocateAsync, PPOTrainerSync, register_trainer
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

    def _setup(self) -> None:
        super()._setup()
        # verl's own has just been made for the backend `naive`, whatever is configured, and has put the engines to sleep.
        settings = self.config.actor_rollout_ref.rollout.checkpoint_engine
        self.checkpoint_manager = RefitCheckpointManager(
            omega_conf_to_dataclass(settings), self.actor_rollout_wg, self.llm_server_manager.get_replicas()
        )


@register_trainer("rlrefit_sync")
class RefitTrainerSync(_ShardToShard, PPOTrainerSync):
    """verl's ``sync``."""

    mode = "sync"


@register_trainer("rlrefit_colocate_async")
class RefitTrainerColocateAsync(_ShardToShard, PPOTrainerColocateAsync):
    """verl's ``colocate_async``."""

    mode = "colocate_async"
