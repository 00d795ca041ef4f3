"""What the benchmark asks of vLLM's workers beside the refit: poison, checksums, memory."""

from __future__ import annotations

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ....workers.engines.vllm.extension import VllmRefitExtension
from ....workers.engines.vllm.layouts import has_padding
from .engine import Checksums
from .memory import Memory, memory, restart_peak
from .worker_checks import checksums, poison, synchronize


class LiveExtension(VllmRefitExtension):
    """Worker extension of ``rlrefit bench --live``."""

    def live_poison(self) -> int:
        """As :func:`.worker_checks.poison`."""
        nbytes = poison(self.model_runner.get_model(), VocabParallelEmbedding, has_padding)
        synchronize(self.model_runner.device)
        return nbytes

    def live_checksums(self) -> Checksums:
        """As :func:`.worker_checks.checksums`."""
        synchronize(self.model_runner.device)
        return checksums(self.model_runner.get_model(), self.model_runner.device)

    def live_memory(self, restart: bool) -> Memory:
        """This worker's memory; ``restart`` lets the peak count anew from here."""
        synchronize(self.model_runner.device)
        if restart:
            restart_peak(self.model_runner.device)
        return memory(self.model_runner.device)
