"""Puts :class:`.synchronizer.ShardSynchronizer` where NeMo-RL's trainers look for one.

Between NeMo-RL's ``setup`` and its training loop, in the driver::

    from rlrefit.workers.frameworks.nemo_rl.install import install

    install(policy, policy_generation)
"""

from __future__ import annotations

import importlib
from typing import Any

from .contract import SHARD_TO_SHARD, SYNCHRONIZER, require_supported
from .settings import NemoRlRefit
from .synchronizer import ShardSynchronizer


def install(policy: Any, policy_generation: Any) -> ShardSynchronizer:
    """Refit shard to shard from here on, as ``policy.generation.refit_cfg.rlrefit`` says.

    Args:
        policy: NeMo-RL's ``Policy``.
        policy_generation: NeMo-RL's ``VllmGeneration``; its ``weight_synchronizer`` is replaced.

    Raises:
        UnsupportedNemoRl: it calls or answers in another way; lists all differences.
        RefitError: the configuration, or what the workers hold, does not allow it; nothing has been written.
    """
    require_supported(SHARD_TO_SHARD)
    settings = NemoRlRefit.of(policy_generation.cfg)
    made = ShardSynchronizer(policy, policy_generation, settings)
    base = importlib.import_module(SYNCHRONIZER.module).WeightSynchronizer
    base.register(ShardSynchronizer)
    made.init_communicator()
    before, policy_generation.weight_synchronizer = policy_generation.weight_synchronizer, made
    if before is not None:
        before.shutdown()
    return made
