"""Ranks of one host whose groups go through shared memory, as threads or in processes of their own."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from rlrefit.integration.comm.host_group import HostGroup
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.session import RefitSession
from tests.refit.groups import GroupWorld
from tests.refit.mappings import Worlds
from tests.refit.synthetic import refit_changed
from tests.refit.test_session import world


class SharedWorld(GroupWorld):
    """As :class:`GroupWorld`, with small buckets in shared memory."""

    def __init__(self, size: int, timeout_s: float = 20.0, bucket_bytes: int = 4096):
        super().__init__(size, timeout_s)
        self._bucket_bytes = bucket_bytes

    def __enter__(self) -> SharedWorld:
        store = HashStore()
        self._pool = ThreadPoolExecutor(self.size)
        shared = (self.size, torch.device("cpu"), self._timeout_s, lambda stage: None, 2, self._bucket_bytes)
        self.groups = [HostGroup(store, "shared", rank, *shared) for rank in range(self.size)]
        return self


class SharedWorlds(Worlds):
    """A shared world of each size, made at its first use."""

    def of(self, size: int) -> GroupWorld:
        if size not in self._made:
            self._made[size] = SharedWorld(size, self._timeout_s).__enter__()
        return self._made[size]


def left_behind() -> tuple[int, list[str]]:
    """Descriptors that this process has open, and its mappings of shared buckets."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:rlrefit" in line]
    return len(os.listdir("/proc/self/fd")), mapped


def nothing_left(before: tuple[int, list[str]]) -> bool:
    """Whether no more is left than :func:`left_behind` said; threads of the rendezvous end a moment after it has."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        descriptors, mapped = left_behind()
        if descriptors <= before[0] and len(mapped) <= len(before[1]):
            return True
        time.sleep(0.01)
    return False


def many_refits(rank: int, times: int) -> dict[str, Any]:
    """What a rank of a process of its own sees of a session's ``times`` changed refits."""
    sources, destinations = world(1)
    server = open_rendezvous("127.0.0.1", 2, 1) if rank == 0 else None
    told: list[Any] = [server.rendezvous.to_json() if server is not None else None]
    dist.broadcast_object_list(told)
    endpoint: Any = [*sources, *destinations][rank]
    config = RefitConfig(bucket_mb=1, timeout_s=60.0, verify="full")
    before = left_behind()
    session = RefitSession.open(
        Rendezvous.from_json(told[0]), rank, lambda: endpoint, config, engine="colocated_ipc"
    )
    wrong, open_now, resident = [], [], []
    for version in range(times):
        record, found = refit_changed(session, endpoint, version)
        wrong += found
        open_now.append(len(os.listdir("/proc/self/fd")))
        resident.append(_resident_bytes())
    during = len(left_behind()[1])
    session.close()
    dist.barrier()
    if server is not None:
        server.close()
    return {
        "wrong": wrong,
        "transport": record.transport,
        # What comes and goes (a connection of the rendezvous, an allocator's arena) is no leak; that would stay.
        "descriptors": (max(open_now[:10]), min(open_now[-10:])),
        "grown": min(resident[-10:]) - resident[times // 10],
        "mapped": during,
        "left": nothing_left(before),
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
