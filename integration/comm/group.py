"""What a process group of the refit offers, whatever carries its bytes.

There are two kinds: :class:`~.torch_group.TorchGroup`, over NCCL or gloo, and :class:`~.shared_memory.SharedGroup`, over memory
that ranks of one host share. :mod:`.opening` chooses and opens one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import PeerLost, RefitError, RefitTimeout
from .waiting import wait_until


@dataclass(frozen=True)
class PeerBuffer:
    """A contiguous buffer that is sent to, or received from, one peer."""

    peer: int
    buffer: torch.Tensor


class Event(Protocol):
    """What :meth:`Group.wait_for` waits for, such as a CUDA event."""

    def query(self) -> bool:
        """Whether it has happened."""


class Exchange(ABC):
    """Buffers that are sent and received together, any number of times; made by :meth:`Group.prepare`.

    Attributes:
        peers: the ranks of the group with which buffers are exchanged.
    """

    def __init__(self, lane: int, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]):
        self._lane = lane
        self._sends = list(sends)
        self._receives = list(receives)
        self.peers = sorted({b.peer for b in (*sends, *receives)})

    @abstractmethod
    def start(self, stage: str) -> None:
        """On a GPU, enqueue the exchange on the current stream; on a CPU, begin it or run it.

        Raises:
            PeerLost, RefitTimeout: as :meth:`Group.exchange`.
        """

    def finish(self, stage: str) -> None:  # noqa: B027 - most have nothing left to wait for
        """Wait for what :meth:`start` left running: on a CPU the caller waits, on a GPU the current stream. The time limit
        counts from this call.

        Raises:
            PeerLost, RefitTimeout: as :meth:`Group.exchange`.
        """

    def drop(self) -> None:  # noqa: B027 - only gloo's exchanges hold anything
        """After a failure, let go of what is still running."""


class Group(ABC):
    """Messages, broadcasts and maxima among ``size`` ranks, counted from 0 inside the group.

    On GPUs an exchange is only enqueued by :meth:`Exchange.start`. :meth:`wait_for` then waits on the host, within the timeout
    and with a look at the other ranks. On CPUs :meth:`Exchange.finish` waits.

    Attributes:
        rank: of this process in the group.
        size: of the group.
        device: of the tensors that travel.
        lanes: exchanges that can run at the same time; each lane keeps its own order.
        timeout_s: limit of any exchange, in seconds.
        watch: called with the stage twice a second during a wait; raises if another rank has given up.
    """

    # What a GPU waits for; used in errors.
    _carrier: str

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        lanes: int,
    ):
        """
        Args:
            rank, size, device, timeout_s, watch, lanes: the attributes.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout_s = float(timeout_s)
        self.lanes = lanes
        self.watch = watch

    @abstractmethod
    def prepare(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], lane: int = 0) -> Exchange:
        """Buffers that will be exchanged at once, any number of times.

        The buffers of both sides must match pairwise, in the same order for each pair. On a GPU, the buffers of one call
        travel together, so a call should hold all that is ready.
        """

    @abstractmethod
    def connect(self, peers: Iterable[int]) -> None:
        """Connect to ``peers`` ahead of use; they must call this for this rank too. Peers that are connected are left out.

        Raises:
            RefitTimeout, PeerLost: some peer did not take part.
            RefitError: the group is closed.
        """

    @abstractmethod
    def prepare_broadcast(self, buffer: torch.Tensor, root: int) -> Exchange:
        """A broadcast of a contiguous buffer from the group's rank ``root``; all ranks start their broadcasts in the same order."""

    @abstractmethod
    def connect_broadcast(self, root: int) -> None:
        """Connect ahead of use what broadcasts from ``root`` need; all ranks at the same time.

        Raises:
            RefitTimeout, PeerLost: some rank did not take part.
        """

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        """Broadcast a contiguous buffer from the group's rank ``root`` and wait; raises as :meth:`exchange`."""

    @abstractmethod
    def connect_maximum(self, row: torch.Tensor) -> None:
        """Connect ahead of use what :meth:`maximum` of such a row needs; as :meth:`connect_broadcast`."""

    @abstractmethod
    def maximum(self, row: torch.Tensor, stage: str) -> None:
        """Set each element of a contiguous row to its maximum over all ranks, and wait; raises as :meth:`exchange`."""

    @abstractmethod
    def abort(self) -> bool:
        """Give up everything that is running, without waiting for peers.

        Returns:
            Whether it has ended. If not, the device may still write to the buffers being received.
        """

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """Close the connections; safe to call twice.

        Args:
            failed: a peer may be gone or stuck: give up what is running instead of finishing it. Peers that still wait then
                get an error instead of a hang.
        """

    @property
    def staging_bytes(self) -> int:
        """Bytes of this rank's device or host memory that the group stages in."""
        return 0

    def exchange(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], stage: str) -> None:
        """Send and receive all buffers at once and wait for them; as :meth:`prepare`.

        Raises:
            PeerLost: a peer's connection broke, or another rank gave up.
            RefitTimeout: the exchange did not end in time.
        """
        exchange = self.prepare(sends, receives)
        exchange.start(stage)
        self.finish(exchange, stage)

    def finish(self, exchange: Exchange, stage: str) -> None:
        """Wait on the host until an exchange has ended that was started on the current stream; raises as :meth:`exchange`."""
        exchange.finish(stage)
        self.wait_for_stream(stage)

    def wait_for(self, events: Sequence[Event], stage: str) -> None:
        """Wait on the host until all events have happened, which follow exchanges of this group.

        Raises:
            PeerLost: a connection broke, or another rank gave up.
            RefitTimeout: they did not happen in time. The group is aborted then.
        """
        pending = list(reversed(events))

        def happened() -> bool:
            while pending and pending[-1].query():
                pending.pop()
            return not pending

        self._wait_until(happened, stage)

    def check_peers(self, stage: str) -> None:
        """Abort the group and raise if another rank has given up."""
        try:
            self.watch(stage)
        except RefitError:
            self.abort()
            raise

    def _others(self, root: int) -> list[int]:
        return [rank for rank in range(self.size) if rank != root]

    def _fan_out(self, buffer: torch.Tensor, root: int) -> tuple[list[PeerBuffer], list[PeerBuffer]]:
        """What this rank sends and receives in a broadcast that ``root`` sends to each rank by itself."""
        if self.rank == root:
            return [PeerBuffer(rank, buffer) for rank in self._others(root)], []
        return [], [PeerBuffer(root, buffer)]

    def wait_for_stream(self, stage: str) -> None:
        """Wait on the host for what was enqueued on the current stream; raises as :meth:`wait_for`."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.wait_for([event], stage)

    def _wait_until(self, done: Callable[[], bool], stage: str) -> None:
        def late() -> RefitTimeout:
            # Or the kernel would spin on, and the next synchronisation of the device would never return.
            self.abort()
            what = (
                f"{self._carrier} did not finish within {self.timeout_s:.0f} s; a peer is late, stuck or gone"
            )
            return RefitTimeout(what, stage=stage, rank=self.rank)

        wait_until(done, self.timeout_s, stage, self.check_peers, late)


def members(ranks: Iterable[int], rank: int) -> tuple[int, int] | None:
    """(Index in the group, size) of ``rank`` in a group of ``ranks``, or None if it is no member."""
    ordered = sorted(ranks)
    return (ordered.index(rank), len(ordered)) if rank in ordered else None


def classified(error: RuntimeError, stage: str, rank: int, what: str) -> RefitError:
    """A backend's error as a refit error; ``what`` says which exchange failed."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return RefitTimeout(f"the exchange {what} did not end in time: {text}", stage=stage, rank=rank)
    return PeerLost(f"the exchange {what} broke: {text}", stage=stage, rank=rank)


@contextmanager
def classifying(stage: str, rank: int, what: str) -> Iterator[None]:
    """Raise a backend's errors inside as :func:`classified`."""
    try:
        yield
    except RefitError:
        raise
    except RuntimeError as error:
        raise classified(error, stage, rank, what) from error
