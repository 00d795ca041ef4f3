"""What the benchmark asks of SGLang's workers beside the refit: poison, checksums, memory.

One of SGLang's custom weight loaders, which ``EngineCalls.extend`` has the workers call.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ....workers.engines.sglang.worker_refit import WorkerRefit, also_serve
from .memory import memory, restart_peak
from .worker_checks import checksums, poison, synchronize


def load(model: Any, named_tensors: Any) -> None:
    """To be called by SGLang, once in each worker; it loads nothing, and makes the commands below known."""
    also_serve({"live_poison": _poison, "live_checksums": _checksums, "live_memory": _memory})


def _poison(worker: WorkerRefit) -> dict[str, Any]:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    nbytes = poison(worker.model, VocabParallelEmbedding, _has_padding)
    synchronize(worker.device)
    return {"bytes": nbytes}


def _checksums(worker: WorkerRefit) -> dict[str, Any]:
    synchronize(worker.device)
    return dict(checksums(worker.model, worker.device))


def _memory(worker: WorkerRefit, restart: bool) -> dict[str, Any]:
    synchronize(worker.device)
    if restart:
        restart_peak(worker.device)
    return dict(memory(worker.device))


def _has_padding(module: nn.Module) -> bool:
    """Of what a refit writes in place, SGLang rounds up vocabularies alone."""
    return False
