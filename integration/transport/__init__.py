"""Transports of the bulk path."""

from __future__ import annotations

from collections.abc import Sequence

from ..manifest import Manifest
from ..plan import Plan, compile_plan, plan_broadcast
from ..process_groups import Group
from ..routing import Holdings
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
    "make_plan",
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


def make_plan(
    transport: str,
    manifest: Manifest,
    sources: Sequence[Holdings],
    destinations: Sequence[Holdings],
    bucket_bytes: int,
) -> Plan:
    """The plan that ``transport`` replays; errors as in :func:`compile_plan`."""
    # Compiled for every transport: its checks (holes, clashes) hold for the broadcast too.
    plan = compile_plan(manifest, sources, destinations, bucket_bytes)
    return plan_broadcast(manifest, sources, bucket_bytes) if transport == "golden" else plan


def make_transport(transport: str, group: Group, world: RefitWorld, plan: Plan, verify: str) -> Transport:
    """A transport by name.

    Raises:
        ValueError: no transport has that name.
    """
    if transport == "p2p":
        return P2PTransport(group, world.rank, plan, verify)
    if transport == "golden":
        return GoldenTransport(group, world.rank, plan, verify, is_source=world.is_source)
    raise ValueError(f"there is no transport {transport!r}; use p2p or golden")
