"""What the benchmark asks of vLLM's workers beside the refit: poison, checksums, memory."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ....integration.packing.factory import make_checksums
from ....workers.vllm.extension import VllmRefitExtension
from ....workers.vllm.layouts import has_padding
from .memory import memory, restart_peak


class LiveExtension(VllmRefitExtension):
    """Worker extension of ``rlrefit bench-live``."""

    def live_poison(self) -> int:
        """Fill all parameters with NaN; returns their bytes.

        What no checkpoint tensor reaches, padding of the vocabulary and of experts, becomes 0 as vLLM's loader
        leaves it.
        """
        model = self.model_runner.get_model()
        with torch.no_grad():
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    parameter.fill_(0.0 if has_padding(module) else torch.nan)
                if isinstance(module, VocabParallelEmbedding):
                    module.weight[module.shard_indices.num_org_elements :].fill_(0.0)
        self._settle()
        return sum(parameter.nbytes for parameter in model.parameters())

    def live_checksums(self) -> dict[str, list[int]]:
        """For each live parameter a checksum of its bytes (two numbers), and how many of its elements are NaN."""
        self._settle()
        parameters = dict(self.model_runner.get_model().named_parameters())
        device = self.model_runner.device
        sums = torch.zeros(len(parameters), 2, dtype=torch.int64, device=device)
        views = [(parameter.detach(), 0) for parameter in parameters.values()]
        make_checksums(views, device, range(len(views))).compute(sums)
        nans = torch.stack([torch.isnan(view).sum() for view, _ in views]).tolist()
        return {name: [*pair, nan] for name, pair, nan in zip(parameters, sums.tolist(), nans, strict=True)}

    def live_memory(self, restart: bool = False) -> dict[str, int]:
        """This worker's memory; ``restart`` lets the peak count anew from here."""
        self._settle()
        if restart:
            restart_peak(self.model_runner.device)
        return memory(self.model_runner.device)

    def _settle(self) -> None:
        if self.model_runner.device.type == "cuda":
            torch.cuda.synchronize(self.model_runner.device)
