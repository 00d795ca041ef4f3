"""Puts :class:`.synchronizer.ShardSynchronizer` where NeMo-RL's trainers look for one.

Around NeMo-RL's ``setup`` of GRPO, in the driver, and then ``policy.generation.refit_transport=rlrefit`` is all that its YAML needs::

    from rlrefit.workers.frameworks.nemo_rl.install import around

    policy, policy_generation, *rest = around(setup)(config, tokenizer, dataset, val_dataset)

Or between any ``setup`` and its training loop, with vLLM's ``worker_cls`` in the YAML::

    install(policy, policy_generation)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from .contract import SHARD_TO_SHARD, SYNCHRONIZER, require_supported
from .settings import SELECTOR, WORKER_CLS, NemoRlRefit
from .synchronizer import ShardSynchronizer


def around(setup: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """NeMo-RL's ``setup`` of GRPO, with rlrefit in the place that the configuration gives to a refit transport.

    ``policy.generation.refit_transport: rlrefit`` is made into NeMo-RL's own keys: no transport of NeMo-RL's, and vLLM's worker of
    rlrefit's. Then :func:`install` is called with what ``setup`` returns first, ``policy`` and ``policy_generation``.

    Raises (when called):
        RefitError: the configuration is wrong; before ``setup``, with all that is wrong with it.
        UnsupportedNemoRl, RefitError: as :func:`install`.
    """

    @functools.wraps(setup)
    def with_refit(config: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        generation = config.policy["generation"]
        own: dict[str, Any] = {}
        if generation.get("refit_transport") == SELECTOR:
            kwargs_of_vllm = {"worker_cls": WORKER_CLS} | (generation.get("vllm_kwargs") or {})
            own = {"refit_transport": None, "vllm_kwargs": kwargs_of_vllm}
        NemoRlRefit.of({**generation, **own})
        generation.update(own)
        made = setup(config, *args, **kwargs)
        policy, policy_generation, *_ = made
        install(policy, policy_generation)
        return made

    return with_refit


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
