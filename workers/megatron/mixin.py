"""``MegatronRefitMixin``: gives any PPO trainer's Megatron worker the refit.

Inherit it beside your own worker class; it needs ``self.model`` (list of Megatron chunks),
``self.bridge`` (``AutoBridge``) and ``self.refit_config`` (:class:`RefitConfig`). See
``examples/inherit_the_mixin.py``.
"""

from __future__ import annotations

from typing import Any

from ...integration.config import RefitConfig
from ..source_mixin import SourceRefitMixin
from .source import MegatronSource


class MegatronRefitMixin(SourceRefitMixin):
    """Source side of the refit for Megatron-core models built through Megatron-Bridge."""

    model: list[Any]
    bridge: Any
    refit_config: RefitConfig

    def _make_refit_source(self) -> MegatronSource:
        return MegatronSource(self.bridge, self.model)
