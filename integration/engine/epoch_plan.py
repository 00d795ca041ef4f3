"""What the ranks of an epoch decide before anything moves: routes, transport, groups, and each rank's plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch

from ..comm.opening import GroupChoice, choose_delta_groups, choose_group, require_one_cumem
from ..config import RefitConfig
from ..control.channel import Channel
from ..control.world import RefitWorld
from ..delta.blocks import MOST_ITEMSIZE
from ..errors import RefitError
from ..gpu_memory.availability import GpuFacts, facts
from ..layout import Axes, Box, Fragment
from ..plan import (
    GLOO_PACE,
    NCCL_PACE,
    ONE_SIDED_PACE,
    Analysis,
    BroadcastPlan,
    Pace,
    Plan,
    Topology,
    analyse,
    plan_broadcast,
)
from ..quantize.formats import Format
from ..transport import ONE_SIDED, choose
from ..transport.m2n import Carried, ReshardPlan, carry
from ..weights.endpoints import WeightDestination, WeightSource, holdings_of
from ..weights.holdings import Holdings, HoldingsReader, SpecTable, decode_positions, encode_positions
from ..weights.manifest import Manifest, ManifestEntry, TensorSpec
from ..weights.quantizing import packed_in
from ..weights.routing import warn_of_misc
from .agreement import (
    AgreedFragments,
    agree_on_digest,
    agree_on_formats,
    agree_on_plan,
    agree_on_specs,
    require_stored_so,
    specs_digest,
)
from .refusals import refused_on_engine, require_written_once, unlike_their_bytes
from .shared_scales import CutSlots


class Way(NamedTuple):
    """How an engine refits.

    Attributes:
        shared_memory: its groups go through memory that the ranks of one host share, even where NCCL or gloo could join
            them. Without it they do so only where two ranks share a GPU.
        all_misc: every weight takes the misc path.
    """

    shared_memory: bool = False
    all_misc: bool = False


@dataclass(frozen=True)
class BulkPlan:
    """What goes shard to shard.

    Attributes:
        plan: this rank's.
        transport: what carries it, and why.
        axes: by which the plan's boxes see weights; weights that all ranks see as they are shaped are left out.
        cut_slots: scales of blocks that trainer ranks cut.
    """

    plan: Plan | BroadcastPlan
    transport: tuple[str, str]
    axes: Mapping[str, Axes]
    cut_slots: CutSlots


@dataclass(frozen=True)
class EpochPlan:
    """What holds for the whole epoch.

    Attributes:
        endpoint: this rank's; of a trainer that quantizes, one that does so.
        manifest: all weights that travel, with their routes.
        bulk: None on the conventional path.
        group: that joins all ranks.
        delta_groups: what sparse refits may go over, the best first.
        formats: of the weights that travel as codes.
        agreed: this rank's fragments as they were when the ranks agreed.
        ask: for this rank's fragments where they lie now, and the weights that must not go shard to shard, with reasons.
    """

    endpoint: WeightSource | WeightDestination
    manifest: Manifest
    bulk: BulkPlan | None
    group: GroupChoice
    delta_groups: tuple[GroupChoice, ...]
    formats: Mapping[str, Format]
    agreed: AgreedFragments
    ask: Callable[[], tuple[list[Fragment], dict[str, str]]]

    def fragments_now(self, channel: Channel) -> list[Fragment]:
        """As :meth:`AgreedFragments.again`, by the axes of the plan's boxes."""
        return self.as_planned(self.agreed.again(channel, self.ask))

    def as_planned(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """This rank's fragments by the axes of the plan's boxes."""
        axes = {} if self.bulk is None else self.bulk.axes
        if not axes:
            return list(fragments)
        return [
            part
            for fragment in fragments
            for part in (fragment.seen_by(axes[fragment.name]) if fragment.name in axes else [fragment])
        ]


def plan_epoch(
    name: str, way: Way, config: RefitConfig, channel: Channel, endpoint: WeightSource | WeightDestination
) -> tuple[EpochPlan, list[Fragment]]:
    """Learn what exists on all ranks and agree on it; called on all of them at the same time.

    Args:
        name: of the way, for errors.
        way: the same on all ranks.
        config: the same on all ranks, but for ``timeout_s`` and ``port``.
        channel: of the epoch.
        endpoint: of this rank.

    Returns:
        What they agreed on, and this rank's fragments by the axes of the plan's boxes.

    Raises:
        RefitMismatch: ranks disagree; names the first weight that differs.
        PlanError: bytes that nobody sends or two would write.
        RefitError: the ranks are not on one host, and the way is through its memory.
    """
    world = channel.world
    places = _places(name, way, channel, endpoint.device)
    specs = agree_on_specs(channel, endpoint)
    endpoint, specs, formats = agree_on_formats(channel, config, endpoint, specs)

    def ask() -> tuple[list[Fragment], dict[str, str]]:
        return _fragments(endpoint, specs, way, config, world)

    # The engine checks here that the weights fill it, before anything is written.
    fragments, refused = ask()
    if not world.is_source:
        require_stored_so(channel, fragments, formats)
        refused = refused_on_engine(fragments, refused, formats, packed_in(specs))
    bulk: BulkPlan | None = None
    if way.all_misc:
        agree_on_digest(channel, "specs_digest", specs_digest(specs, config))
        reason = "policy.nccl_xfer_refit is false: the conventional path carries everything"
        manifest = Manifest(tuple(ManifestEntry(spec, "misc", reason) for spec in specs))
    else:
        manifest, bulk = _plan_bulk(
            channel, config, places, endpoint.device, specs, formats, fragments, refused
        )
    group = choose_group(places, way.shared_memory)
    one_sided = bulk is not None and bulk.transport[0] in ONE_SIDED
    delta_groups = choose_delta_groups(places, group) if one_sided else (group,)
    # One-sided writes alone need no group of all ranks.
    sparse_over_it = config.delta != "off" and delta_groups[0] == group
    if group.kind == "network" and (not one_sided or manifest.specs("misc") or sparse_over_it):
        require_one_cumem(places)
    # Of a trainer the others travel as the export gives them, which is checked as it is drawn. An engine's own loader writes where
    # its fragments lie, too.
    left_out = {e.spec.name for e in manifest if e.route != "bulk"} if world.is_source else refused
    plan = EpochPlan(
        endpoint, manifest, bulk, group, delta_groups, formats, AgreedFragments(fragments, left_out), ask
    )
    return plan, plan.as_planned(fragments)


def _places(name: str, way: Way, channel: Channel, device: torch.device) -> list[GpuFacts]:
    """Every rank's host, and what it can do with its GPU."""
    world, told = channel.world, channel.vote_as("places", facts(device))
    away = [world.describe(r) for r, place in enumerate(told) if place.host != told[0].host]
    if way.shared_memory and away:
        raise RefitError(
            f"{name} joins the processes of one host, and {', '.join(away)} is not on trainer rank 0's; nothing "
            "was written. Use the engine nccl_xfer, or a refit world for each host",
            stage="handshake",
            rank=world.rank,
        )
    return told


def _fragments(
    endpoint: WeightSource | WeightDestination,
    specs: Sequence[TensorSpec],
    way: Way,
    config: RefitConfig,
    world: RefitWorld,
) -> tuple[list[Fragment], dict[str, str]]:
    if not world.is_source:
        fragments, refused = cast(WeightDestination, endpoint).fragments(list(specs))
        require_written_once(fragments, world.rank)
    elif way.all_misc:
        return [], {}  # a trainer's shards do not matter: it exports whole weights
    else:
        fragments, refused = cast(WeightSource, endpoint).fragments()
    most_itemsize = MOST_ITEMSIZE if config.delta != "off" else float("inf")
    return fragments, unlike_their_bytes(fragments, most_itemsize) | refused


def _plan_bulk(
    channel: Channel,
    config: RefitConfig,
    places: Sequence[GpuFacts],
    device: torch.device,
    specs: Sequence[TensorSpec],
    formats: Mapping[str, Format],
    fragments: Sequence[Fragment],
    refused: dict[str, str],
) -> tuple[Manifest, BulkPlan]:
    """Decide routes and transport, and compile this rank's plan, from what all ranks hold."""
    world, table = channel.world, SpecTable(specs)
    who = world.describe(world.rank)
    everyone = _tell_holdings(channel, holdings_of(world.rank, fragments, refused, table, who), table)
    transport = choose(config.transport, places, world.train_ranks)
    analysis = analyse(
        table.specs,
        [everyone[rank] for rank in world.sources],
        [everyone[rank] for rank in world.destinations],
        bucket_bytes=config.bucket_bytes,
        topology=Topology.of_hosts([place.host for place in places], [place.device for place in places]),
        # One-sided or by whole tensors, every sender reaches every receiver, and none passes anything on.
        fan_out=False if transport[0] in (*ONE_SIDED, "m2n") else None,
        pace=_pace(transport[0], device),
    )
    if world.rank == 0:
        warn_of_misc(analysis.manifest, formats)
    cut_slots = CutSlots.find(analysis.classes, table.specs, formats)
    plan: Plan | BroadcastPlan
    pairs: dict[tuple[int, int], str] = {}
    digest = analysis.digest
    if transport[0] == "golden":
        plan = plan_broadcast(analysis.manifest, analysis.seen.sources, config.bucket_bytes)
        digest += plan.digest
    else:
        plan = analysis.compile(world.rank)
        pairs = plan.pair_digests
        if transport[0] == "m2n":
            carried = _carried(channel, config, analysis, fragments, table)
            digest += carried.digest
            plan = ReshardPlan.of(plan, carried)
    # With what is checked, since a checksum that one side writes has to be read by the other.
    agree_on_plan(channel, digest + config.verify, pairs)
    return analysis.manifest, BulkPlan(plan, transport, analysis.seen.axes, cut_slots)


def _tell_holdings(channel: Channel, ours: Holdings, table: SpecTable) -> list[Holdings]:
    """What every rank holds. Groups are told one by one, since many ranks hold the same."""
    told = channel.vote_parts("holdings", ours.to_parts())
    read = HoldingsReader(table)
    return [read.holdings(rank, row) for rank, row in enumerate(told)]


def _pace(transport: str, device: torch.device) -> Pace:
    if transport in ONE_SIDED:
        return ONE_SIDED_PACE
    return NCCL_PACE if device.type == "cuda" else GLOO_PACE


def _carried(
    channel: Channel,
    config: RefitConfig,
    analysis: Analysis,
    fragments: Sequence[Fragment],
    table: SpecTable,
) -> Carried:
    """What ``nccl.m2n`` carries, from what all ranks hold, and from what each of them computes as it packs it."""
    encoded = {table.positions[f.name] for f in fragments if f.encoding is not None}
    told = channel.vote("m2n/encoded", encode_positions(np.array(sorted(encoded), dtype=np.int64)))
    names = [spec.name for spec in table.specs]
    unfit = dict.fromkeys(analysis.seen.axes, "the two sides see it by axes")
    for text in dict.fromkeys(told):
        positions = decode_positions(text, len(names)).tolist()
        unfit |= dict.fromkeys((names[i] for i in positions), "it is cast or quantized as it is packed")
    sources: dict[str, dict[int, tuple[Box, ...]]] = {}
    destinations: dict[str, dict[int, tuple[Box, ...]]] = {}
    for one in analysis.classes:
        held: dict[int, tuple[Box, ...]] = defaultdict(tuple)
        for box, ranks in one.held:
            for rank in ranks:
                held[rank] += (box,)
        wanted = {rank: boxes for boxes, ranks in one.wanted for rank in ranks}
        for position in one.members.tolist():
            sources[names[position]], destinations[names[position]] = held, wanted
    return carry(analysis.manifest.specs("bulk"), sources, destinations, unfit, config.bucket_bytes)
