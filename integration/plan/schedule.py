"""Rounds: which pairs exchange messages when, and how long that takes.

Pairs are arranged in *blocks*, in each of which a rank has at most ``_SLOTS`` peers. So its bucket is cut
into few large messages, and no receiver is the target of all senders at once. The order is total and
the same on all ranks; a rank skips the rounds in which it has no message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .model import ALIGNMENT, CHECKSUM_BYTES, NCCL_PACE, Pace
from .topology import Topology

# Peers of a rank at a time: enough to even out the senders, few enough for large messages.
_SLOTS = 8
# Messages of a pair within its block; more would overflow into the next block's numbers.
_MESSAGES = 1 << 24
# What starting a round costs beside its bytes (a grouped NCCL call), in seconds.
_ROUND_LATENCY = 30e-6
# The simulation cuts a pair's bytes into at most this many messages.
_SIMULATED_MESSAGES = 64

Matrix = npt.NDArray[np.int64]


def slots(train_ranks: int, gen_ranks: int) -> int:
    """How many peers a rank serves in one round at most."""
    return min(_SLOTS, max(train_ranks, gen_ranks))


def arrange(amounts: Matrix, *, by_size: bool) -> Matrix:
    """The block of every pair that exchanges something.

    Pairs are taken by rotation (sender ``i`` with receiver ``i + offset``, for one offset after the other), and
    each goes into the first block in which both ends still have a slot. Where all exchange with all, that is the
    rotation itself; where few do, their slots fill up all the same.

    Args:
        amounts: bytes, int64 of shape ``[train_ranks, gen_ranks]``; 0 where nothing is exchanged.
        by_size: take pairs of larger size (in powers of two) before all smaller ones, so that nobody with much to
            do waits for one with little; better where pairs are uneven, worse where they are nearly even.

    Returns:
        int64 of the same shape; -1 for pairs without messages.
    """
    train_ranks, gen_ranks = amounts.shape
    places, room = max(train_ranks, gen_ranks), slots(train_ranks, gen_ranks)
    source, target = np.nonzero(amounts)
    size = -np.floor(np.log2(amounts[source, target])).astype(np.int64) * by_size
    order = np.lexsort((source, (target - source) % places, size))
    blocks = np.full(amounts.shape, -1, dtype=np.int64)
    sender, receiver = [0] * train_ranks, [0] * gen_ranks
    for i, j in zip(source[order].tolist(), target[order].tolist(), strict=True):
        block = max(sender[i], receiver[j]) // room
        blocks[i, j] = block
        sender[i] = max(sender[i], block * room) + 1
        receiver[j] = max(receiver[j], block * room) + 1
    return blocks


def peers_at_a_time(blocks: Matrix) -> int:
    """The most peers that any rank has in any block of :func:`arrange`."""
    source, target = np.nonzero(blocks >= 0)
    if not source.size:
        return 1
    count = int(blocks.max()) + 1
    by_sender = np.bincount(source * count + blocks[source, target])
    by_receiver = np.bincount(target * count + blocks[source, target])
    return int(max(by_sender.max(), by_receiver.max()))


def round_index(block: int, message: int, *, relay: bool) -> int:
    """The global number of a round: the ``message``-th of its pair in ``block``; relays follow at once."""
    return 2 * (block * _MESSAGES + message) + relay


def message_room(bucket_bytes: int, peers: int, siblings: int, pace: Pace) -> int:
    """Bytes of segments in a message, so that a round's messages of a rank fit into its bucket.

    Args:
        bucket_bytes: of a bucket where two take turns; more share what these have.
        peers: of a rank at a time.
        siblings: ranks that pass on what they receive to each other; 1 without fan-out.
        pace: of the wire.

    Raises:
        PlanError: the bucket is too small for one element from every peer.
    """
    limit = bucket_bytes * NCCL_PACE.buckets // (pace.buckets * peers * siblings)
    room = limit // ALIGNMENT * ALIGNMENT - CHECKSUM_BYTES
    if room < ALIGNMENT:
        raise PlanError(
            f"a bucket of {bucket_bytes} bytes leaves {limit} for each of {peers} peers, too little for one element; "
            "give a larger bucket (policy.refit.bucket_mb)",
            stage="plan",
        )
    return room if pace.most is None else min(room, pace.most)


def simulate(
    pair_bytes: Matrix, blocks: Matrix, families: Sequence[Sequence[int]], room: int, topology: Topology
) -> float:
    """Seconds that the rounds take, if each rank runs its own in order and links have their nominal rates.

    A message starts when both ends are free; the messages of a round share each end's link evenly, and a NIC,
    NVLink and a GPU's own memory work at the same time. Relays follow each round.

    Args:
        pair_bytes: from trainers to engine ranks, int64 of shape ``[train_ranks, gen_ranks]``.
        blocks: of :func:`arrange`.
        families: engine ranks (of the refit world) that pass on to each other what they receive.
        room: bytes of a message.
        topology: hosts, GPUs and rates.
    """
    train_ranks = pair_bytes.shape[0]
    source, target = np.nonzero(pair_bytes)
    if not source.size:
        return 0.0
    nbytes = pair_bytes[source, target].astype(np.float64)
    ways = topology.ways(source, target + train_ranks)
    count = np.clip(np.ceil(nbytes / room), 1, _SIMULATED_MESSAGES).astype(np.int64)
    relays = np.array([(a, b) for ranks in families for a in ranks for b in ranks if a != b], dtype=np.int64)
    relay_ways = topology.ways(relays[:, 0], relays[:, 1]) if relays.size else relays
    free = np.zeros(len(topology.host_of))
    block = blocks[source, target]
    for index in range(int(block.max()) + 1):
        here = block == index
        for message in range(int(count[here].max(initial=0))):
            active = np.flatnonzero(here & (count > message))
            part = nbytes[active] / count[active]
            s, d = source[active], target[active] + train_ranks
            _exchange(free, s, d, part, ways[active], topology)
            if relays.size:
                got: npt.NDArray[np.float64] = np.bincount(d, weights=part, minlength=len(free)).astype(
                    np.float64
                )
                passing = got[relays[:, 0]] > 0
                a, b = relays[passing, 0], relays[passing, 1]
                _exchange(free, a, b, got[a], relay_ways[passing], topology)
    return float(free.max())


def _exchange(
    free: npt.NDArray[np.float64],
    source: Matrix,
    target: Matrix,
    nbytes: npt.NDArray[np.float64],
    ways: Matrix,
    topology: Topology,
) -> None:
    """Let one round's messages pass; updates when each rank is ``free``."""
    rates = topology.gb_per_s * 1e9
    kinds = len(rates)
    lanes = kinds * len(free)
    took = np.maximum(
        _fair_share(nbytes, kinds * source + ways, lanes), _fair_share(nbytes, kinds * target + ways, lanes)
    )
    end = np.maximum(free[source], free[target]) + took / rates[ways] + _ROUND_LATENCY
    np.maximum.at(free, source, end)
    np.maximum.at(free, target, end)


def _fair_share(nbytes: npt.NDArray[np.float64], link: Matrix, links: int) -> npt.NDArray[np.float64]:
    """Bytes that each message's link has carried when the message is through, if all share it evenly.

    Messages on one link progress alike, so one of ``b`` bytes ends after ``sum(min(b, other))`` bytes.
    """
    order = np.argsort(link, kind="stable")
    counts = np.bincount(link, minlength=links)
    place = np.empty(len(link), dtype=np.int64)
    place[order] = np.arange(len(link)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.zeros((links, int(counts.max(initial=1))))
    table[link, place] = nbytes
    shared: npt.NDArray[np.float64] = np.minimum(table[link], nbytes[:, None]).sum(axis=1)
    return shared
