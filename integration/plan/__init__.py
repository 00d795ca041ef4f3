"""Plans: compile what both sides hold into what each rank sends and receives, and when.

Pure arithmetic on published holdings. :func:`analyse` is what every rank computes alike, at the level of
classes of weights; :meth:`Analysis.compile` lists one rank's own messages. Digests show that all agree
before the first byte moves.
"""

from .analysis import Analysis, analyse
from .compile import plan_broadcast
from .model import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    EVERYONE,
    GLOO_PACE,
    LARGE_SEGMENT,
    NCCL_PACE,
    ONE_SIDED_PACE,
    BroadcastPlan,
    Message,
    Pace,
    Plan,
    Segment,
    aligned,
)
from .topology import LinkLoad, Topology

__all__ = [
    "ALIGNMENT",
    "CHECKSUM_BYTES",
    "EVERYONE",
    "GLOO_PACE",
    "LARGE_SEGMENT",
    "NCCL_PACE",
    "ONE_SIDED_PACE",
    "Analysis",
    "BroadcastPlan",
    "LinkLoad",
    "Message",
    "Pace",
    "Plan",
    "Segment",
    "Topology",
    "aligned",
    "analyse",
    "plan_broadcast",
]
