"""Transports of the bulk path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm.group import Group
from ..comm.opening import GroupChoice, open_group, without_nccl
from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import host_identity
from ..errors import TransportUnavailable, closed_on_error
from ..gpu_memory.availability import GpuFacts, availability
from ..plan import BroadcastPlan, Plan
from .base import TransferResult, Transport
from .golden import GoldenTransport
from .ipc import IpcTransport
from .m2n import Communicators, M2nTransport, ReshardPlan, new_ids, unavailable
from .p2p import P2PTransport

__all__ = [
    "FALLBACK",
    "ONE_SIDED",
    "GoldenTransport",
    "IpcTransport",
    "M2nTransport",
    "P2PTransport",
    "TransferResult",
    "Transport",
    "choose",
    "make_transport",
]


# What serves any layout and any network.
FALLBACK = "p2p"
# What needs no group of ranks: one side writes or reads the other's memory.
ONE_SIDED = frozenset(("ipc", "pull"))


def choose(transport: str, told: Sequence[GpuFacts], train_ranks: int) -> tuple[str, str]:
    """The transport that serves, and why: ``auto`` means another one, any other name means itself.

    Args:
        transport: of the configuration.
        told: by all ranks, trainers first.
        train_ranks: how many of them are trainers.
    """
    if transport == "auto":
        able, reason = availability(told, train_ranks)
        if able:
            return "ipc", f"auto: {reason}"
        name, reason = (
            FALLBACK,
            f"auto: not ipc, since {reason}; {FALLBACK} serves any layout and any network",
        )
    else:
        name, reason = transport, "asked for by policy.refit.transport"
    obstacle = without_nccl(told)
    return name, reason if name in ONE_SIDED or not obstacle else f"{reason}, without NCCL: {obstacle}"


def make_transport(
    transport: str,
    channel: Channel,
    choice: GroupChoice,
    device: torch.device,
    plan: Plan | BroadcastPlan,
    config: RefitConfig,
    *,
    sleeps: bool | None = None,
    landed: Callable[[int], None] | None = None,
) -> Transport:
    """A transport by name, for a plan of its kind, with communicators of its own; all ranks at the same time.

    ``choice``: what its communicators are made of, if it has some. ``sleeps``: whether this rank frees the memory
    of its parameters between refits, as engines with a sleep mode do; None if it does not say. ``landed``: of an engine rank that works
    on portions, as :class:`.ipc.IpcTransport` has it; other transports call it not.

    Raises:
        ValueError: no transport has that name.
        TransportUnavailable: on every rank, if some rank has not what the transport needs.
        RefitError: its communicators could not be made.
    """
    world = channel.world

    def group(lanes: int) -> Group:
        return open_group(
            channel, choice, "bulk", (world.rank, world.size), device, lanes, config.bucket_bytes
        )

    if transport == "p2p" and isinstance(plan, Plan):
        # Over gloo the rounds of one lane follow each other closely, and a second one's thread would compete for cores
        # with it.
        opened = group(config.streams if device.type == "cuda" else 1)
        with closed_on_error(opened):
            return P2PTransport(opened, world.rank, plan, config.verify, channel.turn)
    if transport == "m2n" and isinstance(plan, ReshardPlan):
        one_host = _require_m2n(channel, choice, device, config)
        return _open_m2n(group, channel, device, plan, config, one_host)
    if transport in ONE_SIDED and isinstance(plan, Plan):
        pulls = transport == "pull" and not world.is_source
        return IpcTransport(
            world.rank,
            plan,
            config.verify,
            device,
            channel.timeout_s,
            channel.check_abort,
            world.describe,
            turn=channel.turn,
            sleeps=sleeps,
            pulls="policy.refit.transport asks for it" if pulls else "",
            # Where the network can join the ranks, auto goes by that.
            may_pull=config.transport != "auto" or choice.kind != "network",
            landed=landed,
        )
    if transport == "golden" and isinstance(plan, BroadcastPlan):
        opened = group(1)
        with closed_on_error(opened):
            return GoldenTransport(
                opened, world.rank, plan, config.verify, channel.turn, is_source=world.is_source
            )
    raise ValueError(f"there is no transport {transport!r} for this plan; use p2p, ipc, pull, m2n or golden")


def _require_m2n(channel: Channel, choice: GroupChoice, device: torch.device, config: RefitConfig) -> bool:
    """Check that all ranks can use ``nccl.m2n``, before any makes a communicator; returns whether they are on one host."""
    reason = (
        unavailable(device, config.bucket_bytes, config.streams) if choice.kind == "network" else choice.why
    )
    told = channel.vote("m2n/able", [reason, host_identity()])
    for rank, (lacking, _) in enumerate(told):
        if lacking:
            raise TransportUnavailable(
                f"policy.refit.transport is m2n, and {channel.world.describe(rank)} can't use it: {lacking}. Or set "
                "policy.refit.transport to p2p, or to auto. Nothing was written",
                stage="connect",
                rank=channel.world.rank,
                blamed=rank,
            )
    return len({host for _, host in told}) == 1


def _open_m2n(
    group: Callable[[int], Group],
    channel: Channel,
    device: torch.device,
    plan: ReshardPlan,
    config: RefitConfig,
    one_host: bool,
) -> M2nTransport:
    world = channel.world
    told = channel.vote("m2n/ids", [i.hex() for i in new_ids(config.streams)] if world.rank == 0 else None)
    opened = group(config.streams)
    with closed_on_error(opened):
        communicators = Communicators(
            [bytes.fromhex(one) for one in told[0]],
            world.rank,
            world.size,
            not one_host,
            device,
            config.bucket_bytes,
            channel.timeout_s,
            channel.check_abort,
        )
        with closed_on_error(communicators):
            return M2nTransport(opened, communicators, world.rank, plan, config.verify, channel.turn)
