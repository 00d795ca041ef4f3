"""What every rank computes alike from the published holdings, and each rank's own part of it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..holdings import Holdings
from ..manifest import Manifest, TensorSpec
from ..routing import decide_routes
from .assignment import Assignment, Ints, Receiver
from .classes import TensorClass, classify
from .geometry import check
from .model import Plan
from .own_part import compile_own_part
from .schedule import message_room, simulate
from .topology import LinkLoad, Topology

# Fan-out makes a receiver wait for its siblings; it has to save at least this share of the time.
_FAN_OUT_GAIN = 0.1


@dataclass(frozen=True)
class Analysis:
    """The plan of all ranks, at the level of classes of weights.

    Attributes:
        manifest: the weights with their routes and reasons.
        topology: hosts and rates that the sharing was made for.
        pair_bytes: bytes from each rank to each rank, int64 ``[world, world]``; where replicas share the
            sending, exact to one segment. Relays among engine ranks are included.
        links: every link in use, with its load.
        bound_seconds: the speed of light: the time that some link needs at least, whoever of the
            replicas sends (max over links of bytes/rate, minimized over the sharing; a proven bound).
        predicted_seconds: simulated time of the rounds at nominal rates.
        fan_out: whether engine ranks of one host that want the same pass it on to each other.
        bucket_bytes: staging memory per direction that messages were cut for.
        digest: equal on all ranks, or nothing moves.
    """

    manifest: Manifest = field(repr=False)
    topology: Topology
    pair_bytes: Ints = field(repr=False)
    links: tuple[LinkLoad, ...] = field(repr=False)
    bound_seconds: float
    predicted_seconds: float
    fan_out: bool
    bucket_bytes: int
    digest: str
    train_ranks: int
    gen_ranks: int
    room: int
    classes: tuple[TensorClass, ...] = field(repr=False)
    assignment: Assignment = field(repr=False)

    @property
    def busiest_link(self) -> LinkLoad | None:
        """The link that needs longest; None if nothing travels."""
        return max(self.links, key=lambda link: link.seconds, default=None)

    @property
    def busiest_link_ratio(self) -> float:
        """Time of the busiest link over the least that ownership allows; 1 is perfect."""
        busiest = self.busiest_link
        return busiest.seconds / self.bound_seconds if busiest and self.bound_seconds else 1.0

    def compile(self, rank: int) -> Plan:
        """The part of ``rank`` (of the refit world)."""
        names = [entry.spec.name for entry in self.manifest]
        return compile_own_part(
            rank,
            names,
            self.classes,
            self.assignment,
            self.train_ranks,
            self.gen_ranks,
            self.room,
            self.digest,
        )


def analyse(
    specs: Sequence[TensorSpec],
    sources: Sequence[Holdings],
    destinations: Sequence[Holdings],
    *,
    bucket_bytes: int,
    topology: Topology | None = None,
    fan_out: bool | None = None,
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

    Raises:
        PlanError: a wanted box that no trainer holds, fragments of one rank that want the same bytes, or
            a bucket too small; names the weight, the rank and the box.
    """
    train, gen = len(sources), len(destinations)
    topology = topology or Topology((0,) * (train + gen))
    manifest = decide_routes(specs, sources, destinations)
    bulk = np.array([entry.route == "bulk" for entry in manifest], dtype=bool)
    classes = tuple(classify(specs, sources, destinations, bulk))
    for tensor_class in classes:
        check(tensor_class, specs)
    alone = [Receiver((h.rank,), topology.host_of[h.rank]) for h in destinations]
    candidates: list[tuple[Assignment, int, bool]] = []
    if fan_out is not True:
        room = message_room(bucket_bytes, train, gen, 1)
        candidates.append((Assignment(classes, alone, room, topology), room, False))
    families = _families(destinations, topology)
    if fan_out is not False and (fan_out or any(len(f.ranks) > 1 for f in families)):
        room = message_room(bucket_bytes, train, gen, max(len(f.ranks) for f in families))
        candidates.append((Assignment(classes, families, room, topology), room, True))
    chosen, room, fans = candidates[0]
    least = chosen.least_seconds()
    for other, its_room, its_fans in candidates[1:]:
        seconds = other.least_seconds()
        if seconds < (1 - _FAN_OUT_GAIN) * least:
            chosen, room, fans, least = other, its_room, its_fans, seconds
    pairs = chosen.pair_bytes(train + gen)
    links = chosen.links(pairs)
    simulated = simulate(pairs[:train, train:], train, gen, room, topology)
    slowest = max((link.seconds for link in links), default=0.0)
    return Analysis(
        manifest=manifest,
        topology=topology,
        pair_bytes=pairs,
        links=links,
        bound_seconds=least,
        predicted_seconds=max(simulated, slowest),
        fan_out=fans,
        bucket_bytes=bucket_bytes,
        digest=_digest(manifest, chosen, room),
        train_ranks=train,
        gen_ranks=gen,
        room=room,
        classes=classes,
        assignment=chosen,
    )


def _families(destinations: Sequence[Holdings], topology: Topology) -> list[Receiver]:
    """Engine ranks of one host that want exactly the same boxes of the same weights."""
    families: dict[object, list[int]] = defaultdict(list)
    for holdings in destinations:
        content = frozenset((g.boxes, g.dtype, g.indices.tobytes()) for g in holdings.groups)
        families[topology.host_of[holdings.rank], content].append(holdings.rank)
    return [Receiver(tuple(ranks), topology.host_of[ranks[0]]) for ranks in families.values()]


def _digest(manifest: Manifest, assignment: Assignment, room: int) -> str:
    digest = hashlib.sha256(manifest.digest().encode())
    digest.update(repr((room, assignment.sets, [r.ranks for r in assignment.receivers])).encode())
    digest.update(assignment.nbytes.tobytes())
    for order, ends in assignment.cut_points():
        digest.update(order.tobytes())
        digest.update(ends.tobytes())
    return digest.hexdigest()
