"""What of a colocated refit stays on the GPUs, what crosses between them, and what that takes at the measured rates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...integration.plan import Topology
from ...integration.plan.topology import NVLINK_GB_PER_S


@dataclass(frozen=True)
class Sharing:
    """Of the bulk path; what the misc path carries is small, and comes on top.

    Attributes:
        stayed_bytes: the least that a trainer hands to the engine on its own GPU.
        crossed_bytes: the most that an engine takes from other GPUs.
        bound_seconds: what the busiest link needs: NVLink by the measured rate between GPUs, a GPU's memory by its copy rate.
    """

    stayed_bytes: int
    crossed_bytes: int
    bound_seconds: float


def sharing(pairs: npt.NDArray[np.int64], copy_gb_per_s: float, p2p_gb_per_s: float | None) -> Sharing:
    """Of a refit whose trainer rank i and engine rank i share a GPU.

    Args:
        pairs: bytes from each rank to each rank, trainers first, int64 ``[world, world]``.
        copy_gb_per_s: what a GPU copies within its memory, bytes counted once.
        p2p_gb_per_s: what two GPUs exchange in each direction; None if there is but one.
    """
    ranks = len(pairs) // 2
    topology = Topology(
        (0,) * len(pairs),
        nvlink_gb_per_s=p2p_gb_per_s if p2p_gb_per_s is not None else NVLINK_GB_PER_S,
        gpu_of=(*range(ranks), *range(ranks)),
        copy_gb_per_s=copy_gb_per_s,
    )
    stayed = np.diagonal(pairs, offset=ranks)
    return Sharing(
        stayed_bytes=int(stayed.min()),
        crossed_bytes=int((pairs[:, ranks:].sum(axis=0) - stayed).max()),
        bound_seconds=max((link.seconds for link in topology.links(pairs)), default=0.0),
    )
