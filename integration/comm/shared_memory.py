"""Memory that two ranks of a host share, how they come to share it, and what groups over it have in common."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import Store

from ..control.decoding import decode
from ..control.sockets import unshared
from ..errors import PeerLost, RefitError, RefitMismatch, RefitTimeout, end_all
from ..gpu_memory.descriptors import DescriptorServer, fetch
from .group import Exchange, Group, PeerBuffer
from .waiting import wait_until

logger = logging.getLogger(__name__)

# Buckets of a direction: one is filled while the other is emptied.
BUCKETS = 2
_ALIGNED = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# cudaHostRegisterPortable and cudaHostRegisterMapped.
_PORTABLE_AND_MAPPED = 3
_STAGE = "process group"
# Sent by the higher rank once it has mapped the memory.
_HERE = b"h"


class SharedMemory:
    """A mapping of host memory that two processes map. Pages take room once they are written.

    The memory is anonymous (``memfd``) and ends with its last mapping. A file in /dev/shm would stay behind after a kill, and
    containers often keep /dev/shm at 64 MiB.

    Attributes:
        memory: uint8 ``[nbytes]``, zeros at first.
    """

    def __init__(self, descriptor: int, nbytes: int):
        """Map it.

        Args:
            descriptor: of the memory; stays the caller's.
            nbytes: of the memory.

        Raises:
            ValueError: the memory has another size, or its maker could take it away again.
        """
        found = os.fstat(descriptor).st_size
        if found != nbytes:
            raise ValueError(f"shared memory of {found} bytes instead of {nbytes}")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("shared memory whose size can still change")
        # Through its path, since mmap of the standard library keeps a descriptor as long as the mapping lives.
        self.memory = torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8
        )
        self._pinned = False

    @staticmethod
    def make(nbytes: int) -> tuple[SharedMemory, int]:
        """New memory, mapped, and a descriptor of it that the caller hands on or closes."""
        descriptor = os.memfd_create("rlrefit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            # Or a peer could cut it off, and the next access would end this process.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return SharedMemory(descriptor, nbytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def pin(self) -> bool:
        """Let GPUs reach it; whether they can."""
        status = torch.cuda.cudart().cudaHostRegister(
            self.memory.data_ptr(), self.memory.nbytes, _PORTABLE_AND_MAPPED
        )
        self._pinned = int(status) == 0
        return self._pinned

    def close(self) -> None:
        """Take it back from the GPUs; the mapping ends with the last tensor of it. Safe to call twice."""
        if self._pinned:
            self._pinned = False
            status = torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            if int(status) != 0:
                logger.warning("shared memory stays registered with the GPU: CUDA error %d", int(status))
        self.memory = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class _OtherHalf:
    """Where a peer fetches its half of a :class:`Pair`."""

    address: str
    token: str


class Pair:
    """Memory that this rank shares with a peer, and a connection for each lane.

    A connection ends when either process does, however it ends. The other process notices it so.

    Attributes:
        peer: the other rank of the group.
        shared: the memory.
        connections: one for each lane, non-blocking.
    """

    def __init__(self, peer: int, shared: SharedMemory, connections: Sequence[socket.socket]):
        self.peer = peer
        self.shared = shared
        self.connections = list(connections)
        self._server: DescriptorServer | None = None
        # What the peer fetches: a descriptor of the memory, and its ends of the connections.
        self._memory = -1
        self._theirs: list[socket.socket] = []

    @staticmethod
    def make(peer: int, nbytes: int, lanes: int, timeout_s: float) -> tuple[Pair, _OtherHalf]:
        """The lower rank's half, and what the peer needs to fetch the other half."""
        shared, descriptor = SharedMemory.make(nbytes)
        pair = Pair(peer, shared, [])
        try:
            pair._memory = descriptor
            for _ in range(lanes):
                ours, theirs = map(unshared, socket.socketpair())
                ours.setblocking(False)
                pair.connections.append(ours)
                pair._theirs.append(theirs)
            server = pair._server = DescriptorServer(pair._hand_over, 1 + lanes, 1, timeout_s)
        except BaseException as error:
            end_all([pair.close], error)
            raise
        return pair, _OtherHalf(server.address, server.token)

    @staticmethod
    def fetch(peer: int, told: _OtherHalf, nbytes: int, lanes: int, timeout_s: float) -> Pair:
        """The higher rank's half.

        Raises:
            OSError: it can't be reached.
            ValueError: it has made other memory.
        """
        found: list[int] = []
        try:
            with closing(fetch(told.address, told.token, [(0, 1 + lanes)], timeout_s)) as following:
                found.extend(following)
            pair = Pair(peer, SharedMemory(found[0], nbytes), [])
            while len(found) > 1:
                pair.connections.append(unshared(socket.socket(fileno=found.pop(1))))
                pair.connections[-1].setblocking(False)
            return pair
        finally:
            for descriptor in found:
                os.close(descriptor)

    def close(self) -> None:
        """End the connections and let go of the memory; safe to call twice."""
        server, memory, ends = self._server, self._memory, [*self._theirs, *self.connections]
        self._server, self._memory, self._theirs, self.connections = None, -1, [], []
        steps: list[Callable[[], object]] = [] if server is None else [server.close]
        if memory >= 0:
            steps.append(partial(os.close, memory))
        end_all([*steps, *(end.close for end in ends), self.shared.close])

    def _hand_over(self, index: int) -> int:
        if index:
            descriptor = self._theirs[index - 1].detach()
        else:
            descriptor, self._memory = self._memory, -1
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
            tell(store, f"{name}/{rank}+{peer}", asdict(told))
        for peer in (peer for peer in peers if peer < rank):
            told = hear(_OtherHalf, store, f"{name}/{peer}+{rank}", peer, rank, timeout_s)
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


def hear[T](kind: type[T], store: Store, key: str, peer: int, rank: int, timeout_s: float) -> T:
    """What ``peer`` told, as a dataclass; waits for it.

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
        return decode(kind, json.loads(raw))
    except ValueError as error:
        raise RefitMismatch(
            f"what group rank {peer} tells of its memory is malformed: {error}. Do all ranks run the same rlrefit?",
            stage=_STAGE,
            rank=rank,
        ) from error


def _fetched(peer: int, told: _OtherHalf, rank: int, nbytes: int, lanes: int, timeout_s: float) -> Pair:
    try:
        return Pair.fetch(peer, told, nbytes, lanes, timeout_s)
    except (OSError, ValueError) as error:
        # Most often since it has ended meanwhile.
        raise PeerLost(
            f"the memory that group rank {peer} shares can't be opened ({type(error).__name__}: {error}); nothing was "
            "written. Has it ended? Processes that share a GPU or run colocated_ipc must share the host, its network namespace and "
            "the user, and run the same rlrefit",
            stage=_STAGE,
            rank=rank,
        ) from error


class SharedGroup(Group):
    """A group over memory that ranks of one host share, pair by pair.

    A broadcast is an exchange between its root and each other rank; a maximum is an exchange among all ranks.

    Attributes:
        most_bucket_bytes: size of a bucket, if none is given.
    """

    most_bucket_bytes: int

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
        bucket_bytes: int | None = None,
    ):
        """Waits for no peer yet.

        Args:
            store: of the epoch.
            name: of the group, unique in the epoch.
            rank, size, timeout_s, watch, lanes: as :class:`Group`.
            device: of the tensors that travel; a CUDA device where buckets are in GPU memory.
            bucket_bytes: the same on all ranks; each pair has two for each direction and lane.
        """
        super().__init__(rank, size, device, timeout_s, watch, lanes)
        self._store, self._name = store, name
        nbytes = self.most_bucket_bytes if bucket_bytes is None else bucket_bytes
        # Whole pages, and one at least: a few bytes shared out among many peers come to none.
        self._bucket_bytes = max(1, -(-nbytes // _ALIGNED)) * _ALIGNED
        self._pairs: dict[int, Pair] = {}
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Note that nobody is connected yet."""

    def prepare_broadcast(self, buffer: torch.Tensor, root: int) -> Exchange:
        return self.prepare(*self._fan_out(buffer, root))

    def connect_broadcast(self, root: int) -> None:
        self.connect(self._others(root) if self.rank == root else [root])

    def broadcast(self, buffer: torch.Tensor, root: int, stage: str) -> None:
        exchange = self.prepare_broadcast(buffer, root)
        exchange.start(stage)
        self.finish(exchange, stage)

    def connect_maximum(self, row: torch.Tensor) -> None:
        self.connect(self._others(self.rank))

    def maximum(self, row: torch.Tensor, stage: str) -> None:
        theirs = {rank: torch.empty_like(row) for rank in self._others(self.rank)}
        self.exchange(
            [PeerBuffer(rank, row) for rank in theirs],
            [PeerBuffer(rank, one) for rank, one in theirs.items()],
            stage,
        )
        for one in theirs.values():
            torch.maximum(row, one, out=row)
