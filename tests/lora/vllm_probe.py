"""What the tests look at in a vLLM worker that serves adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlrefit.workers.engines.vllm.extension import VllmRefitExtension


class AdapterProbe(VllmRefitExtension):
    """rlrefit's extension, and the factors as vLLM's kernels see them."""

    def poison_adapters(self) -> None:
        """Make every factor NaN, in all slots."""
        for _, stacked in self._stacks():
            stacked.fill_(float("nan"))

    def differing_layers(self, one: int, other: int) -> list[str]:
        """Layers in which two loaded adapters have different factors."""
        slots = [self._manager.lora_index_to_id.index(adapter) for adapter in (one, other)]
        return [name for name, stacked in self._stacks() if not stacked[slots[0]].equal(stacked[slots[1]])]

    @property
    def _manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager

    def _stacks(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self._manager.modules.items():
            for stacked in (module.lora_a_stacked, module.lora_b_stacked):
                # Layers that are never joined with others keep one tensor.
                for one in (stacked,) if isinstance(stacked, torch.Tensor) else stacked:
                    yield name, one
