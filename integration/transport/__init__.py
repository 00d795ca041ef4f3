"""Transports of the bulk path."""

from __future__ import annotations

from ..plan import BroadcastPlan, Plan
from ..process_groups import Group
from ..world import RefitWorld
from .base import TransferResult, Transport
from .golden import GoldenTransport
from .p2p import P2PTransport

__all__ = [
    "GoldenTransport",
    "P2PTransport",
    "TransferResult",
    "Transport",
    "choose",
    "make_transport",
]


def choose(transport: str) -> tuple[str, str]:
    """The transport that ``auto`` means here, and why; any other name is returned as it is."""
    if transport != "auto":
        return transport, "asked for by policy.refit.transport"
    return (
        "p2p",
        "auto: trainer and engine are different processes, and p2p serves any layout and any network",
    )


def make_transport(
    transport: str, group: Group, world: RefitWorld, plan: Plan | BroadcastPlan, verify: str
) -> Transport:
    """A transport by name, for a plan of its kind.

    Raises:
        ValueError: no transport has that name.
    """
    if transport == "p2p" and isinstance(plan, Plan):
        return P2PTransport(group, world.rank, plan, verify)
    if transport == "golden" and isinstance(plan, BroadcastPlan):
        return GoldenTransport(group, world.rank, plan, verify, is_source=world.is_source)
    raise ValueError(f"there is no transport {transport!r}; use p2p or golden")
