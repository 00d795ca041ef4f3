"""A process group over shared host memory: any ranks of one host, on CPUs, and on GPUs without CUDA IPC."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from ...endings import end_all
from ...errors import RefitError
from ..exchanges import Exchange, Parcel
from .group import SharedGroup
from .host_exchange import HostExchange
from .host_link import BUCKETS, HostLink
from .pairs import Pair, open_pairs

logger = logging.getLogger(__name__)

# Larger ones would not overlap any better, and smaller ones stay in a core's caches.
MOST_BUCKET_BYTES = 4 << 20


class HostGroup(SharedGroup):
    """Ranks that exchange parcels through buckets in memory that each pair of them shares.

    A parcel larger than a bucket goes in parts. Memory is taken when two ranks first have something to exchange,
    and given back with :meth:`close`; nothing of it has a name in the file system.
    """

    wire = "a copy to or from memory shared with other ranks"
    most_bucket_bytes = MOST_BUCKET_BYTES

    def _begin(self) -> None:
        self._links: dict[int, list[HostLink]] = {}
        self._closed = False

    def prepare(self, sends: Sequence[Parcel], receives: Sequence[Parcel], lane: int = 0) -> Exchange:
        return HostExchange(self, lane, sends, receives)

    def connect(self, peers: Iterable[int]) -> None:
        if self._closed:
            raise RefitError("the process group is closed", stage="process group", rank=self.rank)
        new = sorted({*peers} - self._links.keys() - {self.rank})
        if not new:
            return
        lane_bytes = 2 * BUCKETS * self._bucket_bytes
        limit = self.timeout.total_seconds()
        opened = open_pairs(
            self._store, self._name, self.rank, new, self.lanes * lane_bytes, self.lanes, limit, self._watch
        )
        self._pairs |= opened
        for peer, pair in opened.items():
            if self.device.type == "cuda" and not pair.segment.pin():
                logger.warning(
                    "rank %d: memory shared with rank %d can't be pinned, so copies from and to the GPU are slow; raise "
                    "the limit of locked memory (ulimit -l)",
                    self.rank,
                    peer,
                )
            self._links[peer] = [self._make_link(pair, lane, lane_bytes) for lane in range(self.lanes)]

    def link(self, peer: int, lane: int) -> HostLink:
        """The link to a connected peer."""
        return self._links[peer][lane]

    def look_around(self, stage: str) -> None:
        """Raise if another rank has given up."""
        self._watch(stage)

    def abort(self) -> bool:
        # Whatever was under way ended with the call that had begun it.
        return True

    def close(self, *, failed: bool = False) -> None:
        self._closed = True
        while self._links:
            for link in self._links.popitem()[1]:
                link.close()
        pairs, self._pairs = self._pairs, {}
        end_all(pair.close for pair in pairs.values())

    @property
    def staging_bytes(self) -> int:
        # Each end counts what it receives in.
        return len(self._links) * self.lanes * BUCKETS * self._bucket_bytes

    def _make_link(self, pair: Pair, lane: int, lane_bytes: int) -> HostLink:
        memory = pair.segment.memory[lane * lane_bytes : (lane + 1) * lane_bytes]
        buckets = list(memory.split(self._bucket_bytes))
        upward, downward = buckets[:BUCKETS], buckets[BUCKETS:]
        outgoing, incoming = (upward, downward) if self.rank < pair.peer else (downward, upward)
        return HostLink(pair.peer, pair.connections[lane], outgoing, incoming)
