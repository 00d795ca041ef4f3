"""What a test asks of SGLang's workers beside the refit: poison, and digests of what they hold.

One of SGLang's custom weight loaders, which ``EngineCalls.extend`` has the workers call.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from rlrefit.workers.engines.sglang.fp8 import block_modules
from rlrefit.workers.engines.sglang.worker_refit import WorkerRefit, also_serve


def load(model: Any, named_tensors: Any) -> None:
    """To be called by SGLang, once in each worker; it loads nothing, and makes the commands below known."""
    also_serve({"poison": _poison, "digests": _digests, "blocks": _blocks})


def _poison(worker: WorkerRefit) -> dict[str, Any]:
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.copy_(torch.full((), torch.nan, device=parameter.device).to(parameter.dtype))
    return {}


def _digests(worker: WorkerRefit) -> dict[str, Any]:
    """SHA-256 of every parameter."""
    found = {}
    for name, parameter in worker.model.named_parameters():
        held = parameter.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        found[name] = hashlib.sha256(held.numpy().tobytes()).hexdigest()
    return found


def _blocks(worker: WorkerRefit) -> dict[str, Any]:
    """How many modules hold FP8 blocks."""
    return {"modules": len(block_modules(worker.model))}
