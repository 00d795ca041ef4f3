"""The refit world: trainer ranks, then generation ranks, numbered from 0."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import SupportsIndex, cast

from ..errors import RefitError


def whole_number(given: object) -> int | None:
    """A number from 0 on as Python's own, of NumPy's and tensors too: records and messages hold no other. None for anything else."""
    try:
        number = -1 if isinstance(given, bool) else index(cast(SupportsIndex, given))
    except TypeError:
        return None
    return number if number >= 0 else None


@dataclass(frozen=True)
class RefitWorld:
    """Membership of one epoch, seen from one rank.

    Attributes:
        rank: this rank, counted over both sides, trainers first.
        train_ranks: number of trainer ranks.
        gen_ranks: number of generation ranks, over all replicas.
        epoch: number of this membership; a plan belongs to one epoch.

    Raises:
        ValueError: a side has no rank.
        RefitError: ``rank`` is no number of this world.
    """

    rank: int
    train_ranks: int
    gen_ranks: int
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.train_ranks < 1 or self.gen_ranks < 1:
            raise ValueError(
                f"a refit needs a rank on each side, but there are {self.train_ranks} trainer and "
                f"{self.gen_ranks} generation ranks"
            )
        rank = whole_number(self.rank)
        if rank is None or rank >= self.size:
            raise RefitError(
                f"rank {self.rank!r} is not in the refit world of {self.size} ranks: the trainer's are 0 to {self.train_ranks - 1}, "
                f"the engines' {self.train_ranks} to {self.size - 1}. This process has not joined; give each process its own of these "
                "numbers",
                stage="rendezvous",
            )
        object.__setattr__(self, "rank", rank)

    @property
    def size(self) -> int:
        """Ranks on both sides."""
        return self.train_ranks + self.gen_ranks

    @property
    def is_source(self) -> bool:
        """Whether this rank is a trainer."""
        return self.rank < self.train_ranks

    @property
    def sources(self) -> range:
        """All trainer ranks."""
        return range(self.train_ranks)

    @property
    def destinations(self) -> range:
        """All generation ranks."""
        return range(self.train_ranks, self.size)

    def describe(self, rank: int) -> str:
        """What a user calls ``rank``, e.g. ``generation rank 1 (refit rank 3)``."""
        if rank < self.train_ranks:
            return f"trainer rank {rank} (refit rank {rank})"
        return f"generation rank {rank - self.train_ranks} (refit rank {rank})"


def host_identity() -> str:
    """Names this host: its host name, the kernel's boot id and the network namespace.

    Processes of one host hand each other memory over sockets of their network namespace. Containers of one machine have the same
    boot id, and often the same name; those with networks of their own count as different hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    boot_id = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()}/{boot_id}/{os.readlink('/proc/self/ns/net')}"
