"""The worker extension with a way to spoil the weights, loaded in vLLM's workers only."""

from __future__ import annotations

import torch

from rlrefit.workers.vllm.extension import VllmRefitExtension


class PoisonExtension(VllmRefitExtension):
    def poison(self) -> None:
        """Fill every parameter with its dtype's NaN."""
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.copy_(torch.full((), torch.nan, device=parameter.device).to(parameter.dtype))
