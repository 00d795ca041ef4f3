"""How the ranks of an epoch come to know the same weights, before anything moves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch

from ..broadcast.packed import MOST_ON_CPU, PackedBroadcast
from ..comm.shared.opening import agree_on_wire, open_group
from ..comm.torch_group import Group, members
from ..config import RefitConfig
from ..control.channel import Channel
from ..endings import end_all
from ..errors import RefitMismatch
from ..weights.endpoints import WeightDestination, WeightSource
from ..weights.manifest import TensorSpec, first_difference
from .shared_scales import CutSlots, SharedScales

_MODULUS = 1 << 256


def agree_on_specs(channel: Channel, endpoint: WeightSource | WeightDestination) -> list[TensorSpec]:
    """The trainer's weights, as trainer rank 0 tells them to all.

    Raises:
        RefitMismatch: on a trainer rank whose export differs; names the first weight that does.
    """
    world = channel.world
    ours = cast(WeightSource, endpoint).specs() if world.is_source else []
    # A vote, in which trainer rank 0 waits, and not runs on beside the rendezvous that shares its interpreter.
    told = channel.vote("specs", [spec.to_json() for spec in ours] if world.rank == 0 else None)
    if world.rank == 0:
        return ours
    theirs = [TensorSpec.from_json(row) for row in told[0]]
    if world.is_source:
        difference = first_difference(ours, theirs)
        if difference:
            raise RefitMismatch(
                f"{world.describe(world.rank)} and trainer rank 0 export different weights: {difference}. "
                "All trainer ranks must hold the same model.",
                stage="handshake",
                rank=world.rank,
                parameter=difference.split()[0],
            )
    return theirs


def agree_on_digest(channel: Channel, topic: str, digest: str) -> None:
    """Check that all ranks computed the same digest.

    Raises:
        RefitMismatch: on every rank; names the ranks that differ from trainer rank 0.
    """
    _require_equal(channel, topic, channel.vote(topic, digest))


def _require_equal(channel: Channel, topic: str, digests: Sequence[str]) -> None:
    others = [channel.world.describe(rank) for rank, d in enumerate(digests) if d != digests[0]]
    if others:
        raise RefitMismatch(
            f"{', '.join(others)} computed another {topic} than trainer rank 0, so messages would be cut differently "
            "on both ends. Do all ranks run the same rlrefit with the same policy.refit values?",
            stage=topic,
            rank=channel.world.rank,
        )


def agree_on_plan(channel: Channel, digest: str, pairs: dict[tuple[int, int], str]) -> None:
    """Check that all ranks computed the same plan, and that both ends of each pair list the same messages.

    What a pair exchanges is known to its two ends alone, so it is compared by sums: those over all senders
    and over all receivers must be equal.

    Raises:
        RefitMismatch: on every rank; names the ranks, or the first pair that differs.
    """
    rank = channel.world.rank
    sent, received = (
        sum(int(d, 16) for pair, d in pairs.items() if pair[end] == rank) % _MODULUS for end in (0, 1)
    )
    votes = channel.vote("plan", [digest, f"{sent:x}", f"{received:x}"])
    _require_equal(channel, "plan", [vote[0] for vote in votes])
    if sum(int(v[1], 16) for v in votes) % _MODULUS == sum(int(v[2], 16) for v in votes) % _MODULUS:
        return
    lists = channel.vote("pairs", {f"{a}-{b}": d for (a, b), d in pairs.items()})
    seen: dict[str, list[str]] = {}
    for listed in lists:
        for pair, its_digest in listed.items():
            seen.setdefault(pair, []).append(its_digest)
    odd = sorted(pair for pair, digests in seen.items() if len(digests) != 2 or len(set(digests)) != 1)
    raise RefitMismatch(
        f"the two ends of {len(odd)} pairs list different messages, first refit ranks {odd[0] if odd else '?'}; bytes "
        "would land in the wrong weights. Do all ranks run the same rlrefit?",
        stage="plan",
        rank=rank,
    )


def specs_digest(specs: Sequence[TensorSpec], config: RefitConfig) -> str:
    """SHA-256 over what a packed broadcast carries, in order, its bucket size and its checks."""
    body = json.dumps(
        [config.bucket_bytes, config.verify, [spec.to_json() for spec in specs]], separators=(",", ":")
    )
    return hashlib.sha256(body.encode()).hexdigest()


def make_shared_scales(channel: Channel, slots: CutSlots, device: torch.device) -> SharedScales | None:
    """What makes the scales of blocks that trainer ranks cut; None where none are cut, and on generation ranks."""
    world = channel.world
    if not slots.count:
        return None
    # All ranks of the epoch find the wire.
    wire = agree_on_wire(channel, "scales", device)
    place = members(world.sources, world.rank)
    if place is None:
        return None
    if world.train_ranks == 1:
        return SharedScales(slots, device, None)
    group = open_group(channel, wire, "scales", place, device, 1, slots.count * 4 * (world.train_ranks - 1))
    scales = SharedScales(slots, device, group)
    try:
        scales.connect()
    except BaseException as error:
        end_all([partial(group.close, failed=True)], error)
        raise
    return scales


def make_packed_broadcast(
    channel: Channel, specs: Sequence[TensorSpec], config: RefitConfig, device: torch.device
) -> tuple[PackedBroadcast, Group | None]:
    """The broadcast of ``specs`` from trainer rank 0, and its group (None on ranks outside of it)."""
    world = channel.world
    place = members([0, *world.destinations], world.rank)
    bucket_bytes = config.bucket_bytes if device.type == "cuda" else min(config.bucket_bytes, MOST_ON_CPU)
    group = None
    if specs:
        wire = agree_on_wire(channel, "misc", device)
        if place is not None:
            room = min(bucket_bytes, sum(spec.nbytes for spec in specs))
            group = open_group(channel, wire, "misc", place, device, 1, room)
            try:
                group.prepare_broadcast(0)
            except BaseException as error:
                end_all([partial(group.close, failed=True)], error)
                raise
    return PackedBroadcast(group, specs, bucket_bytes, world.rank, config.verify, channel.turn), group
