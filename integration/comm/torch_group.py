"""Process groups of the refit's own: made from its store, apart from the trainer's default group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..endings import end_all
from ..errors import PeerLost, RefitError
from .broadcasts import GroupBroadcasts
from .exchanges import Exchange, GlooExchange, NcclExchange, Parcel
from .waits import in_thread

logger = logging.getLogger(__name__)

# Seconds that closing a communicator may take at most: NCCL waits for the peers there.
_CLOSE_WITHIN = 30.0


class Group(GroupBroadcasts):
    """Point-to-point messages and broadcasts among ``size`` ranks, NCCL on GPUs and gloo on CPUs.

    Ranks are counted inside the group. The group belongs to the refit alone: nothing of
    ``torch.distributed``'s default group is read or changed.

    On GPUs, an exchange is only enqueued by :meth:`Exchange.start`; :meth:`wait_for` then waits on the
    host, within the timeout and with a look at the other ranks. On CPUs :meth:`Exchange.finish` waits.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        lanes: int = 1,
    ):
        """Make the group; all its ranks do so at the same time.

        Args:
            store: of the epoch.
            name: of the group, unique in the epoch.
            rank: in the group.
            size: of the group.
            device: a CUDA device for NCCL, else gloo.
            timeout_s: limit of any exchange, in seconds.
            watch: called with the stage now and then while an exchange on a GPU is under way; it raises
                if another rank has given up.
            lanes: communicators, whose exchanges may be under way at the same time.

        Raises:
            RefitTimeout: some rank did not come in time.
            PeerLost: the ranks can't reach each other, or one has given up.
        """
        self._configure(rank, size, device, timeout_s, watch, lanes)
        try:
            self._open_lanes(store, name)
        except BaseException as error:
            # The lanes that are open already: peers would wait for them.
            end_all([partial(self.close, failed=True)], error)
            raise

    def _open_lanes(self, store: Store, name: str) -> None:
        try:
            for lane in range(self.lanes):
                # Gloo connects to each rank in turn here, deaf to those that give up meanwhile.
                make = partial(self._make, PrefixStore(f"{name}/{lane}", store))
                self._backends.append(self._guarded(make, "connect"))
            # NCCL connects all ranks at the first use, and a rank without messages would never come to it.
            self.prepare_broadcast(0)
        except RefitError:
            raise
        except RuntimeError as error:
            raise PeerLost(
                f"the refit's process group {name!r} of {self.size} ranks could not be made: {error}. Can all ranks "
                "reach each other, and does the host name resolve to an address that the other hosts see?",
                stage="process group",
                rank=self.rank,
            ) from error

    def prepare(self, sends: Sequence[Parcel], receives: Sequence[Parcel], lane: int = 0) -> Exchange:
        """Parcels that will be exchanged at once, any number of times.

        Both sides' parcels must match pairwise, in the same order for each pair. On a GPU, large ones of
        one call travel together, so a call should hold all that is ready.
        """
        kind = NcclExchange if self.device.type == "cuda" else GlooExchange
        return kind(self, lane, sends, receives)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], stage: str) -> None:
        """Send and receive all parcels at once and wait for them; as :meth:`prepare`.

        Raises:
            PeerLost: a peer's connection broke.
            RefitTimeout: the exchange did not end in time.
        """
        exchange = self.prepare(sends, receives)
        exchange.start(stage)
        exchange.finish(stage)
        self._wait_for_stream(stage)

    def connect(self, peers: Iterable[int]) -> None:
        """Set up the connections to and from ``peers`` ahead of use; they must do so for this rank as well.

        Those that are set up already take no part.

        NCCL does it in the first exchange of a pair, and there it would block without a limit of time.

        Raises:
            RefitTimeout, PeerLost: some peer did not take part.
        """
        peers = sorted({*peers} - self._connected)
        self._connected.update(peers)
        if self.device.type != "cuda":
            return
        for lane in range(self.lanes):
            out = {peer: torch.empty(16, dtype=torch.uint8, device=self.device) for peer in peers}
            sends = [Parcel(peer, torch.zeros_like(buffer)) for peer, buffer in out.items()]
            exchange = self.prepare(sends, [Parcel(peer, buffer) for peer, buffer in out.items()], lane)

            self._guarded(partial(self._greet, exchange), "connect")

    def close(self, *, failed: bool = False) -> None:
        """Close the connections.

        Args:
            failed: a peer may be gone or stuck: give up what is under way instead of finishing it. Peers
                that still wait then get an error instead of a hang.
        """
        try:
            self._close_backends(failed)
        finally:
            self._backends = []

    def _close_backends(self, failed: bool) -> None:
        if failed:
            self.abort()
        elif self.device.type == "cuda":
            limit = min(self.timeout.total_seconds(), _CLOSE_WITHIN)
            wrong = in_thread([backend.shutdown for backend in self._backends], limit)
            if wrong:
                logger.warning(
                    "rank %d gives up its communicators instead of closing them: %s. Did a peer end early?",
                    self.rank,
                    wrong,
                )
                self.abort()

    @property
    def staging_bytes(self) -> int:
        """Bytes of this rank's device or host memory that the group stages in."""
        return 0

    def _make(self, store: Store) -> Any:
        if self.device.type != "cuda":
            return dist.ProcessGroupGloo(store, self.rank, self.size, self.timeout)
        options = dist.ProcessGroupNCCL.Options()
        # torch's own watchdog ends the whole process; the waits here shall come first.
        options._timeout = 2 * self.timeout + timedelta(seconds=30)
        # The wire is what limits a refit: its kernel must not queue behind the packing of the next bucket.
        options.is_high_priority_stream = True
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _greet(self, exchange: Exchange) -> None:
        with torch.cuda.device(self.device):
            exchange.start("connect")
            torch.cuda.current_stream(self.device).synchronize()


def members(ranks: Iterable[int], rank: int) -> tuple[int, int] | None:
    """(Index in the group, size) of ``rank`` in a group of ``ranks``, or None if it is no member."""
    ordered = sorted(ranks)
    return (ordered.index(rank), len(ordered)) if rank in ordered else None
