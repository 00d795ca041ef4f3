"""Whether a device that a trainer and an engine share holds both, asked before either allocates its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...integration.errors import RefitError
from ...integration.transport import ONE_SIDED
from ...integration.weights.manifest import TensorSpec
from ..plan.catalog import Param
from .options import BenchOptions
from .ranks import BenchRanks

# Temporary memory of making and comparing true values, in bytes and at most in copies of the parameters.
_CHECKS, _CHECKS_OF_WEIGHTS = 1 << 30, 4
# Staging takes two buckets for each stream, and never more than this many copies of the parameters.
_STAGING_OF_WEIGHTS = 2


@dataclass(frozen=True)
class Need:
    """What a rank is about to take of its device.

    Attributes:
        device: a name that its ranks have in common.
        weights: bytes of its parameters.
        working: bytes of staging and checks.
        free: bytes that nobody had taken of the device when all ranks were here.
    """

    device: str
    weights: int
    working: int
    free: int


def require_room(
    options: BenchOptions, ranks: BenchRanks, params: Sequence[Param], whole: Sequence[TensorSpec]
) -> None:
    """Refuse, on all ranks alike, what does not fit; all ranks call it at the same time.

    Args:
        options: of the run.
        ranks: of the run.
        params: that this rank will allocate.
        whole: weights that it will keep in full beside them.

    Raises:
        RefitError: names each device that is too small, with its figures.
    """
    weights = sum(math.prod(param.shape) * param.dtype.itemsize for param in params)
    weights += sum(spec.nbytes for spec in whole)
    # What the probes took has been given back by all.
    ranks.barrier()
    told = ranks.collect(Need(_device(ranks), weights, _working(options, weights), _free_bytes(ranks.device)))
    short = shortages(told, ranks.train_ranks)
    if short:
        raise RefitError(
            f"{'; '.join(short)}. Nothing was allocated; spread the layouts over more ranks, or give --layers, --quantize "
            "fp8 or a smaller model",
            stage="allocation",
            rank=ranks.rank,
        )


def shortages(told: Sequence[Need], train_ranks: int) -> list[str]:
    """A clause with figures for each device that is too small; empty if all fit.

    Args:
        told: of all ranks, trainers first.
        train_ranks: how many of them are trainers.
    """
    found = []
    for device in dict.fromkeys(need.device for need in told):
        here = [(rank, need) for rank, need in enumerate(told) if need.device == device]
        needed = sum(need.weights + need.working for _, need in here)
        free = min(need.free for _, need in here)
        if needed > free:
            parts = [
                f"{_name(rank, train_ranks)} {need.weights / 1e9:.1f} GB of weights" for rank, need in here
            ]
            working = sum(need.working for _, need in here)
            found.append(
                f"{device} has {free / 1e9:.1f} GB free, and its ranks need {needed / 1e9:.1f}: {', '.join(parts)}, and "
                f"{working / 1e9:.1f} GB for staging and checks"
            )
    return found


def _name(rank: int, train_ranks: int) -> str:
    return f"trainer rank {rank}" if rank < train_ranks else f"engine rank {rank - train_ranks}"


def _device(ranks: BenchRanks) -> str:
    return f"GPU {ranks.device.index}" if ranks.device.type == "cuda" else "this host"


def _working(options: BenchOptions, weights: int) -> int:
    working = min(_CHECKS, _CHECKS_OF_WEIGHTS * weights) if options.check else 0
    staged = [options.refit_config(name) for name in options.transports if name not in ("auto", *ONE_SIDED)]
    # Beside those of p2p, nccl.m2n has a bucket of its own for each stream, and the transport another.
    buckets = {"m2n": 4}
    staging = max(
        (buckets.get(config.transport, 2) * config.streams * config.bucket_bytes for config in staged),
        default=0,
    )
    return working + min(staging, _STAGING_OF_WEIGHTS * weights)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
