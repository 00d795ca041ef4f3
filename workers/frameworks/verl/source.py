"""verl's training engines as weight sources: the mixins put around an engine that stays as verl made it."""

from __future__ import annotations

from typing import Any

import torch

from ....integration.config import RefitConfig
from ....integration.errors import RefitError
from ...trainers.fsdp.mixin import FSDPRefitMixin
from ...trainers.megatron.mixin import MegatronRefitMixin
from ...trainers.source_mixin import SourceRefitMixin
from .contract import require_supported_actor
from .served import asked_violations, model_violations

_STRATEGIES = ("fsdp2", "megatron")


class FSDPSide(FSDPRefitMixin):
    """Around verl's FSDP engine, whose ``module`` is under ``fully_shard``.

    Args:
        engine: verl's.
        config: of the refit.
        dtype: of the rollout's weights.
    """

    def __init__(self, engine: Any, config: RefitConfig, dtype: torch.dtype):
        self._engine = engine
        self.refit_config = config
        self.refit_dtype = dtype

    @property
    def model(self) -> torch.nn.Module:  # type: ignore[override]
        """The engine's own at the moment."""
        model: torch.nn.Module = self._engine.module
        return model


class MegatronSide(MegatronRefitMixin):
    """Around verl's Megatron engine, which was built through Megatron-Bridge.

    Args:
        engine: verl's.
        config: of the refit.
    """

    def __init__(self, engine: Any, config: RefitConfig):
        self._engine = engine
        self.refit_config = config

    @property
    def model(self) -> list[torch.nn.Module]:  # type: ignore[override]
        """The engine's own at the moment."""
        model: list[torch.nn.Module] = self._engine.module
        return model

    @property
    def bridge(self) -> Any:
        """As :attr:`model`."""
        return self._engine.bridge


def source_of(worker: Any, config: RefitConfig) -> SourceRefitMixin:
    """The source side of an actor.

    Args:
        worker: verl's ``ActorRolloutRefWorker``, with its model loaded.
        config: of the refit.

    Raises:
        UnsupportedVerl: it is not as this was written for.
        RefitError: its engine or the rollout's settings don't allow shard to shard; lists all reasons.
    """
    require_supported_actor(worker)
    engine, strategy, rollout = worker.actor.engine, worker.config.actor.strategy, worker.config.rollout
    model = worker.config.model
    wrong, of_model = _violations(engine, strategy, rollout, config, model), model_violations(model)
    if wrong or of_model:
        instead = (
            " checkpoint_engine.backend=nccl_xfer with custom_backend_module=rlrefit.workers.frameworks.verl.full_tensors sends full "
            "tensors of any engine"
        )
        raise RefitError(
            "this run of verl can't refit shard to shard:\n  "
            + "\n  ".join([*wrong, *of_model])
            # Where merging is all that lacks, and without it nothing is sent right.
            + f"\nNothing was sent.{instead if wrong else ''}",
            stage="settings",
        )
    if strategy == "megatron":
        return MegatronSide(engine, config)
    return FSDPSide(engine, config, _dtype(rollout.dtype))


def _violations(engine: Any, strategy: str, rollout: Any, config: RefitConfig, model: Any) -> list[str]:
    found = []
    if strategy not in _STRATEGIES:
        found.append(f"actor.strategy is {strategy}; its shards are known for {', '.join(_STRATEGIES)}")
    if strategy == "megatron":
        if engine.vanilla_bridge:
            found.append(
                "the Megatron engine was built with mbridge; set actor.megatron.vanilla_mbridge=false"
            )
        if engine.engine_config.use_megatron_fsdp:
            found.append(
                "Megatron-FSDP keeps its shards in buffers for which there are no rules; set "
                "actor.megatron.use_megatron_fsdp=false"
            )
    if getattr(engine, "_qat_enabled", False):
        found.append("verl's quantization-aware training changes weights in its export, after the shards")
    return found + asked_violations(rollout, config, model, strategy)


def _dtype(name: str) -> torch.dtype:
    dtype = {"half": torch.float16, "float": torch.float32}.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RefitError(
            f"rollout.dtype is {name!r}, by which the trainer can't tell the dtype of the engine's weights. Nothing was "
            "sent; name it: bfloat16, say",
            stage="settings",
        )
    return dtype
