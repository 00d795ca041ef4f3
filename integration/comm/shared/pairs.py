"""How two ranks of a host come to share memory and a connection: the lower one makes them, the higher one fetches."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import Store

from ...endings import end_all
from ...errors import PeerLost, RefitError, RefitMismatch, RefitTimeout
from ...gpu_memory.descriptors import DescriptorServer, fetch
from ..waiting import wait_until
from .segment import Segment

_STAGE = "process group"
# What the higher rank says once it has mapped the memory.
_HERE = b"h"


class Pair:
    """Memory that this rank shares with a peer, and a connection in each lane.

    A connection ends when either process does, however it ends: that is how the other one hears of it.

    Attributes:
        peer: the other rank of the group.
        segment: the memory.
        connections: one for each lane, non-blocking.
    """

    def __init__(self, peer: int, segment: Segment, connections: Sequence[socket.socket]):
        self.peer = peer
        self.segment = segment
        self.connections = list(connections)
        self._server: DescriptorServer | None = None
        self._theirs: list[int] = []

    @staticmethod
    def make(peer: int, nbytes: int, lanes: int, timeout_s: float) -> tuple[Pair, dict[str, str]]:
        """What a peer will fetch, and what to tell it."""
        segment, descriptor = Segment.make(nbytes)
        both = [socket.socketpair() for _ in range(lanes)]
        pair = Pair(peer, segment, [ours for ours, _ in both])
        for ours, _ in both:
            ours.setblocking(False)
        pair._theirs = [descriptor, *(theirs.detach() for _, theirs in both)]
        server = pair._server = DescriptorServer(pair._hand_over, 1 + lanes, 1, timeout_s)
        return pair, {"address": server.address, "token": server.token}

    @staticmethod
    def fetch(peer: int, told: dict[str, Any], nbytes: int, lanes: int, timeout_s: float) -> Pair:
        """The peer's half.

        Raises:
            OSError: it can't be reached.
            ValueError: it has made other memory.
        """
        found: list[int] = []
        try:
            with closing(
                fetch(str(told["address"]), str(told["token"]), [(0, 1 + lanes)], timeout_s)
            ) as following:
                found.extend(following)
            pair = Pair(peer, Segment(found[0], nbytes), [])
            while len(found) > 1:
                pair.connections.append(socket.socket(fileno=found.pop(1)))
                pair.connections[-1].setblocking(False)
            return pair
        finally:
            for descriptor in found:
                os.close(descriptor)

    def close(self) -> None:
        """End the connections and let go of the memory; safe to call twice."""
        server, theirs, connections = self._server, self._theirs, self.connections
        self._server, self._theirs, self.connections = None, [], []
        steps: list[Callable[[], object]] = [] if server is None else [server.close]
        steps += [partial(os.close, descriptor) for descriptor in theirs if descriptor >= 0]
        end_all([*steps, *(connection.close for connection in connections), self.segment.close])

    def _hand_over(self, index: int) -> int:
        descriptor, self._theirs[index] = self._theirs[index], -1
        if descriptor < 0:
            raise ValueError("a peer asks for its end of a connection twice")
        return descriptor


def open_pairs(
    store: Store,
    name: str,
    rank: int,
    peers: Sequence[int],
    nbytes: int,
    lanes: int,
    timeout_s: float,
    watch: Callable[[str], None],
) -> dict[int, Pair]:
    """Pair with all ``peers``, which do so at the same time.

    Args:
        store: of the group.
        name: of the group.
        rank: in the group.
        peers: other ranks of the group.
        nbytes: of each pair's memory, the same on both ends.
        lanes: the same on all ranks.
        timeout_s: limit of waiting for any of them.
        watch: called now and then during a wait; raises if another rank has given up.

    Raises:
        RefitTimeout: a peer did not come.
        PeerLost: it came and left.
        RefitError: it can't be reached.
    """
    opened: dict[int, Pair] = {}
    try:
        for peer in (peer for peer in peers if peer > rank):
            opened[peer], told = Pair.make(peer, nbytes, lanes, timeout_s)
            tell(store, f"{name}/{rank}+{peer}", told)
        for peer in (peer for peer in peers if peer < rank):
            told = hear(store, f"{name}/{peer}+{rank}", peer, rank, timeout_s)
            opened[peer] = _fetched(peer, told, rank, nbytes, lanes, timeout_s)
            opened[peer].connections[0].send(_HERE)
        # Or a rank that is done early could take its memory away before a late peer has mapped it.
        for peer in (peer for peer in peers if peer > rank):
            _await(opened[peer], rank, timeout_s, watch)
    except BaseException as error:
        end_all([pair.close for pair in opened.values()], error)
        raise
    return opened


def _await(pair: Pair, rank: int, timeout_s: float, watch: Callable[[str], None]) -> None:
    connection = pair.connections[0]
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    wait_until(
        lambda: bool(waiting.poll(0)),
        timeout_s,
        _STAGE,
        watch,
        lambda: _never_came(pair.peer, rank, timeout_s),
        # In milliseconds, rounded up: 0 would not wait at all.
        lambda limit_s: waiting.poll(max(1.0, 1e3 * limit_s)),
    )
    if connection.recv(len(_HERE)) != _HERE:
        raise PeerLost(
            f"group rank {pair.peer} ended or gave up as it came to share memory", stage=_STAGE, rank=rank
        )


def _never_came(peer: int, rank: int, timeout_s: float) -> RefitTimeout:
    return RefitTimeout(
        f"group rank {peer} did not come to share memory within {timeout_s:.0f} s; dead, busy, or not called at all",
        stage=_STAGE,
        rank=rank,
    )


def tell(store: Store, key: str, data: object) -> None:
    """Set plain data for a peer."""
    store.set(key, json.dumps(data))


def hear(store: Store, key: str, peer: int, rank: int, timeout_s: float) -> dict[str, Any]:
    """What ``peer`` told; waits for it.

    Raises:
        RefitTimeout: it did not come.
        RefitMismatch: it can't be read.
    """
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        raw = store.get(key)
    except RefitError:
        raise
    except RuntimeError as error:
        raise RefitTimeout(
            f"group rank {peer} did not come to share memory within {timeout_s:.0f} s: {error}",
            stage=_STAGE,
            rank=rank,
        ) from error
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise RefitMismatch(
            f"what group rank {peer} tells of its memory is malformed: {error}. Do all ranks run the same rlrefit?",
            stage=_STAGE,
            rank=rank,
        ) from error
    return found if isinstance(found, dict) else {}


def _fetched(peer: int, told: dict[str, Any], rank: int, nbytes: int, lanes: int, timeout_s: float) -> Pair:
    try:
        return Pair.fetch(peer, told, nbytes, lanes, timeout_s)
    except (OSError, ValueError, KeyError) as error:
        # Most often since it has ended meanwhile.
        raise PeerLost(
            f"the memory that group rank {peer} shares can't be opened ({type(error).__name__}: {error}); nothing was "
            "written. Has it ended? Processes that share a GPU or run colocated_ipc must share the host, its network namespace and "
            "the user, and run the same rlrefit",
            stage=_STAGE,
            rank=rank,
        ) from error
