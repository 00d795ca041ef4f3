"""The worker extension with methods that stand in for a refit session: weights come from a checkpoint."""

from __future__ import annotations

import torch
from vllm_checkpoints import manifest_of, read_checkpoint
from vllm_refit import refit

from rlrefit.workers.vllm.extension import VllmRefitExtension


class ProbeExtension(VllmRefitExtension):
    def probe_refit(self, path: str, version: int) -> dict[str, int]:
        """Refit from the checkpoint at ``path``; returns the number of tensors by route."""
        tensors = read_checkpoint(path)
        fragments, misc = self.refit_destination.fragments(manifest_of(tensors))
        refit(self.refit_destination, fragments, misc, tensors, version)
        return {
            "bulk": len({f.name for f in fragments}),
            "misc": len(misc),
            "version": self.refit_destination.version,
        }

    def probe_engine_load(self, path: str) -> None:
        """Load the checkpoint as vLLM itself does in place, through its layerwise reload of the whole model."""
        self.model_runner.reload_weights(weights_iterator=iter(read_checkpoint(path).items()))

    def probe_poison(self) -> None:
        """Fill all parameters with NaN."""
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.fill_(torch.nan)
