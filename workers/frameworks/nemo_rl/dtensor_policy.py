"""Our FSDP mixin around the model of a NeMo-RL ``DTensorPolicyWorker`` or ``DTensorPolicyWorkerV2``."""

from __future__ import annotations

from typing import Any

import torch

from ....integration.config import RefitConfig
from ...trainers.fsdp.mixin import FSDPRefitMixin


class DTensorPolicyRefit(FSDPRefitMixin):
    """Of one worker, which stays as it is."""

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
