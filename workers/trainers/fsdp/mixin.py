"""``FSDPRefitMixin``: gives any PPO trainer's FSDP2 worker the refit.

Inherit it beside your own worker class; it needs ``self.model`` (a transformers model under ``fully_shard``, or a
``PeftModel`` of one) and ``self.refit_config`` (:class:`RefitConfig`)::

    class MyWorker(FSDPRefitMixin, MyPPOWorker):
        refit_config = RefitConfig(bucket_mb=256, timeout_s=300)
        refit_dtype = torch.bfloat16  # the engine's; the optimizer's FP32 weights are cast to it

The calls are those of :class:`SourceRefitMixin`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ....integration.config import RefitConfig
from ...kv_scales.calibration import Record, watch_transformers
from ..source_mixin import SourceRefitMixin
from .adapter_source import AdapterSource
from .attention import attention_modules
from .source import FSDPSource


class FSDPRefitMixin(SourceRefitMixin):
    """Source side of the refit for models under torch's ``fully_shard``.

    Attributes:
        model: the module that ``fully_shard`` was applied to.
        refit_config: the same on all ranks.
        refit_dtype: dtype of the engine's weights; None if the trainer keeps its own in the same. Another one needs a new epoch.
    """

    model: torch.nn.Module
    refit_config: RefitConfig
    refit_dtype: torch.dtype | None = None

    def _make_refit_source(self) -> FSDPSource | AdapterSource:
        kind = AdapterSource if self.refit_config.lora == "adapter" else FSDPSource
        return kind(self.model, self.refit_dtype)

    def _drafter_dtype(self) -> torch.dtype | None:
        return self.refit_dtype

    def _refit_model_parts(self) -> tuple[object, ...]:
        return (*super()._refit_model_parts(), self.refit_dtype)

    def _watched_attention(self, record: Record) -> AbstractContextManager[None]:
        return watch_transformers(attention_modules(self.model), record)
