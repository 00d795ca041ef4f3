"""Rounds: which pairs exchange messages when, and how long that takes.

Pairs are arranged in *blocks* by rotation: in block ``b`` sender ``i`` serves the ``SLOTS`` receivers
that stand ``b·SLOTS … (b+1)·SLOTS-1`` places after it. So a rank has at most ``SLOTS`` peers at a time,
its bucket is cut into few large messages, and no receiver is the target of all senders at once. The
order is total and the same on all ranks; a rank skips the rounds in which it has no message.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .model import ALIGNMENT, CHECKSUM_BYTES
from .topology import Topology

# Peers of a rank at a time: enough to even out the senders, few enough for large messages.
SLOTS = 8
# Messages of a pair within its block; more would overflow into the next block's numbers.
_MESSAGES = 1 << 24
# What starting a round costs beside its bytes (a grouped NCCL call), in seconds.
_ROUND_LATENCY = 30e-6
# The simulation cuts a pair's bytes into at most this many messages.
_SIMULATED_MESSAGES = 64

Matrix = npt.NDArray[np.int64]


def slots(train_ranks: int, gen_ranks: int) -> int:
    """How many peers a rank serves in one round."""
    return min(SLOTS, max(train_ranks, gen_ranks))


def block_of(source: int, destination: int, train_ranks: int, gen_ranks: int) -> int:
    """The block in which a trainer and an engine rank (both in refit-world numbers) exchange messages."""
    places = max(train_ranks, gen_ranks)
    return (destination - train_ranks - source) % places // slots(train_ranks, gen_ranks)


def round_index(block: int, message: int, *, relay: bool) -> int:
    """The global number of a round: the ``message``-th of its pair in ``block``; relays follow at once."""
    return 2 * (block * _MESSAGES + message) + relay


def message_room(bucket_bytes: int, train_ranks: int, gen_ranks: int, siblings: int) -> int:
    """Bytes of segments in a message, so that a round's messages of a rank fit into its bucket.

    Args:
        bucket_bytes: staging memory per direction.
        train_ranks: ranks of the trainer.
        gen_ranks: ranks of the engines.
        siblings: ranks that pass on what they receive to each other; 1 without fan-out.

    Raises:
        PlanError: the bucket is too small for one element from every peer.
    """
    peers = slots(train_ranks, gen_ranks)
    limit = bucket_bytes // (peers * siblings)
    room = limit // ALIGNMENT * ALIGNMENT - CHECKSUM_BYTES
    if room < ALIGNMENT:
        raise PlanError(
            f"a bucket of {bucket_bytes} bytes leaves {limit} for each of {peers} peers, too little for one element; "
            "raise policy.refit.bucket_mb",
            stage="plan",
        )
    return room


def simulate(pair_bytes: Matrix, train_ranks: int, gen_ranks: int, room: int, topology: Topology) -> float:
    """Seconds that the rounds take, if each rank runs its own in order and links have their nominal rates.

    A message starts when both ends are free and ends when both ends' links have carried all that they
    exchange in that round; a NIC and NVLink work at the same time.

    Args:
        pair_bytes: int64 of shape ``[train_ranks, gen_ranks]``.
        train_ranks: ranks of the trainer.
        gen_ranks: ranks of the engines.
        room: bytes of a message.
        topology: hosts and rates.
    """
    hosts = np.array(topology.host_of)
    source, target = np.nonzero(pair_bytes)
    if not source.size:
        return 0.0
    nbytes = pair_bytes[source, target].astype(np.float64)
    inside = hosts[source] == hosts[target + train_ranks]
    seconds = nbytes / np.where(inside, topology.nvlink_gb_per_s, topology.nic_gb_per_s) / 1e9
    count = np.clip(np.ceil(nbytes / room), 1, _SIMULATED_MESSAGES).astype(np.int64)
    places = max(train_ranks, gen_ranks)
    block = (target - source) % places // slots(train_ranks, gen_ranks)
    free = np.zeros(train_ranks + gen_ranks)
    for index in range(int(block.max()) + 1):
        here = block == index
        for message in range(int(count[here].max(initial=0))):
            active = np.flatnonzero(here & (count > message))
            s, d = source[active], target[active] + train_ranks
            cost, local = seconds[active] / count[active], inside[active]
            busy = np.zeros((2, len(free)))
            np.add.at(busy, (local.astype(np.int64), s), cost)
            np.add.at(busy, (local.astype(np.int64), d), cost)
            work = busy.max(axis=0)
            end = np.maximum(free[s], free[d]) + np.maximum(work[s], work[d]) + _ROUND_LATENCY
            np.maximum.at(free, s, end)
            np.maximum.at(free, d, end)
    return float(free.max())
