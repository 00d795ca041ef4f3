"""Sharing the sending among replicas, so that the busiest link carries as little as it can.

A *demand* is an amount of bytes that any of a set of ranks may send to ranks of one host. Which rank
sends how much is a convex load-balancing problem: filling each demand to a common water level while
all others stay (block coordinate descent on the loads) converges to loads whose maximum is least.
The result is checked: :func:`least_possible` gives a bound that holds for any sharing, by duality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .topology import Topology

Floats = npt.NDArray[np.float64]

_PASSES = 6


@dataclass(frozen=True)
class Demand:
    """``nbytes`` that any of ``replicas`` may send to ranks of ``host``."""

    replicas: tuple[int, ...]
    host: int
    nbytes: int


class _SenderLoads:
    """Seconds of sending on each rank's NIC and NVLink, and on each host's uplink."""

    def __init__(self, topology: Topology):
        self._topology = topology
        self._host_of = np.array(topology.host_of)
        ranks, hosts = len(topology.host_of), topology.hosts
        # Index 0: to other hosts, 1: inside the host.
        self.seconds: Floats = np.zeros((2, ranks))
        self._rates = np.array([topology.nic_gb_per_s, topology.nvlink_gb_per_s]) * 1e9
        self.uplinks: Floats = np.zeros(hosts)
        self._uplink_rate = (topology.host_gb_per_s or np.inf) * 1e9

    def share(self, demand: Demand) -> Floats:
        """Bytes for each replica that bring the loads nearest to equal; adds them to the loads."""
        ranks = np.array(demand.replicas)
        inside = (self._host_of[ranks] == demand.host).astype(np.int64)
        if len(ranks) == 1:
            shares = np.array([float(demand.nbytes)])
            self._add(ranks, inside, shares)
            return shares
        levels = self.seconds[inside, ranks]
        if self._topology.host_gb_per_s is not None:
            uplinks = np.where(inside == 1, 0.0, self.uplinks[self._host_of[ranks]])
            levels = np.maximum(levels, uplinks)
        shares = _fill(levels, self._rates[inside], float(demand.nbytes))
        self._add(ranks, inside, shares)
        return shares

    def take_back(self, demand: Demand, shares: Floats) -> None:
        """Undo :meth:`share`."""
        ranks = np.array(demand.replicas)
        self._add(ranks, (self._host_of[ranks] == demand.host).astype(np.int64), -shares)

    def _add(self, ranks: npt.NDArray[np.int64], inside: npt.NDArray[np.int64], shares: Floats) -> None:
        self.seconds[inside, ranks] += shares / self._rates[inside]
        if self._topology.host_gb_per_s is not None:
            out = inside == 0
            np.add.at(self.uplinks, self._host_of[ranks[out]], shares[out] / self._uplink_rate)


def balance(demands: Sequence[Demand], topology: Topology) -> list[Floats]:
    """Bytes that each replica of each demand sends."""
    loads = _SenderLoads(topology)
    shares: list[Floats] = [np.empty(0)] * len(demands)
    # Those without a choice first, so that the others can go around them.
    order = sorted(range(len(demands)), key=lambda i: (len(demands[i].replicas), i))
    for i in order:
        shares[i] = loads.share(demands[i])
    free = [i for i in order if len(demands[i].replicas) > 1]
    for _ in range(_PASSES - 1):
        worst = float(loads.seconds.max(initial=0.0))
        for i in free:
            loads.take_back(demands[i], shares[i])
            shares[i] = loads.share(demands[i])
        if worst - float(loads.seconds.max(initial=0.0)) <= 1e-3 * worst:
            break
    return shares


def least_possible(demands: Sequence[Demand], shares: Sequence[Floats], topology: Topology) -> float:
    """Seconds that the senders need at least, whatever the shares: a proof and not an estimate.

    For any set of links, the demands that can use no other link need the sum of their bytes over the
    sum of the links' rates. The sets tried are those of the links busier than a threshold, which for
    balanced shares contains the one that proves them optimal.
    """
    host_of = topology.host_of
    rates = (topology.nic_gb_per_s * 1e9, topology.nvlink_gb_per_s * 1e9)
    uplink_rate = (topology.host_gb_per_s or float("inf")) * 1e9
    seconds: dict[tuple[int, int], float] = {}
    uplinks = [0.0] * topology.hosts
    links_of: list[list[tuple[int, int]]] = []
    for demand, share in zip(demands, shares, strict=True):
        links = [(int(host_of[r] == demand.host), r) for r in demand.replicas]
        links_of.append(links)
        for link, nbytes in zip(links, share.tolist(), strict=True):
            seconds[link] = seconds.get(link, 0.0) + nbytes / rates[link[0]]
            if not link[0]:
                uplinks[host_of[link[1]]] += nbytes / uplink_rate

    def level(link: tuple[int, int]) -> float:
        return max(seconds[link], 0.0 if link[0] else uplinks[host_of[link[1]]])

    # Links from the busiest down. A demand can avoid the first k of them only if it can use a later one, so it counts at the
    # place of its least busy link.
    order = sorted(seconds, key=lambda link: (-level(link), link))
    place = {link: i for i, link in enumerate(order)}
    forced = [0] * len(order)
    for demand, links in zip(demands, links_of, strict=True):
        forced[max(place[link] for link in links)] += demand.nbytes
    best = capacity = total = 0.0
    outward = [0.0] * topology.hosts
    for (inside, rank), nbytes in zip(order, forced, strict=True):
        if inside:
            capacity += rates[1]
        else:
            host = host_of[rank]
            before = min(outward[host], uplink_rate)
            outward[host] += rates[0]
            capacity += min(outward[host], uplink_rate) - before
        total += nbytes
        best = max(best, total / capacity)
    return best


def _fill(levels: Floats, rates: Floats, nbytes: float) -> Floats:
    """Raise the lowest levels (seconds) to a common one by ``nbytes`` in all; returns the bytes of each."""
    order = np.argsort(levels, kind="stable")
    sorted_levels, sorted_rates = levels[order], rates[order]
    capacity = np.cumsum(sorted_rates)
    # Bytes that fit below each level if all lower ones are raised to it.
    below = sorted_levels * capacity - np.cumsum(sorted_levels * sorted_rates)
    last = int(np.searchsorted(below, nbytes, side="right")) - 1
    surface = sorted_levels[last] + (nbytes - below[last]) / capacity[last]
    result: Floats = np.maximum(surface - levels, 0.0) * rates
    return result
