"""Where the ranks are and how fast the links between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# One direction of one rank, in units of 1e9 bytes a second: an NDR 400 Gb/s NIC for each GPU, and what NCCL
# reaches over the NVLink of an H100 or H200.
NIC_GB_PER_S = 50.0
NVLINK_GB_PER_S = 350.0
# Bytes that an H100 copies within its memory (read and written once each) in units of 1e9 a second; an H200 copies 2,130.
COPY_GB_PER_S = 1500.0

# Ways from one rank to another: between hosts, inside a host, and inside the memory of one GPU.
NIC, NVLINK, COPY = range(3)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Topology:
    """Hosts and GPUs of the refit world's ranks, and rates of their links.

    Attributes:
        host_of: number of the host of each rank, trainers first.
        nic_gb_per_s: each rank's link to other hosts, each direction.
        nvlink_gb_per_s: each rank's link inside its host, each direction.
        host_gb_per_s: what all ranks of a host together can move to or from other hosts, each direction;
            None if only the ranks' own links limit it.
        gpu_of: number of the GPU of each rank; empty if each has one to itself.
        copy_gb_per_s: what a GPU copies within its memory, for the bytes between ranks that share it.
    """

    host_of: tuple[int, ...]
    nic_gb_per_s: float = NIC_GB_PER_S
    nvlink_gb_per_s: float = NVLINK_GB_PER_S
    host_gb_per_s: float | None = None
    gpu_of: tuple[int, ...] = ()
    copy_gb_per_s: float = COPY_GB_PER_S

    def __post_init__(self) -> None:
        rates = {
            "nic_gb_per_s": self.nic_gb_per_s,
            "nvlink_gb_per_s": self.nvlink_gb_per_s,
            "copy_gb_per_s": self.copy_gb_per_s,
        }
        if self.host_gb_per_s is not None:
            rates["host_gb_per_s"] = self.host_gb_per_s
        bad = [f"{name} is {rate}" for name, rate in rates.items() if not rate > 0]
        if bad:
            raise ValueError(f"rates of a topology must be above 0: {', '.join(bad)}")
        if self.gpu_of and len(self.gpu_of) != len(self.host_of):
            raise ValueError(
                f"a topology tells the GPUs of {len(self.gpu_of)} ranks and the hosts of {len(self.host_of)}; give both "
                "for every rank"
            )
        if len(set(zip(self.gpu_of, self.host_of, strict=False))) > len(set(self.gpu_of)):
            raise ValueError(
                "a topology has ranks of different hosts on one GPU; number the GPUs over all hosts"
            )

    @staticmethod
    def of_hosts(hosts: Sequence[Hashable], gpus: Sequence[str] = ()) -> Topology:
        """From the identities of each rank's host and GPU, numbered as they first appear.

        Args:
            hosts: of all ranks, trainers first.
            gpus: likewise, told apart within a host; empty for a rank whose GPU nobody else has. None at all if nobody
                shares a GPU.
        """
        host_of = _numbered(hosts)
        ranks_at = Counter(zip(host_of, gpus, strict=bool(gpus)))
        shared = {place for place, count in ranks_at.items() if count > 1 and place[1]}
        if not shared:
            return Topology(host_of)
        places = [
            place if place in shared else (rank,)
            for rank, place in enumerate(zip(host_of, gpus, strict=True))
        ]
        return Topology(host_of, gpu_of=_numbered(places))

    @staticmethod
    def blocks(train_ranks: int, gen_ranks: int, gpus_per_host: int) -> Topology:
        """Hosts of ``gpus_per_host`` ranks each, trainers and engines on hosts of their own.

        A world that fits into one host is one host.
        """
        if train_ranks + gen_ranks <= gpus_per_host:
            return Topology((0,) * (train_ranks + gen_ranks))
        train_hosts = -(-train_ranks // gpus_per_host)
        hosts = [r // gpus_per_host for r in range(train_ranks)]
        hosts += [train_hosts + r // gpus_per_host for r in range(gen_ranks)]
        return Topology(tuple(hosts))

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return 1 + max(self.host_of)

    @property
    def gpus(self) -> Ints:
        """Number of each rank's GPU: int64 ``[world]``."""
        return np.array(self.gpu_of or range(len(self.host_of)), dtype=np.int64)

    @property
    def gb_per_s(self) -> npt.NDArray[np.float64]:
        """Rates by way: ``NIC``, ``NVLINK``, ``COPY``."""
        return np.array([self.nic_gb_per_s, self.nvlink_gb_per_s, self.copy_gb_per_s])

    def ways(self, source: Ints, target: Ints) -> Ints:
        """``NIC``, ``NVLINK`` or ``COPY`` between ranks, of the arguments' common shape."""
        host_of, gpus = np.array(self.host_of), self.gpus
        inside = (host_of[source] == host_of[target]).astype(np.int64)
        ways: Ints = inside + (gpus[source] == gpus[target])
        return ways

    def links(self, pairs: Ints) -> tuple[LinkLoad, ...]:
        """The load of every link in use.

        Args:
            pairs: bytes from each rank to each rank, int64 ``[world, world]``.
        """
        ranks = np.arange(len(self.host_of))
        ways = self.ways(ranks[:, None], ranks[None, :])
        loads: list[LinkLoad] = []
        for label, way, rate in (
            ("NIC", NIC, self.nic_gb_per_s),
            ("NVLink", NVLINK, self.nvlink_gb_per_s),
        ):
            crossing = pairs * (ways == way)
            for direction, amounts in (("out", crossing.sum(axis=1)), ("in", crossing.sum(axis=0))):
                loads += [
                    LinkLoad(f"rank {r} {label} {direction}", int(amounts[r]), rate)
                    for r in np.flatnonzero(amounts).tolist()
                ]
        staying = _by_place((pairs * (ways == COPY)).sum(axis=1), self.gpus)
        loads += [LinkLoad(f"GPU {g} copy", nbytes, self.copy_gb_per_s) for g, nbytes in staying]
        if self.host_gb_per_s is not None:
            outside = pairs * (ways == NIC)
            for direction, amounts in (("out", outside.sum(axis=1)), ("in", outside.sum(axis=0))):
                loads += [
                    LinkLoad(f"host {h} uplink {direction}", nbytes, self.host_gb_per_s)
                    for h, nbytes in _by_place(amounts, np.array(self.host_of))
                ]
        return tuple(loads)


@dataclass(frozen=True)
class LinkLoad:
    """Bytes of one refit over one direction of one link."""

    name: str
    nbytes: int
    rate_gb_per_s: float

    @property
    def seconds(self) -> float:
        """Time of the bytes at the link's rate."""
        return self.nbytes / self.rate_gb_per_s / 1e9


def _numbered(names: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _by_place(amounts: Ints, place_of: Ints) -> list[tuple[int, int]]:
    """Sums of the ranks' ``amounts`` by host or GPU, without those that are 0: (number, bytes)."""
    sums = np.bincount(place_of, weights=amounts)
    return [(place, int(sums[place])) for place in np.flatnonzero(sums).tolist()]
