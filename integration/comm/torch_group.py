"""Process groups over torch's communicators: NCCL on GPUs, gloo on CPUs. Made here, or those of another group."""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import PeerLost, RefitError, RefitTimeout, closed_on_error
from .group import Event, Exchange, Group, PeerBuffer, classifying
from .waiting import done_within, gpu_is_stuck, guarded, leave_running

logger = logging.getLogger(__name__)

# Seconds that closing a communicator may take at most: NCCL waits for the peers there.
_CLOSE_WITHIN = 30.0
# Seconds that giving up a communicator may itself take; it can be stuck in its set-up.
_ABORT_WITHIN = 10.0
# Seconds that a wait on gloo has at least: it may have ended already when the time is up.
_LEAST_WAIT = 0.01


class TorchGroup(Group):
    """A group with one torch communicator for each lane.

    It belongs to the refit alone: nothing of ``torch.distributed``'s default group is read or changed. See :meth:`open` for a
    group of its own, and :meth:`over` for one that uses the communicators of another group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        lanes: int,
        backends: Sequence[Any] = (),
        *,
        owns: bool = True,
    ):
        """
        Args:
            rank, size, device, timeout_s, watch, lanes: as :class:`Group`.
            backends: the communicators that are open already.
            owns: whether :meth:`close` closes them.
        """
        super().__init__(rank, size, device, timeout_s, watch, lanes)
        self._carrier = "NCCL" if device.type == "cuda" else "gloo"
        self._backends = list(backends)  # torch's stubs leave out the methods of the backend classes
        self._owns = owns
        self._address = ""
        self._connected: set[int] = set()
        self._broadcast_connected = False

    @classmethod
    def open(
        cls,
        store: Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        lanes: int = 1,
        address: str = "",
    ) -> Self:
        """Make a group with communicators of its own; all its ranks do so at the same time.

        Args:
            store: of the epoch.
            name: of the group, unique in the epoch.
            rank, size, timeout_s, watch, lanes: as :class:`Group`.
            device: a CUDA device for NCCL, else gloo.
            address: of this host, at which gloo's ranks reach this one, unless ``GLOO_SOCKET_IFNAME`` names interfaces. Without
                either gloo takes what the host's name resolves to here, and else 127.0.0.1, where no other host reaches it.

        Raises:
            RefitTimeout: some rank did not come in time.
            PeerLost: the ranks can't reach each other, or one has given up.
        """
        group = cls(rank, size, device, timeout_s, watch, lanes)
        group._address = address
        # Also the lanes that are open already: peers would wait for them.
        with closed_on_error(group):
            group._open_lanes(store, name)
        return group

    @classmethod
    def over(cls, group: dist.ProcessGroup | Group, device: torch.device, timeout_s: float) -> Self:
        """Use the communicators of a torch ``ProcessGroup`` or of another group; ranks are counted as it does.

        After a timeout or an abort that group can't use them any more either.

        Args:
            group: one with NCCL for a CUDA ``device``, with gloo for the CPU.
            device: of the tensors that will travel.
            timeout_s: limit of any exchange, in seconds.

        Raises:
            RefitError: the group has no backend for the device, or is closed.
        """
        rank, size = (group.rank, group.size) if isinstance(group, Group) else (group.rank(), group.size())
        backends = _backends_of(group, device)
        if not backends:
            raise RefitError(
                f"the process group can't move tensors on {device}: it is closed, or has no backend for them. Move the "
                "tensors, or give a group made for their device (NCCL for cuda, gloo for cpu)",
                stage="process group",
                rank=rank,
            )
        watch = group.watch if isinstance(group, Group) else _watch_nothing
        return cls(rank, size, device, timeout_s, watch, len(backends), backends, owns=False)

    def prepare(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], lane: int = 0) -> Exchange:
        kind = _NcclExchange if self.device.type == "cuda" else _GlooExchange
        return kind(self, lane, sends, receives)

    def connect(self, peers: Iterable[int]) -> None:
        """As :meth:`Group.connect`. NCCL connects in the first exchange of a pair, and would block there without a limit."""
        peers = sorted({*peers} - self._connected)
        self._connected.update(peers)
        if self.device.type != "cuda":
            return
        for lane in range(self.lanes):
            out = {peer: torch.empty(16, dtype=torch.uint8, device=self.device) for peer in peers}
            sends = [PeerBuffer(peer, torch.zeros_like(buffer)) for peer, buffer in out.items()]
            exchange = self.prepare(sends, [PeerBuffer(peer, buffer) for peer, buffer in out.items()], lane)

            self._guarded(partial(self._run_at_once, partial(exchange.start, "connect")))

    def prepare_broadcast(self, buffer: torch.Tensor, root: int) -> Exchange:
        if self.device.type == "cuda":
            return _NcclBroadcast(self, buffer, root)
        # Not gloo's own broadcast: it can't be given up, and would hold its connections open until its time is up.
        return self.prepare(*self._fan_out(buffer, root))

    def connect_broadcast(self, root: int) -> None:
        """As :meth:`Group.connect_broadcast`. NCCL connects in the first broadcast, and would block there without a limit."""
        if self.device.type == "cuda" and not self._broadcast_connected:
            for lane in range(self.lanes):
                self._guarded(partial(self._run_at_once, partial(self._first_broadcast, lane)))
        self._broadcast_connected = True

    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        with classifying(stage, self.rank, f"from group rank {root}"):
            self.start_broadcast(buffer, root, 0).wait()
        self.wait_for_stream(stage)

    def connect_maximum(self, row: torch.Tensor) -> None:
        """As :meth:`Group.connect_maximum`.

        NCCL connects separately for each of its algorithms, and chooses one by size: so this is a maximum of that size.
        """
        if self.device.type == "cuda":
            self._guarded(partial(self._run_at_once, partial(self._start_maximum, torch.zeros_like(row))))

    def maximum(self, row: torch.Tensor, stage: str) -> None:
        with classifying(stage, self.rank, "of maxima"):
            self._start_maximum(row)
        self.wait_for_stream(stage)

    def wait_for(self, events: Sequence[Event], stage: str) -> None:
        super().wait_for(events, stage)
        self._raise_nccl_errors(stage)

    def check_peers(self, stage: str) -> None:
        self._raise_nccl_errors(stage)
        super().check_peers(stage)

    def abort(self) -> bool:
        if self.device.type != "cuda":
            return True
        if gpu_is_stuck():
            leave_running(f"communicators of group rank {self.rank}", self._backends)
            return False
        wrong = done_within([backend.abort for backend in self._backends], _ABORT_WITHIN)
        if wrong:
            logger.warning("rank %d could not give up its communicators: %s", self.rank, wrong)
        return not wrong

    def close(self, *, failed: bool = False) -> None:
        try:
            if self._owns:
                self._close_backends(failed)
        finally:
            self._backends = []

    def backend(self, lane: int) -> Any:
        """The communicator of a lane.

        Raises:
            RefitError: the group is closed.
        """
        if lane >= len(self._backends):
            raise RefitError("the process group is closed", stage="process group", rank=self.rank)
        return self._backends[lane]

    def _open_lanes(self, store: Store, name: str) -> None:
        try:
            for lane in range(self.lanes):
                # Gloo connects to each rank in turn here, and does not notice ranks that give up meanwhile.
                make = partial(self._make, PrefixStore(f"{name}/{lane}", store))
                self._backends.append(self._guarded(make))
            # NCCL connects all ranks at the first use, and a rank without messages would never come to it.
            self.connect_broadcast(0)
        except RefitError:
            raise
        except RuntimeError as error:
            raise PeerLost(
                f"the refit's process group {name!r} of {self.size} ranks could not be made: {error}. {_how_ranks_meet(self.device)}",
                stage="process group",
                rank=self.rank,
            ) from error

    def _make(self, store: Store) -> Any:
        timeout = timedelta(seconds=self.timeout_s)
        if self.device.type != "cuda":
            if not self._address or os.environ.get("GLOO_SOCKET_IFNAME"):
                return dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
            gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out its options
            choice = gloo._Options()
            choice._devices, choice._timeout = [gloo.create_device(hostname=self._address)], timeout
            return gloo(store, self.rank, self.size, choice)
        options = dist.ProcessGroupNCCL.Options()
        # torch's own watchdog ends the whole process; the waits here shall come first.
        options._timeout = 2 * timeout + timedelta(seconds=30)
        # The wire is what limits a refit: its kernel must not queue behind the packing of the next bucket.
        options.is_high_priority_stream = True
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _close_backends(self, failed: bool) -> None:
        if failed or gpu_is_stuck():
            self.abort()
        elif self.device.type == "cuda":
            limit = min(self.timeout_s, _CLOSE_WITHIN)
            wrong = done_within([backend.shutdown for backend in self._backends], limit)
            if wrong:
                logger.warning(
                    "rank %d gives up its communicators instead of closing them: %s. Did a peer end early?",
                    self.rank,
                    wrong,
                )
                self.abort()

    def start_broadcast(self, buffer: torch.Tensor, root: int, lane: int) -> Any:
        """Begin a broadcast behind what the current stream has been given; returns the backend's handle.

        Raises:
            RefitError: the group is closed.
            RuntimeError: of the backend.
        """
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=self.timeout_s)
        return self.backend(lane).broadcast([buffer], options)

    def _start_maximum(self, row: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        options.timeout = timedelta(seconds=self.timeout_s)
        self.backend(0).allreduce([row], options).wait()

    def _first_broadcast(self, lane: int) -> None:
        self.start_broadcast(torch.zeros(1, dtype=torch.float32, device=self.device), 0, lane).wait()

    def _run_at_once(self, start: Callable[[], None]) -> None:
        """Enqueue something and wait for it; may block without a limit."""
        with torch.cuda.device(self.device):
            start()
            torch.cuda.current_stream(self.device).synchronize()

    def _guarded[T](self, call: Callable[[], T]) -> T:
        """Run a call that can block without a limit in a thread, and wait for it as for an exchange."""
        return guarded(
            call,
            self.timeout_s,
            "connect",
            self.check_peers,
            self._unconnected,
            self._raise_nccl_errors,
        )

    def _unconnected(self) -> RefitTimeout:
        # Or NCCL's kernel would spin on, and the next synchronisation of the device would never return.
        self.abort()
        return RefitTimeout(
            f"{self._carrier} did not connect the ranks within {self.timeout_s:.0f} s; a peer is late, stuck or gone, or hosts do not "
            f"reach each other. {_how_ranks_meet(self.device)}",
            stage="connect",
            rank=self.rank,
        )

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


class _TorchExchange(Exchange):
    """An exchange whose backend's errors become refit errors."""

    def __init__(
        self, group: TorchGroup, lane: int, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]
    ):
        super().__init__(lane, sends, receives)
        self._group = group

    def start(self, stage: str) -> None:
        if self.peers:
            with classifying(stage, self._group.rank, f"with refit ranks {self.peers}"):
                self._start()

    @abstractmethod
    def _start(self) -> None:
        """Begin it, or enqueue it."""


class _GlooExchange(_TorchExchange):
    """A thread of gloo's carries it out, from its start on.

    Looks its backend up at each use: whoever keeps the exchange, as a traceback does, must not keep gloo's
    connections open, for only their end tells the peers that this rank has given up. What is running keeps them too,
    so an exchange that fails is dropped.
    """

    def __init__(
        self, group: TorchGroup, lane: int, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]
    ):
        super().__init__(group, lane, sends, receives)
        self._works: list[Any] = []

    def finish(self, stage: str) -> None:
        if self.peers:
            with classifying(stage, self._group.rank, f"with refit ranks {self.peers}"):
                self._finish()

    def drop(self) -> None:
        self._works.clear()

    def _start(self) -> None:
        try:
            for one in self._receives:
                self._works.append(self._group.backend(self._lane).recv([one.buffer], one.peer, 0))
            for one in self._sends:
                self._works.append(self._group.backend(self._lane).send([one.buffer], one.peer, 0))
        except BaseException:
            self.drop()
            raise

    def _finish(self) -> None:
        deadline = time.monotonic() + self._group.timeout_s
        try:
            for index in range(len(self._works)):
                # A timeout of 0 would mean none at all.
                self._works[index].wait(timedelta(seconds=max(deadline - time.monotonic(), _LEAST_WAIT)))
        finally:
            self.drop()


class _NcclExchange(_TorchExchange):
    """One NCCL group: separate calls could wait on each other in different orders.

    Not torch's all-to-all of lists, which would be fewer calls: it exchanges empty messages with all ranks, and
    so hangs where a rank has nothing to exchange and does not take part.
    """

    def __init__(
        self, group: TorchGroup, lane: int, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]
    ):
        super().__init__(group, lane, sends, receives)
        backend = self._backend = group.backend(lane)
        self._calls = [(backend.send, [one.buffer], one.peer) for one in sends]
        self._calls += [(backend.recv, [one.buffer], one.peer) for one in receives]

    def _start(self) -> None:
        self._backend._start_coalescing()
        for call, buffers, peer in self._calls:
            call(buffers, peer, 0)
        self._backend._end_coalescing().wait()


class _NcclBroadcast(Exchange):
    """NCCL's broadcast. The stream that starts it waits for it in :meth:`finish` only: until then it can be given other work."""

    def __init__(self, group: TorchGroup, buffer: torch.Tensor, root: int):
        """
        Args:
            group: with NCCL.
            buffer: contiguous.
            root: the group's rank that sends.
        """
        own = PeerBuffer(root, buffer)
        super().__init__(0, *(([own], []) if group.rank == root else ([], [own])))
        self._group, self._buffer, self._root = group, buffer, root
        self._work: Any = None

    def start(self, stage: str) -> None:
        with classifying(stage, self._group.rank, f"from group rank {self._root}"):
            self._work = self._group.start_broadcast(self._buffer, self._root, self._lane)

    def finish(self, stage: str) -> None:
        work, self._work = self._work, None
        with classifying(stage, self._group.rank, f"from group rank {self._root}"):
            work.wait()

    def drop(self) -> None:
        self._work = None


def _watch_nothing(stage: str) -> None:
    """For a group whose ranks have no other channel on which to say that they give up."""


def _how_ranks_meet(device: torch.device) -> str:
    """What to look at where ranks can't reach each other."""
    library = "NCCL" if device.type == "cuda" else "GLOO"
    return (
        f"Where hosts have several networks, set {library}_SOCKET_IFNAME on all of them to the interfaces by which they reach each "
        "other, before their ranks start"
    )


def _backends_of(group: dist.ProcessGroup | Group, device: torch.device) -> list[Any]:
    """The group's backends that serve tensors on ``device``; none if it has none."""
    if isinstance(group, TorchGroup):
        same = group.device.type == device.type and group.device.index in (None, device.index)
        return list(group._backends) if same else []
    if isinstance(group, Group) or device.type not in {known.type for known in group._device_types}:
        return []
    backend = group._get_backend(torch.device(device.type))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    wanted = "ProcessGroupNCCL" if device.type == "cuda" else "ProcessGroupGloo"
    return [backend] if isinstance(backend, getattr(dist, wanted, ())) else []
