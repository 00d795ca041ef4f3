"""The benchmark's own process groups: host barriers, maxima, and subgroups for the peers.

The refit makes communicators of its own; these serve what is measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .options import BenchOptions


class Ranks:
    """All ranks of a run, seen from one of them, and what their hosts tell each other.

    Attributes:
        rank: this rank.
        size: all ranks.
        device: of this rank.
    """

    def __init__(self, rank: int, size: int, gpu: int | None):
        """
        Args:
            rank: this rank.
            size: all ranks.
            gpu: number of this rank's; None on CPUs.
        """
        self.rank, self.size = rank, size
        # Gloo, in which the hosts meet; None for the default group.
        self._hosts: Any = None
        if gpu is None:
            self.device = torch.device("cpu")
            torch.set_num_threads(1)
        else:
            self.device = torch.device("cuda", gpu)
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for all ranks' hosts."""
        dist.barrier(group=self._hosts)

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds that ``work`` takes on this rank, its device included, started by all ranks at once."""
        self.synchronize()
        self.barrier()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def maxima(self, numbers: Iterable[float]) -> list[float]:
        """Of each number, the largest of all ranks; every rank passes as many."""
        tensor = torch.tensor(list(numbers), dtype=torch.float64)
        if tensor.numel():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._hosts)
        return [float(x) for x in tensor]

    def share(self, value: Any) -> Any:
        """Rank 0's ``value`` on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._hosts)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of ranks, on all ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._hosts)
        return found

    def close(self) -> None:
        """Leave; all ranks do so at the same time."""
        self.synchronize()
        self.barrier()
        dist.destroy_process_group()


class BenchRanks(Ranks):
    """The ranks of a refit of shapes, trainers first, and subgroups for its peers.

    Attributes:
        train_ranks: number of trainer ranks.
        colocated: whether trainer rank i and engine rank i share a GPU.
    """

    def __init__(self, rank: int, options: BenchOptions, store: TCPStore):
        """Meet the others; all ranks do so at the same time."""
        on_gpu = options.device == "cuda"
        super().__init__(rank, options.world_size, options.gpu_of(rank) if on_gpu else None)
        self.train_ranks = options.train_ranks
        self.colocated = options.colocated
        self._backend = "nccl" if on_gpu else "gloo"
        self._timeout = timedelta(seconds=options.timeout_s)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("bench", store),
            rank=rank,
            world_size=self.size,
            timeout=self._timeout,
        )
        self._groups: dict[tuple[int, ...], Any] = {}

    @property
    def is_source(self) -> bool:
        """Whether this rank is a trainer."""
        return self.rank < self.train_ranks

    @property
    def engines(self) -> range:
        """The engines' ranks."""
        return range(self.train_ranks, self.size)

    @property
    def device_name(self) -> str:
        """What the run is on, e.g. ``4 x NVIDIA H200``."""
        if self.device.type != "cuda":
            return f"{self.size} x CPU process"
        kind = torch.cuda.get_device_name(self.device)
        if self.colocated:
            return f"{self.train_ranks} x {kind}, a trainer and an engine on each"
        return f"{self.size} x {kind}"

    def group(self, members: Iterable[int]) -> Any:
        """The process group of ``members``, on the parameters' devices. All ranks ask in the same order."""
        key = tuple(sorted(members))
        if key not in self._groups:
            made = dist.new_group(key, backend=self._backend, timeout=self._timeout)
            if self.rank in key:
                # NCCL connects all members at the first use, and one without messages would not come to it.
                dist.all_reduce(torch.zeros(1, device=self.device), group=made)
            self._groups[key] = made
        return self._groups[key]

    def free(self) -> None:
        """Give memory that nothing uses any more back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
