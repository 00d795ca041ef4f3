"""What runs inside NeMo-RL's policy workers: our mixins put around the model that a worker has.

The functions take the worker first, and Ray's ``__ray_call__`` runs them in its process: NeMo-RL's classes stay as they
are. Each answers with plain data, or with its error as such (:func:`~...engines.common.answers.answer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from ....integration.config import RefitConfig
from ....integration.errors import RefitError
from ...engines.common.answers import answer
from ...ray_host import node_address
from ...trainers.fsdp.mixin import FSDPRefitMixin
from ...trainers.megatron.mixin import MegatronRefitMixin
from ...trainers.source_mixin import SourceRefitMixin
from .settings import FULL_TENSORS

_ATTRIBUTE = "_rlrefit_policy_refit"
_INSTEAD = f"Set policy.generation.refit_transport to {FULL_TENSORS}, which sends what NeMo-RL itself exports"


class MegatronPolicyRefit(MegatronRefitMixin):
    """The Megatron mixin around the model of a ``MegatronPolicyWorker``, which stays as it is."""

    def __init__(self, worker: Any, config: RefitConfig) -> None:
        self._worker = worker
        self.refit_config = config

    @property
    def model(self) -> list[torch.nn.Module]:  # type: ignore[override]
        """The worker's own; asked for anew, as its moves to the host and back may replace it."""
        return [self._worker.model]

    @property
    def bridge(self) -> Any:
        """The worker's ``AutoBridge``."""
        return self._worker.megatron_bridge


class DTensorPolicyRefit(FSDPRefitMixin):
    """The FSDP mixin around the model of a ``DTensorPolicyWorker`` or ``DTensorPolicyWorkerV2``, which stays as it is."""

    def __init__(self, worker: Any, config: RefitConfig) -> None:
        self._worker = worker
        self.refit_config = config

    @property
    def model(self) -> torch.nn.Module:  # type: ignore[override]
        """The worker's own."""
        model: torch.nn.Module = self._worker.model
        return model

    @property
    def refit_dtype(self) -> torch.dtype:  # type: ignore[override]
        """What NeMo-RL itself casts to for vLLM."""
        dtype: torch.dtype = self._worker.dtype
        return dtype


def prepare(worker: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Learn the weights and derive this rank's fragments, once; a collective of all policy workers.

    Args:
        worker: NeMo-RL's.
        config: fields of ``RefitConfig``.
    """
    return answer(lambda: _refit_of(worker, RefitConfig(**config)).prepare_nccl_xfer_refit_info())


def open_rendezvous(worker: Any, train_ranks: int, gen_ranks: int, epoch: int) -> dict[str, Any]:
    """Policy rank 0 alone: the meeting point of an epoch, with the secret that admits its ranks."""
    host = node_address()
    return answer(lambda: _open(worker).open_refit_rendezvous(host, train_ranks, gen_ranks, epoch))


def join(worker: Any, rendezvous: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Meet all ranks of both sides; numbers of weights by route."""
    return answer(lambda: _open(worker).join_refit(dict(rendezvous), worker.rank, engine))


def refit(worker: Any, version: int, kv_scales: Mapping[str, float] | None) -> dict[str, Any]:
    """Send all weights once; this rank's record."""
    return answer(lambda: _open(worker).refit(version, kv_scales))


def close(worker: Any) -> dict[str, Any]:
    """End the epoch on this rank."""

    def end() -> dict[str, Any]:
        found = getattr(worker, _ATTRIBUTE, None)
        if found is not None:
            found.close_refit()
        return {}

    return answer(end)


def _refit_of(worker: Any, config: RefitConfig) -> SourceRefitMixin:
    """The one of ``worker``, made anew for another configuration."""
    found: SourceRefitMixin | None = getattr(worker, _ATTRIBUTE, None)
    if found is not None and asdict(found.refit_config) == asdict(config):
        return found
    if found is not None:
        found.close_refit()
    wrong = _violations(worker)
    if wrong:
        raise RefitError(
            f"{type(worker).__name__} can't be refitted shard to shard: {'; '.join(wrong)}. Nothing was prepared. "
            f"{_INSTEAD}",
            stage="settings",
            rank=getattr(worker, "rank", -1),
        )
    made = (MegatronPolicyRefit if hasattr(worker, "megatron_bridge") else DTensorPolicyRefit)(worker, config)
    setattr(worker, _ATTRIBUTE, made)
    return made


def _open(worker: Any) -> SourceRefitMixin:
    found: SourceRefitMixin | None = getattr(worker, _ATTRIBUTE, None)
    if found is None:
        raise RefitError(
            "this policy worker was not prepared: it has been started anew since, or init_communicator() was not called. "
            "Nothing was sent; call it again",
            stage="handshake",
            rank=getattr(worker, "rank", -1),
        )
    return found


def _violations(worker: Any) -> list[str]:
    """What of ``worker`` the mixins can't see, and would therefore leave out in silence."""
    needed = (
        ("rank", "model", "megatron_bridge")
        if hasattr(worker, "megatron_bridge")
        else ("rank", "model", "dtype")
    )
    found = [f"it has no {name}" for name in needed if not hasattr(worker, name)]
    if found:
        return found
    if getattr(worker, "draft_model", None) is not None:
        found.append(
            "it trains a draft model, whose weights only its own export names (policy.draft.enabled)"
        )
    if (getattr(worker, "cfg", None) or {}).get("quant_cfg") is not None:
        found.append("ModelOpt quantizes its weights as it exports them (policy.quant_cfg)")
    if getattr(worker.model, "state_dict_adapter", None) is not None:
        found.append(
            "its model is Automodel's own implementation, whose state_dict_adapter makes the checkpoint's weights as it "
            "exports them"
        )
    stages = getattr(getattr(worker.model, "config", None), "virtual_pipeline_model_parallel_size", None)
    if (stages or 1) > 1:
        found.append(
            f"its pipeline has {stages} virtual stages, and NeMo-RL's worker keeps the first one's model alone "
            "(virtual_pipeline_model_parallel_size)"
        )
    lora = [name for name, module in worker.model.named_modules() if type(module).__name__ == "LinearLoRA"]
    if lora:
        found.append(
            f"Automodel's LoRA adapters are merged as it exports ({lora[0]} and {len(lora) - 1} more)"
        )
    return found
