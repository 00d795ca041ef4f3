"""Process groups of the refit's own: made from its store, apart from the trainer's default group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from .errors import PeerLost, RefitError, RefitTimeout

# Seconds between looks at a GPU's progress, and between looks at the other ranks meanwhile.
_PAUSE = 2e-5
_WATCH_EVERY = 0.5


@dataclass(frozen=True)
class Parcel:
    """A contiguous buffer for, or from, one peer."""

    peer: int
    buffer: torch.Tensor


class Group:
    """Point-to-point messages and broadcasts among ``size`` ranks, NCCL on GPUs and gloo on CPUs.

    Ranks are counted inside the group. The group belongs to the refit alone: nothing of
    ``torch.distributed``'s default group is read or changed.
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
        """
        self._watch = watch
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        prefixed = PrefixStore(name, store)
        self._backend: Any  # torch's stubs leave out the methods of the backend classes
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                # torch's own watchdog ends the whole process; the waits here shall come first.
                options._timeout = 2 * self.timeout + timedelta(seconds=30)
                self._backend = dist.ProcessGroupNCCL(prefixed, rank, size, options)
                # NCCL connects all ranks at the first use, and a rank without messages would never come to it.
                self.broadcast(torch.zeros(1, device=device), 0, "connect")
            else:
                self._backend = dist.ProcessGroupGloo(prefixed, rank, size, self.timeout)
        except RefitError:
            raise
        except RuntimeError as error:
            raise RefitError(
                f"the refit's process group {name!r} of {size} ranks could not be made: {error}. Can all ranks reach "
                "each other, and does the host name resolve to an address that the other hosts see?",
                stage="process group",
                rank=rank,
            ) from error

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], stage: str) -> None:
        """Send and receive all parcels at once and wait for them.

        Both sides must call it with parcels that match pairwise, in the same order for each pair.

        Raises:
            PeerLost: a peer's connection broke.
            RefitTimeout: the exchange did not end in time.
        """
        if not sends and not receives:
            return
        try:
            if self.device.type == "cuda":
                # One NCCL group: separate calls could wait on each other in different orders.
                self._backend._start_coalescing()
                for parcel in sends:
                    self._backend.send([parcel.buffer], parcel.peer, 0)
                for parcel in receives:
                    self._backend.recv([parcel.buffer], parcel.peer, 0)
                works = [self._backend._end_coalescing()]
            else:
                works = [self._backend.recv([p.buffer], p.peer, 0) for p in receives]
                works += [self._backend.send([p.buffer], p.peer, 0) for p in sends]
            for work in works:
                self._wait(work, stage)
        except RefitError:
            raise
        except RuntimeError as error:
            peers = sorted({p.peer for p in (*sends, *receives)})
            raise _classified(error, stage, self.rank, f"with refit ranks {peers}") from error

    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        """Broadcast a contiguous buffer from the group's rank ``root``; errors as in :meth:`exchange`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = self.timeout
        try:
            self._wait(self._backend.broadcast([buffer], options), stage)
        except RefitError:
            raise
        except RuntimeError as error:
            raise _classified(error, stage, self.rank, f"from group rank {root}") from error

    def _wait(self, work: Any, stage: str) -> None:
        if self.device.type == "cuda":
            # Polled, and not left to NCCL's wait: meanwhile another rank's abort can be seen.
            start = time.monotonic()
            next_watch = start + _WATCH_EVERY
            while not work.is_completed():
                now = time.monotonic()
                if now - start > self.timeout.total_seconds():
                    # Or the kernel would spin on, and the next synchronisation of the device never return.
                    self._backend.abort()
                    raise RefitTimeout(
                        f"NCCL did not finish within {self.timeout.total_seconds():.0f} s; a peer is late, stuck "
                        "or gone",
                        stage=stage,
                        rank=self.rank,
                    )
                if now >= next_watch:
                    self._look_at_peers(stage)
                    next_watch = now + _WATCH_EVERY
                time.sleep(_PAUSE)
        work.wait(self.timeout)

    def _look_at_peers(self, stage: str) -> None:
        try:
            self._watch(stage)
        except RefitError:
            self._backend.abort()
            raise

    def close(self, *, failed: bool = False) -> None:
        """Close the connections.

        Args:
            failed: a peer may be gone or stuck: give up what is under way instead of finishing it. Peers
                that still wait then get an error instead of a hang.
        """
        if self.device.type == "cuda":
            if failed:
                self._backend.abort()
            else:
                self._backend.shutdown()
        del self._backend


def members(ranks: Iterable[int], rank: int) -> tuple[int, int] | None:
    """(Index in the group, size) of ``rank`` in a group of ``ranks``, or None if it is no member."""
    ordered = sorted(ranks)
    return (ordered.index(rank), len(ordered)) if rank in ordered else None


def _classified(error: RuntimeError, stage: str, rank: int, what: str) -> RefitError:
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return RefitTimeout(f"the exchange {what} did not end in time: {text}", stage=stage, rank=rank)
    return PeerLost(f"the exchange {what} broke: {text}", stage=stage, rank=rank)
