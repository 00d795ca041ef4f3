"""Where the ranks are and how fast the links between them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# One direction of one rank, in units of 1e9 bytes a second: an NDR 400 Gb/s NIC for each GPU, and what NCCL
# reaches over the NVLink of an H100 or H200.
NIC_GB_PER_S = 50.0
NVLINK_GB_PER_S = 350.0


@dataclass(frozen=True)
class Topology:
    """Hosts of the refit world's ranks, and rates of their links.

    Attributes:
        host_of: number of the host of each rank, trainers first.
        nic_gb_per_s: each rank's link to other hosts, each direction.
        nvlink_gb_per_s: each rank's link inside its host, each direction.
        host_gb_per_s: what all ranks of a host together can move to or from other hosts, each direction;
            None if only the ranks' own links limit it.
    """

    host_of: tuple[int, ...]
    nic_gb_per_s: float = NIC_GB_PER_S
    nvlink_gb_per_s: float = NVLINK_GB_PER_S
    host_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        rates = {"nic_gb_per_s": self.nic_gb_per_s, "nvlink_gb_per_s": self.nvlink_gb_per_s}
        if self.host_gb_per_s is not None:
            rates["host_gb_per_s"] = self.host_gb_per_s
        bad = [f"{name} is {rate}" for name, rate in rates.items() if not rate > 0]
        if bad:
            raise ValueError(f"rates of a topology must be above 0: {', '.join(bad)}")

    @staticmethod
    def of_hosts(hosts: Sequence[Hashable], **rates: float) -> Topology:
        """From each rank's host identity (any hashable); hosts are numbered as they first appear."""
        numbers: dict[Hashable, int] = {}
        return Topology(tuple(numbers.setdefault(h, len(numbers)) for h in hosts), **rates)

    @staticmethod
    def blocks(train_ranks: int, gen_ranks: int, gpus_per_host: int, **rates: float) -> Topology:
        """Hosts of ``gpus_per_host`` ranks each, trainers and engines on hosts of their own.

        A world that fits into one host is one host.
        """
        if train_ranks + gen_ranks <= gpus_per_host:
            return Topology((0,) * (train_ranks + gen_ranks), **rates)
        train_hosts = -(-train_ranks // gpus_per_host)
        hosts = [r // gpus_per_host for r in range(train_ranks)]
        hosts += [train_hosts + r // gpus_per_host for r in range(gen_ranks)]
        return Topology(tuple(hosts), **rates)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return 1 + max(self.host_of)


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
