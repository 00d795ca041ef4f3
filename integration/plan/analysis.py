"""What every rank computes alike from the published holdings, and each rank's own part of it."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..weights.holdings import Holdings
from ..weights.manifest import Manifest, TensorSpec
from ..weights.routing import decide_routes
from ..weights.seen import Seen, in_common_axes
from .assignment import Assignment, Ints, Receiver
from .classes import TensorClass, classify
from .compile import compile_rank
from .model import NCCL_PACE, Pace, Plan
from .schedule import arrange, message_room, peers_at_a_time, simulate, slots
from .segments import check
from .topology import LinkLoad, Topology

# Fan-out makes a receiver wait for its siblings; it has to save at least this share of the time.
_FAN_OUT_GAIN = 0.1
# Rounds this near to the busiest link's time are not arranged in another way.
_GOOD_ENOUGH = 1.1


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from running inside the block, if it is on.

    A plan is a million small tuples and no cycles; the collector would walk through them again and again, a
    quarter of the time for DeepSeek-V3 on 512 ranks.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@dataclass(frozen=True)
class Analysis:
    """The plan of all ranks, at the level of classes of weights.

    Attributes:
        manifest: the weights with their routes and reasons.
        topology: hosts, GPUs and rates that the sharing was made for.
        pair_bytes: bytes from each rank to each rank, int64 ``[world, world]``; where replicas share the
            sending, exact to one segment. Relays among engine ranks are included.
        links: every link in use, with its load.
        bound_seconds: the time that some link needs at least, whichever replicas send (the largest bytes/rate of all links,
            minimized over the sharing; a proven bound, if what is on the receiver's own GPU stays there).
        predicted_seconds: simulated time of the rounds at nominal rates.
        fan_out: whether engine ranks of one host that want the same pass it on to each other.
        bucket_bytes: staging memory per direction that messages were cut for.
        pace: that messages were cut for.
        digest: equal on all ranks, or nothing moves.
        seen: what all ranks hold and want, by the axes of the plan's boxes.
    """

    manifest: Manifest = field(repr=False)
    topology: Topology
    pair_bytes: Ints = field(repr=False)
    links: tuple[LinkLoad, ...] = field(repr=False)
    bound_seconds: float
    predicted_seconds: float
    fan_out: bool
    bucket_bytes: int
    pace: Pace
    digest: str
    train_ranks: int
    gen_ranks: int
    room: int
    classes: tuple[TensorClass, ...] = field(repr=False)
    assignment: Assignment = field(repr=False)
    blocks: Ints = field(repr=False)
    seen: Seen = field(repr=False)

    @property
    def busiest_link(self) -> LinkLoad | None:
        """The link that needs longest; None if nothing travels."""
        return max(self.links, key=lambda link: link.seconds, default=None)

    @property
    def busiest_link_ratio(self) -> float:
        """Time of the busiest link over the least that ownership allows; 1 is perfect."""
        busiest = self.busiest_link
        return busiest.seconds / self.bound_seconds if busiest and self.bound_seconds else 1.0

    @_collector_paused()
    def compile(self, rank: int) -> Plan:
        """The part of ``rank`` (of the refit world)."""
        names = [entry.spec.name for entry in self.manifest]
        return compile_rank(
            rank, names, self.classes, self.assignment, self.blocks, self.room, self.pace, self.digest
        )


@_collector_paused()
def analyse(
    specs: Sequence[TensorSpec],
    sources: Sequence[Holdings],
    destinations: Sequence[Holdings],
    *,
    bucket_bytes: int,
    topology: Topology | None = None,
    fan_out: bool | None = None,
    pace: Pace = NCCL_PACE,
) -> Analysis:
    """Give each weight its route, intersect what is wanted with what is held, and share out the sending.

    Args:
        specs: all weights, in the trainer's export order.
        sources: what each trainer rank holds; ranks 0 … T-1, in order.
        destinations: what each engine rank wants; ranks T … T+G-1, in order.
        bucket_bytes: staging memory for each direction on a rank.
        topology: of all T+G ranks; None for one host.
        fan_out: let engine ranks of one host that want the same share what they receive; None to do
            so where it is faster.
        pace: of the wire.

    Raises:
        PlanError: a wanted box that no trainer holds, fragments of one rank that want the same bytes, or
            a bucket too small; names the weight, the rank and the box.
    """
    train, gen = len(sources), len(destinations)
    topology = topology or Topology((0,) * (train + gen))
    seen = in_common_axes(specs, sources, destinations)
    sources, destinations = seen.sources, seen.destinations
    manifest = decide_routes(specs, sources, destinations)
    bulk = np.array([entry.route == "bulk" for entry in manifest], dtype=bool)
    classes = tuple(classify(specs, sources, destinations, bulk))
    for tensor_class in classes:
        check(tensor_class, specs)
    alone = [Receiver((h.rank,), topology.host_of[h.rank]) for h in destinations]
    families = _families(destinations, topology)
    choices = [alone] if fan_out is not True else []
    if fan_out is not False and (fan_out or len(families) < len(alone)):
        choices.append(families)
    # Fan-out is tried beside the plain plan, and taken only if it is clearly faster.
    layouts = [
        _Layout.make(classes, receivers, train, gen, bucket_bytes, pace, topology) for receivers in choices
    ]
    chosen = layouts[0]
    for other in layouts[1:]:
        if other.predicted_seconds < (1 - _FAN_OUT_GAIN) * chosen.predicted_seconds:
            chosen = other
    bound = chosen.assignment.least_seconds()
    return Analysis(
        manifest=manifest,
        topology=topology,
        pair_bytes=chosen.pairs,
        links=chosen.links,
        bound_seconds=bound,
        # The simulation shares whole bytes out among siblings, and has none left of a single one.
        predicted_seconds=max(bound, chosen.predicted_seconds),
        fan_out=any(len(receiver.ranks) > 1 for receiver in chosen.assignment.receivers),
        bucket_bytes=bucket_bytes,
        pace=pace,
        digest=_digest(manifest, chosen, pace),
        train_ranks=train,
        gen_ranks=gen,
        room=chosen.room,
        classes=classes,
        assignment=chosen.assignment,
        blocks=chosen.blocks,
        seen=seen,
    )


@dataclass(frozen=True)
class _Layout:
    """What one choice of receivers comes to."""

    assignment: Assignment
    pairs: Ints
    blocks: Ints
    room: int
    links: tuple[LinkLoad, ...]
    predicted_seconds: float

    @staticmethod
    def make(
        classes: Sequence[TensorClass],
        receivers: Sequence[Receiver],
        train: int,
        gen: int,
        bucket_bytes: int,
        pace: Pace,
        topology: Topology,
    ) -> _Layout:
        siblings = max(len(receiver.ranks) for receiver in receivers)
        # Segments are cut for as many peers as there may be; messages are filled up for those that there are.
        cut_for = message_room(bucket_bytes, slots(train, gen), siblings, pace)
        assignment = Assignment(classes, receivers, cut_for, topology)
        pairs = assignment.pair_bytes(train + gen)
        links = topology.links(pairs)
        families = [receiver.ranks for receiver in receivers if len(receiver.ranks) > 1]
        slowest = max((link.seconds for link in links), default=0.0)
        schedules: list[tuple[float, int, Ints]] = []
        amounts = assignment.amounts(train, gen)
        # The order by rotation is usually good enough; the one by size is tried where pairs are uneven.
        for by_size in (False, True):
            blocks = arrange(amounts, by_size=by_size)
            room = message_room(bucket_bytes, peers_at_a_time(blocks), siblings, pace)
            seconds = simulate(pairs[:train, train:], blocks, families, room, topology)
            schedules.append((seconds, room, blocks))
            if seconds <= _GOOD_ENOUGH * slowest:
                break
        simulated, room, blocks = min(schedules, key=lambda schedule: schedule[0])
        return _Layout(assignment, pairs, blocks, room, links, max(simulated, slowest))


def _families(destinations: Sequence[Holdings], topology: Topology) -> list[Receiver]:
    """Engine ranks of one host that want exactly the same boxes of the same weights.

    Ranks that share a GPU stay alone: what a trainer holds there is nearer than anything that others could pass on.
    """
    families: dict[object, list[int]] = defaultdict(list)
    sharing = Counter(topology.gpu_of)
    for holdings in destinations:
        if topology.gpu_of and sharing[topology.gpu_of[holdings.rank]] > 1:
            families[holdings.rank].append(holdings.rank)
            continue
        content = frozenset((g.boxes, g.dtype, g.indices.tobytes()) for g in holdings.groups)
        families[topology.host_of[holdings.rank], content].append(holdings.rank)
    return [Receiver(tuple(ranks), topology.host_of[ranks[0]]) for ranks in families.values()]


def _digest(manifest: Manifest, layout: _Layout, pace: Pace) -> str:
    assignment = layout.assignment
    digest = hashlib.sha256(manifest.digest().encode())
    digest.update(layout.blocks.tobytes())
    digest.update(
        repr((layout.room, pace, assignment.sets, [r.ranks for r in assignment.receivers])).encode()
    )
    digest.update(assignment.nbytes.tobytes())
    digest.update(assignment.same_gpu.tobytes())
    for order, ends in assignment.cut_points():
        digest.update(order.tobytes())
        digest.update(ends.tobytes())
    return digest.hexdigest()
