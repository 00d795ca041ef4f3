"""Our Megatron mixin around the model of a NeMo-RL ``MegatronPolicyWorker``."""

from __future__ import annotations

from typing import Any

import torch

from ....integration.config import RefitConfig
from ...trainers.megatron.mixin import MegatronRefitMixin


class MegatronPolicyRefit(MegatronRefitMixin):
    """Of one worker, which stays as it is."""

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
