"""``MegatronRefitMixin``: gives any PPO trainer's Megatron worker the refit.

Inherit it beside your own worker class; it needs ``self.model`` (list of Megatron chunks),
``self.bridge`` (``AutoBridge``) and ``self.refit_config`` (:class:`RefitConfig`). See
``examples/inherit_the_mixin.py``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ....integration.config import RefitConfig
from ....integration.errors import RefitError
from ...kv_scales.calibration import Record, core_attentions, watch_megatron
from ..source_mixin import SourceRefitMixin
from .enumeration import conversion_tasks
from .source import MegatronSource


class MegatronRefitMixin(SourceRefitMixin):
    """Source side of the refit for Megatron-core models built through Megatron-Bridge."""

    model: list[Any]
    bridge: Any
    refit_config: RefitConfig

    def _make_refit_source(self) -> MegatronSource:
        if self.refit_config.lora == "adapter":
            raise RefitError(
                "policy.refit.lora is adapter, but Megatron's adapters travel merged alone: Bridge joins them with the "
                "weights it exports. Nothing was sent; set it to merge on all ranks of both sides",
                stage="settings",
            )
        return MegatronSource(self.bridge, self.model)

    def _watched_attention(self, record: Record) -> AbstractContextManager[None]:
        # Asked for anew, as who trains may have put other modules in place; a collective of the pipeline's stages.
        return watch_megatron(core_attentions(self.model, conversion_tasks(self.bridge, self.model)), record)
