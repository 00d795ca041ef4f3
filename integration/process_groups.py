"""Process groups of the refit's own: made from its store, apart from the trainer's default group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from .errors import PeerLost, RefitError, RefitTimeout
from .exchanges import Exchange, GlooExchange, NcclExchange, Parcel, classified

logger = logging.getLogger(__name__)

# Seconds between looks at a GPU's progress, and between looks at the other ranks meanwhile.
_PAUSE = 2e-5
_WATCH_EVERY = 0.5
# Seconds that giving up a communicator may itself take; it can be stuck in its set-up.
_ABORT_WITHIN = 10.0
# Seconds that closing a communicator may take at most: NCCL waits for the peers there.
_CLOSE_WITHIN = 30.0


class Event(Protocol):
    """What :meth:`Group.wait_for` waits for: a CUDA event, say."""

    def query(self) -> bool:
        """Whether it has happened."""


class Group:
    """Point-to-point messages and broadcasts among ``size`` ranks, NCCL on GPUs and gloo on CPUs.

    Ranks are counted inside the group. The group belongs to the refit alone: nothing of
    ``torch.distributed``'s default group is read or changed.

    On GPUs, an exchange is only enqueued by :meth:`Exchange.start`; :meth:`wait_for` then waits on the
    host, within the timeout and with a look at the other ranks. On CPUs every exchange waits.

    Attributes:
        wire: what a GPU waits for, in errors.
    """

    wire = "NCCL"

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
            RefitError: the ranks can't reach each other.
        """
        self._configure(rank, size, device, timeout_s, watch, lanes)
        try:
            self._open_lanes(store, name)
        except BaseException:
            # The lanes that are open already: peers would wait for them.
            self.close(failed=True)
            raise

    def _open_lanes(self, store: Store, name: str) -> None:
        try:
            for lane in range(self.lanes):
                self._backends.append(self._make(PrefixStore(f"{name}/{lane}", store)))
                # NCCL connects all ranks at the first use, and a rank without messages would never come to it.
                self._guarded(partial(self._hello, lane), "connect")
        except RefitError:
            raise
        except RuntimeError as error:
            raise RefitError(
                f"the refit's process group {name!r} of {self.size} ranks could not be made: {error}. Can all ranks "
                "reach each other, and does the host name resolve to an address that the other hosts see?",
                stage="process group",
                rank=self.rank,
            ) from error

    def _configure(
        self,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        lanes: int,
    ) -> None:
        self._watch = watch
        self.rank = rank
        self.size = size
        self.device = device
        self.lanes = lanes
        self.timeout = timedelta(seconds=timeout_s)
        self._connected: set[int] = set()
        self._backends: list[Any] = []  # torch's stubs leave out the methods of the backend classes

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

    def backend(self, lane: int) -> Any:
        """The communicator of a lane.

        Raises:
            RefitError: the group is closed.
        """
        if lane >= len(self._backends):
            raise RefitError("the process group is closed", stage="process group", rank=self.rank)
        return self._backends[lane]

    def prepare_broadcast(self, root: int) -> None:
        """Set up ahead of use what broadcasts from ``root`` need; all ranks at the same time.

        NCCL and gloo have set up all when the group was made.

        Raises:
            RefitTimeout, PeerLost: some rank did not take part.
        """

    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        """Broadcast a contiguous buffer from the group's rank ``root`` and wait; errors as in :meth:`exchange`."""
        with self._classifying(stage, f"from group rank {root}"):
            self._start_broadcast(buffer, root, 0)
        self._wait_for_stream(stage)

    def prepare_maximum(self) -> None:
        """Set up ahead of use what :meth:`maximum` needs; as :meth:`prepare_broadcast`."""

    def maximum(self, row: torch.Tensor, stage: str) -> None:
        """Set a contiguous row of numbers to the largest that any rank has in each place, and wait; as :meth:`broadcast`."""
        with self._classifying(stage, "of maxima"):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            options.timeout = self.timeout
            self.backend(0).allreduce([row], options).wait()
        self._wait_for_stream(stage)

    def wait_for(self, events: Sequence[Event], stage: str) -> None:
        """Wait on the host until all events have happened, which come after exchanges of this group.

        Raises:
            PeerLost: a connection broke, or another rank gave up.
            RefitTimeout: they did not happen in time. The communicators are given up then.
        """
        start = time.monotonic()
        next_watch = start + _WATCH_EVERY
        for event in events:
            # Polled, and not left to CUDA's wait: meanwhile another rank's abort can be seen.
            while not event.query():
                now = time.monotonic()
                if now - start > self.timeout.total_seconds():
                    # Or the kernel would spin on, and the next synchronisation of the device never return.
                    self.abort()
                    raise RefitTimeout(
                        f"{self.wire} did not finish within {self.timeout.total_seconds():.0f} s; a peer is late, "
                        "stuck or gone",
                        stage=stage,
                        rank=self.rank,
                    )
                if now >= next_watch:
                    self._look_around(stage)
                    next_watch = now + _WATCH_EVERY
                time.sleep(_PAUSE)
        self._raise_nccl_errors(stage)

    def abort(self) -> bool:
        """Give up all that is under way, without waiting for peers.

        Returns:
            Whether it has ended. If not, the device may still write to what was being received.
        """
        if self.device.type != "cuda":
            return True
        wrong = _in_thread([backend.abort for backend in self._backends], _ABORT_WITHIN)
        if wrong:
            logger.warning("rank %d could not give up its communicators: %s", self.rank, wrong)
        return not wrong

    def close(self, *, failed: bool = False) -> None:
        """Close the connections.

        Args:
            failed: a peer may be gone or stuck: give up what is under way instead of finishing it. Peers
                that still wait then get an error instead of a hang.
        """
        if failed:
            self.abort()
        elif self.device.type == "cuda":
            limit = min(self.timeout.total_seconds(), _CLOSE_WITHIN)
            wrong = _in_thread([backend.shutdown for backend in self._backends], limit)
            if wrong:
                logger.warning(
                    "rank %d gives up its communicators instead of closing them: %s. Did a peer end early?",
                    self.rank,
                    wrong,
                )
                self.abort()
        self._backends = []

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

    def _hello(self, lane: int) -> None:
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self._start_broadcast(torch.zeros(1, device=self.device), 0, lane)
                torch.cuda.current_stream(self.device).synchronize()

    def _greet(self, exchange: Exchange) -> None:
        with torch.cuda.device(self.device):
            exchange.start("connect")
            torch.cuda.current_stream(self.device).synchronize()

    def _start_broadcast(self, buffer: torch.Tensor, root: int, lane: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = self.timeout
        self._backends[lane].broadcast([buffer], options).wait()

    def _wait_for_stream(self, stage: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.wait_for([event], stage)

    def _guarded(self, call: Callable[[], None], stage: str) -> None:
        """Run a call that can block without limit in a thread, and wait for it as for an exchange."""
        if self.device.type != "cuda":
            call()
            return
        failures: list[Exception] = []

        def run() -> None:
            try:
                call()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.wait_for([_Ended(thread)], stage)
        for failure in failures:
            raise failure

    def _look_around(self, stage: str) -> None:
        self._raise_nccl_errors(stage)
        try:
            self._watch(stage)
        except RefitError:
            self.abort()
            raise

    def _raise_nccl_errors(self, stage: str) -> None:
        """Raise what torch's watchdog has found wrong with a communicator."""
        if self.device.type != "cuda":
            return
        for backend in self._backends:
            state = backend.get_error()
            if state != torch._C._distributed_c10d.ErrorType.SUCCESS:
                self.abort()
                raise PeerLost(
                    f"NCCL reports {state.name.lower().replace('_', ' ')} on the refit's communicator; a peer's process "
                    "ended or its network broke. NCCL_DEBUG=WARN says more",
                    stage=stage,
                    rank=self.rank,
                )

    @contextmanager
    def _classifying(self, stage: str, what: str) -> Iterator[None]:
        try:
            yield
        except RefitError:
            raise
        except RuntimeError as error:
            raise classified(error, stage, self.rank, what) from error


class BorrowedGroup(Group):
    """Communicators that somebody else made and closes: a torch ``ProcessGroup``'s, or another group's.

    After a timeout or an abort they are given up, and their owner can't use them any more either.
    """

    def __init__(
        self,
        lender: dist.ProcessGroup | Group,
        device: torch.device,
        timeout_s: float,
    ):
        """Use the lender's communicators; ranks are counted as it does.

        Args:
            lender: one with NCCL for a CUDA ``device``, with gloo for the CPU.
            device: of what will travel.
            timeout_s: limit of any exchange, in seconds.

        Raises:
            RefitError: the lender has no backend for the device, or is closed.
        """
        rank, size = (
            (lender.rank, lender.size) if isinstance(lender, Group) else (lender.rank(), lender.size())
        )
        backends = _lent(lender, device)
        if not backends:
            raise RefitError(
                f"the process group can't move tensors on {device}: it is closed, or has no backend for them. Move the "
                "tensors, or give a group made for their device (NCCL for cuda, gloo for cpu)",
                stage="process group",
                rank=rank,
            )
        watch = lender._watch if isinstance(lender, Group) else _watch_nothing
        self._configure(rank, size, device, timeout_s, watch, len(backends))
        self._backends = backends

    def close(self, *, failed: bool = False) -> None:
        """Return the communicators; they stay open."""
        self._backends = []


class _Ended:
    """The end of a thread as an event."""

    def __init__(self, thread: threading.Thread):
        self._thread = thread

    def query(self) -> bool:
        return not self._thread.is_alive()


def _in_thread(calls: Sequence[Callable[[], object]], limit_s: float) -> str:
    """Make calls that can block without limit, in a thread of their own; returns what went wrong, or nothing."""
    wrong: list[str] = []

    def run() -> None:
        for call in calls:
            try:
                call()
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return f"not done after {limit_s:.0f} s" if thread.is_alive() else "; ".join(wrong)


def _watch_nothing(stage: str) -> None:
    """For a group whose ranks have no other channel to say that they give up."""


def _lent(lender: dist.ProcessGroup | Group, device: torch.device) -> list[Any]:
    """The lender's backends that serve tensors on ``device``; none if it has none."""
    if isinstance(lender, Group):
        same = lender.device.type == device.type and lender.device.index in (None, device.index)
        return list(lender._backends) if same else []
    if device.type not in {known.type for known in lender._device_types}:
        return []
    backend = lender._get_backend(torch.device(device.type))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    wanted = "ProcessGroupNCCL" if device.type == "cuda" else "ProcessGroupGloo"
    return [backend] if isinstance(backend, getattr(dist, wanted, ())) else []


def members(ranks: Iterable[int], rank: int) -> tuple[int, int] | None:
    """(Index in the group, size) of ``rank`` in a group of ``ranks``, or None if it is no member."""
    ordered = sorted(ranks)
    return (ordered.index(rank), len(ordered)) if rank in ordered else None
