"""What tests ask of the SGLang workers of verl's rollouts, as a custom weight loader that adds commands."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from rlrefit.workers.engines.sglang.worker_refit import WorkerRefit, also_serve
from tests.digests import digest_of


def load(model: Any, named_tensors: Any) -> None:
    """Called by SGLang in each worker; it loads nothing."""
    also_serve(
        {
            "probe_poison": _poison,
            "probe_digests": _digests,
            "probe_cast": _cast,
            "probe_die_in_the_next_refit": _die_in_the_next_refit,
        }
    )


def _poison(worker: WorkerRefit) -> dict[str, Any]:
    """Make every weight a NaN, so that what no update writes is seen."""
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.fill_(float("nan"))
    return {}


def _digests(worker: WorkerRefit) -> dict[str, Any]:
    """Of the live parameters."""
    return {name: digest_of([parameter]) for name, parameter in worker.model.named_parameters()}


def _cast(worker: WorkerRefit, dtype: str) -> dict[str, Any]:
    """Give a weight of the first worker another dtype than was agreed on, or its own again."""
    if worker._rank == 0:
        norm = worker.model.get_parameter("model.norm.weight")
        norm.data = norm.data.to(getattr(torch, dtype))
    return {}


def _die_in_the_next_refit(worker: WorkerRefit) -> dict[str, Any]:
    worker.refit = lambda version: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment, return-value]
    return {}
