"""``MegatronRefitMixin``: gives any PPO trainer's Megatron worker the refit.

Inherit it beside your own worker class; it needs ``self.model`` (list of Megatron chunks),
``self.bridge`` (``AutoBridge``) and ``self.refit_config`` (:class:`RefitConfig`). See
``examples/inherit_the_mixin.py``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ....integration.config import RefitConfig
from ...kv_scales.calibration import Record, core_attentions, watch_megatron
from ..source_mixin import SourceRefitMixin
from .adapter_source import AdapterSource
from .enumeration import conversion_tasks
from .source import MegatronSource


class MegatronRefitMixin(SourceRefitMixin):
    """Source side of the refit for Megatron-core models built through Megatron-Bridge."""

    model: list[Any]
    bridge: Any
    refit_config: RefitConfig

    def _make_refit_source(self) -> MegatronSource | AdapterSource:
        kind = AdapterSource if self.refit_config.lora == "adapter" else MegatronSource
        return kind(self.bridge, self.model)

    def _watched_attention(self, record: Record) -> AbstractContextManager[None]:
        # Asked for anew, as who trains may have put other modules in place; a collective of the pipeline's stages.
        return watch_megatron(core_attentions(self.model, conversion_tasks(self.bridge, self.model)), record)
