"""The benchmark's course on one rank, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore

from . import measure
from .measure import DeltaResult, PeerResult, RefitResult
from .options import BenchOptions
from .ranks import BenchRanks
from .scene import set_up


@dataclass(frozen=True)
class BenchResult:
    """All that a run measured.

    Attributes:
        kept_bytes: what the largest engine rank keeps after a refit.
        p2p_gb_per_s: the pairwise rate, in 1e9 bytes per second; None if all ranks share one GPU.
        copy_gb_per_s: what a device copies within its memory, likewise; None unless ranks share GPUs.
        refits: one for each transport asked for.
        deltas: likewise, one for each share of change.
        peers: by name.
        device: what it ran on.
    """

    kept_bytes: int
    p2p_gb_per_s: float | None
    copy_gb_per_s: float | None
    refits: list[RefitResult]
    deltas: list[list[DeltaResult]]
    peers: dict[str, PeerResult]
    device: str


def run_rank(rank: int, options: BenchOptions, store: TCPStore) -> BenchResult:
    """Everything on one rank; all ranks of the run call it and get the same.

    Raises:
        RefitError, CatalogError: what went wrong.
    """
    ranks = BenchRanks(rank, options, store)
    rate = measure.pairwise_rate(ranks, options.probe_bytes)
    copy = measure.copy_rate(ranks, options.probe_bytes) if options.colocated else None
    scene = set_up(options, ranks)
    kept = 0 if ranks.is_source else scene.storage.nbytes
    result = BenchResult(
        kept_bytes=int(ranks.maxima([kept])[0]),
        p2p_gb_per_s=rate,
        copy_gb_per_s=copy,
        refits=[measure.refits(scene, transport) for transport in options.transports],
        deltas=[measure.deltas(scene, transport) for transport in options.transports],
        peers={name: measure.peer(scene, name) for name in options.peers},
        device=ranks.device_name,
    )
    ranks.close()
    return result
