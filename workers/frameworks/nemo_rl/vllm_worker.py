"""vLLM's worker with the refit's calls, which NeMo-RL's configuration names.

    policy.generation.vllm_kwargs:
      worker_cls: rlrefit.workers.frameworks.nemo_rl.vllm_worker.RefitWorker

NeMo-RL keeps ``worker_extension_cls`` for itself, and vLLM refuses an extension whose names the worker has already; hence
names of our own, and not those of :class:`~...engines.vllm.extension.VllmRefitExtension`.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from ...engines.common.destination_mixin import DestinationRefitMixin
from ...engines.vllm.compat import require_supported_vllm
from ...engines.vllm.patches import Refitted, prepare_worker_process
from .engine_calls import EngineCalls, require_text_only

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

# vLLM imports this module once, when a worker starts and before its model is loaded: the moment to say what this vLLM
# lacks, all of it at once, and to guard the weights.
require_supported_vllm()
prepare_worker_process()


class RefitWorker(EngineCalls, Refitted, Worker):
    """vLLM's own worker of this platform, refitted in place."""

    # Of vLLM's Worker.
    vllm_config: Any
    rank: int

    def _rlrefit_side(self) -> DestinationRefitMixin:
        from ...engines.vllm.worker_refit import WorkerRefit

        return WorkerRefit.of(self)

    def _rlrefit_rank(self) -> int:
        # NeMo-RL counts its groups of workers itself, those of one data-parallel vLLM too.
        return self.rank

    def _rlrefit_require_supported(self) -> None:
        require_text_only(self.vllm_config.model_config)
