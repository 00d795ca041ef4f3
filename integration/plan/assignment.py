"""Who sends what to whom: classes of weights, cut into segments, shared out among the segments' replicas.

Every rank computes the same assignment from the same published holdings. It stays at the level of
classes: the segments (of one weight for one receiver) are listed only for one's own part, and
their sender follows from their place in the list, whose cut points all ranks know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..layout import Box, volume
from .balance import Demand, balance, least_possible
from .classes import TensorClass
from .segments import cut
from .topology import Topology

Ints = npt.NDArray[np.int64]

# Cut points are rounded to this many bytes, so that the last digits of a processor's floats can't matter.
_GRAIN = 16
# A replica set this many times smaller than the average one is not worth balancing.
_SMALL = 100


class ClassSegment(NamedTuple):
    """A segment of each weight of a class: its box, the number of its replica set, its bytes."""

    box: Box
    replica_set: int
    nbytes: int


@dataclass(frozen=True)
class Receiver:
    """Engine ranks of one host that want exactly the same; one rank, unless they fan out among themselves."""

    ranks: tuple[int, ...]
    host: int


class AssignedSegments(NamedTuple):
    """Segments of weights from one replica set to one receiver, in the order that all ranks agree on.

    ``boxes`` holds (class, box, bytes); each stands for all members of its class. ``source`` and ``target`` (int64, one
    for each box and member, boxes one after another) are refit-world ranks.
    """

    boxes: list[tuple[int, Box, int]]
    source: Ints
    target: Ints


class Assignment:
    """The assignment for one choice of receivers.

    Args:
        classes: of the bulk weights.
        receivers: all engine ranks, each in one receiver.
        room: bytes of a message; no segment is larger.
        topology: hosts, GPUs and rates.

    Attributes:
        same_gpu: for each replica set and receiver, int64 ``[sets, receivers]``: the replica on the receiver's own GPU, which
            sends it all that it holds, since no link is as fast as its memory; -1 if there is none.
    """

    def __init__(
        self, classes: Sequence[TensorClass], receivers: Sequence[Receiver], room: int, topology: Topology
    ):
        self.receivers = list(receivers)
        self._classes = classes
        self._topology = topology
        self._receiver_of = {rank: i for i, r in enumerate(receivers) for rank in r.ranks}
        first_of = {r.ranks[0]: i for i, r in enumerate(receivers)}
        self._set_numbers: dict[tuple[int, ...], int] = {}
        self._cuts: list[list[tuple[ClassSegment, ...]]] = []
        self._want_of: list[dict[int, int]] = []
        self._classes_of_set: dict[int, list[int]] = defaultdict(list)
        amounts: list[Ints] = []
        # Cut each class once for all its members, and add up what each replica set has to send to each receiver.
        for index, tensor_class in enumerate(classes):
            cuts = self._cut_class(tensor_class, room)
            wants: dict[int, int] = {}
            for want, (_, ranks) in enumerate(tensor_class.wanted):
                wants |= {first_of[rank]: want for rank in ranks if rank in first_of}
            self._cuts.append(cuts)
            self._want_of.append(wants)
            while len(amounts) < len(self._set_numbers):
                amounts.append(np.zeros(len(self.receivers), dtype=np.int64))
            for want, segments in enumerate(cuts):
                targets = [
                    v for v in (first_of.get(r) for r in tensor_class.wanted[want][1]) if v is not None
                ]
                for number, nbytes in _bytes_by_set(segments).items():
                    amounts[number][targets] += nbytes * len(tensor_class.members)
            for number in {segment.replica_set for segments in cuts for segment in segments}:
                self._classes_of_set[number].append(index)
        # Dictionaries keep their order, so that all ranks number the sets alike.
        self.sets = list(self._set_numbers)
        self.nbytes = np.stack(amounts) if amounts else np.zeros((0, len(self.receivers)), dtype=np.int64)
        self.same_gpu = self._same_gpu_replicas()
        self._over_links = np.where(self.same_gpu < 0, self.nbytes, 0)
        self._share_out()

    def sets_of(self, rank: int) -> list[int]:
        """Numbers of the replica sets that a trainer rank belongs to."""
        return [number for number, ranks in enumerate(self.sets) if rank in ranks]

    def receiver_of(self, rank: int) -> int:
        """Number of an engine rank's receiver."""
        return self._receiver_of[rank]

    def segments(self, number: int, receiver: int) -> AssignedSegments:
        """All segments from replica set ``number`` to ``receiver``."""
        boxes: list[tuple[int, Box, int]] = []
        counts: list[int] = []
        for index in self._classes_of_set[number]:
            want = self._want_of[index].get(receiver)
            if want is None:
                continue
            for segment in self._cuts[index][want]:
                if segment.replica_set == number:
                    boxes.append((index, segment.box, segment.nbytes))
                    counts.append(len(self._classes[index].members))
        # A segment's sender and target follow from where its middle lies in the list of all bytes.
        sizes = np.repeat(np.array([nbytes for _, _, nbytes in boxes], dtype=np.int64), counts)
        middles = np.cumsum(sizes) - sizes / 2
        ranks = np.array(self.receivers[receiver].ranks, dtype=np.int64)
        total = max(int(sizes.sum()), 1)
        # A stripe for each rank of the receiver; rotated, so that small sets do not all begin at the first.
        stripe = (middles * len(ranks) / total).astype(np.int64) + number
        return AssignedSegments(boxes, self._sources(number, receiver, middles), ranks[stripe % len(ranks)])

    def cut_points(self) -> list[tuple[Ints, Ints]]:
        """For each replica set and host: the replicas in order, and where each one's part of the list ends.

        Small sets follow, with the replica that serves each receiver.
        """
        return [*self._ends.values(), *((ranks, ranks) for ranks in self._served.values())]

    def _sources(self, number: int, receiver: int, middles: npt.NDArray[np.float64]) -> Ints:
        if self.same_gpu[number, receiver] >= 0:
            return np.full(len(middles), self.same_gpu[number, receiver], dtype=np.int64)
        if len(self.sets[number]) == 1:
            return np.full(len(middles), self.sets[number][0], dtype=np.int64)
        if number in self._served:
            return np.full(len(middles), self._served[number][receiver], dtype=np.int64)
        order, ends = self._ends[number, self.receivers[receiver].host]
        place = np.searchsorted(ends[:-1], self._starts[number, receiver] + middles, side="right")
        sources: Ints = order[place]
        return sources

    def _cut_class(self, tensor_class: TensorClass, room: int) -> list[tuple[ClassSegment, ...]]:
        held = tuple(box for box, _ in tensor_class.held)
        numbers: dict[tuple[int, ...], int] = {}
        cuts: list[tuple[ClassSegment, ...]] = []
        for boxes, _ in tensor_class.wanted:
            segments = cut(boxes, held, max(1, room // tensor_class.itemsize))
            for segment in segments:
                if segment.holders not in numbers:
                    ranks = tuple(sorted({r for i in segment.holders for r in tensor_class.held[i][1]}))
                    numbers[segment.holders] = self._set_numbers.setdefault(ranks, len(self._set_numbers))
            cuts.append(
                tuple(
                    ClassSegment(s.box, numbers[s.holders], volume(s.box) * tensor_class.itemsize)
                    for s in segments
                )
            )
        return cuts

    def _same_gpu_replicas(self) -> Ints:
        same_gpu = np.full(self.nbytes.shape, -1, dtype=np.int64)
        if not self._topology.gpu_of:
            return same_gpu
        gpus = self._topology.gpus
        # Ranks that pass on to each other share no GPU with a trainer.
        own = gpus[[receiver.ranks[0] for receiver in self.receivers]]
        for number, ranks in enumerate(self.sets):
            for rank in reversed(ranks):
                same_gpu[number, own == gpus[rank]] = rank
        return same_gpu

    def _share_out(self) -> None:
        """Balance the demands, and fix where each replica's part of a set's list begins and ends."""
        hosts = np.array([r.host for r in self.receivers])
        keys: list[tuple[int, int]] = []
        self.demands: list[Demand] = []
        self._serve_small_sets()
        for number, ranks in enumerate(self.sets):
            if number in self._served:
                continue
            by_host = np.bincount(hosts, weights=self._over_links[number], minlength=self._topology.hosts)
            for host in np.flatnonzero(by_host).tolist():
                keys.append((number, host))
                self.demands.append(Demand(ranks, host, int(by_host[host])))
        self.shares = balance(self.demands, self._topology)
        self._ends: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        self._starts = np.zeros_like(self.nbytes)
        for (number, host), demand, shares in zip(keys, self.demands, self.shares, strict=True):
            if len(demand.replicas) == 1:
                continue
            on_host = np.flatnonzero(hosts == host)
            amounts = self._over_links[number, on_host]
            self._starts[number, on_host] = np.cumsum(amounts) - amounts
            # Rotated, so that the rounding at the cut points does not favour the same replicas everywhere.
            order = np.roll(np.arange(len(demand.replicas)), host)
            ends = np.rint(np.cumsum(shares[order]) / _GRAIN).astype(np.int64) * _GRAIN
            ends[-1] = demand.nbytes
            self._ends[number, host] = np.array(demand.replicas, dtype=np.int64)[order], ends

    def _serve_small_sets(self) -> None:
        """Let small weights that many hold (norms) come from whoever sends a receiver most anyway.

        Balancing them gains nothing, and would add pairs that exchange next to nothing and hold up the others.
        """
        self._served: dict[int, Ints] = {}
        everything = int(self.nbytes.sum())
        forced = np.zeros((1 + max(map(max, self.sets), default=0), len(self.receivers)), dtype=np.int64)
        small: list[int] = []
        for number, ranks in enumerate(self.sets):
            if len(ranks) == 1:
                forced[ranks[0]] += self.nbytes[number]
            elif int(self.nbytes[number].sum()) * _SMALL <= everything / len(self.sets):
                small.append(number)
        for number in small:
            replicas = np.array(self.sets[number], dtype=np.int64)
            # Rotated, so that where nobody sends more than others the same replica is not taken by all.
            turn = (np.arange(len(replicas))[:, None] - np.arange(len(self.receivers))[None, :]) % len(
                replicas
            )
            best = np.lexsort((turn, -forced[replicas]), axis=0)[0]
            self._served[number] = replicas[best]

    def pair_bytes(self, ranks: int) -> Ints:
        """Bytes from each rank to each rank, relays included; where replicas share, exact to one segment.

        Returns:
            int64 of shape ``[ranks, ranks]``.
        """
        direct = self._by_receiver(ranks)
        pairs = np.zeros((ranks, ranks), dtype=np.int64)
        for index, receiver in enumerate(self.receivers):
            size = len(receiver.ranks)
            for rank in receiver.ranks:
                pairs[:, rank] += direct[:, index] // size
                for sibling in receiver.ranks:
                    if sibling != rank:
                        pairs[rank, sibling] += int(direct[:, index].sum()) // size
        return pairs

    def amounts(self, train_ranks: int, gen_ranks: int) -> Ints:
        """Bytes from trainers to engine ranks: exact to one segment, and 0 only where nothing is sent.

        Returns:
            int64 of shape ``[train_ranks, gen_ranks]``.
        """
        direct = self._by_receiver(train_ranks + gen_ranks)[:train_ranks]
        amounts = np.zeros((train_ranks, gen_ranks), dtype=np.int64)
        for index, receiver in enumerate(self.receivers):
            for rank in receiver.ranks:
                amounts[:, rank - train_ranks] = -(-direct[:, index] // len(receiver.ranks))
        return amounts

    def origins(self, train_ranks: int, gen_ranks: int) -> Ints:
        """Bytes of each trainer that each engine rank gets, whoever passes them on.

        Returns:
            int64 of shape ``[train_ranks, gen_ranks]``.
        """
        direct = self._by_receiver(train_ranks + gen_ranks)[:train_ranks]
        found = np.zeros((train_ranks, gen_ranks), dtype=np.int64)
        for index, receiver in enumerate(self.receivers):
            for rank in receiver.ranks:
                found[:, rank - train_ranks] = direct[:, index]
        return found

    def _by_receiver(self, ranks: int) -> Ints:
        """Bytes from each rank to each receiver: int64 of shape ``[ranks, receivers]``."""
        direct = np.zeros((ranks, len(self.receivers)), dtype=np.int64)
        hosts = np.array([r.host for r in self.receivers])
        for number, replicas in enumerate(self.sets):
            on_same_gpu = np.flatnonzero(self.same_gpu[number] >= 0)
            direct[self.same_gpu[number, on_same_gpu], on_same_gpu] += self.nbytes[number, on_same_gpu]
            if len(replicas) == 1:
                direct[replicas[0]] += self._over_links[number]
            elif number in self._served:
                direct[self._served[number], np.arange(len(self.receivers))] += self._over_links[number]
        for (number, host), (order, ends) in self._ends.items():
            on_host = np.flatnonzero(hosts == host)
            starts = self._starts[number, on_host]
            begins = np.concatenate(([0], ends[:-1]))
            common = np.minimum.outer(ends, starts + self._over_links[number, on_host])
            common -= np.maximum.outer(begins, starts)
            direct[order[:, None], on_host[None, :]] += np.maximum(common, 0)
        return direct

    def least_seconds(self) -> float:
        """The bound: seconds that some link needs at least, however the replicas share.

        Bytes that the receiver's own GPU holds are taken to stay there: sent over a link, they would load the GPUs' memories
        as much as the copy does.
        """
        topology = self._topology
        nic, nvlink, copy = (topology.gb_per_s * 1e9).tolist()
        bound = least_possible(self.demands, self.shares, topology)
        if not self.sets:
            return bound
        host_of = np.array(topology.host_of)
        hosts = np.array([r.host for r in self.receivers])
        sizes = np.array([len(r.ranks) for r in self.receivers])
        # Of each set's replicas (rows), how many are on the host of each receiver (columns).
        inside = np.stack([(host_of[list(ranks)][:, None] == hosts).sum(axis=0) for ranks in self.sets])
        counts = np.array([len(ranks) for ranks in self.sets])[:, None]
        remote = (self._over_links * (inside == 0)).sum(axis=0)
        local = (self._over_links * (inside == counts)).sum(axis=0)
        total = self._over_links.sum(axis=0)
        on_same_gpu = (self.nbytes - self._over_links).sum(axis=0)
        # With fan-out each rank gets its own stripe from trainers and all other stripes from its siblings.
        relayed = total * (sizes - 1)
        for amounts, rate in (
            (remote, nic),
            (local + relayed, nvlink),
            (total + relayed, nic + nvlink),
            (on_same_gpu, copy),
        ):
            bound = max(bound, float((amounts / sizes).max(initial=0.0)) / rate)
        if topology.host_gb_per_s is not None:
            into_host = np.bincount(hosts, weights=remote, minlength=topology.hosts)
            bound = max(bound, float(into_host.max()) / topology.host_gb_per_s / 1e9)
        return bound


def _bytes_by_set(segments: Sequence[ClassSegment]) -> dict[int, int]:
    amounts: dict[int, int] = defaultdict(int)
    for segment in segments:
        amounts[segment.replica_set] += segment.nbytes
    return amounts
