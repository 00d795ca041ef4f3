"""A meeting of all ranks at the rendezvous: what each brings, and what each is told."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from .frames import MAX_ANSWER, MAX_FIELDS, Body, Status, pack_body, pack_numbers, pack_values
from .world import RefitWorld

# Whom an answer is for: whatever the server knows connections by.
Caller = Hashable
Answer = tuple[Caller, Body]


@dataclass(frozen=True)
class Arrival:
    """What a rank brings to a meeting: flags (of 8 bits), values that all get, and direct data that one rank gets each."""

    caller: Caller
    flags: int
    values: tuple[bytes, ...]
    direct: dict[int, bytes]

    @property
    def nbytes(self) -> int:
        """Of all that it brings."""
        return sum(map(len, (*self.values, *self.direct.values())))


@dataclass
class Meeting:
    """A barrier in progress: what each rank that has arrived brought, and the bytes that one rank may have to be told."""

    compare: bool
    deadline: float
    seconds: float
    arrived: dict[int, Arrival] = field(default_factory=dict)
    different: set[bytes] = field(default_factory=set)
    nbytes: int = 0
    direct_bytes: dict[int, int] = field(default_factory=dict)

    def arrive(self, rank: int, arrival: Arrival) -> None:
        """Take note of a rank."""
        self.arrived[rank] = arrival
        new = {*arrival.values} - self.different
        self.different |= new
        self.nbytes += sum(map(len, new))
        for other, data in arrival.direct.items():
            self.direct_bytes[other] = self.direct_bytes.get(other, 0) + len(data)

    @property
    def too_large(self) -> bool:
        """Whether some rank could not be told all that it has to be."""
        most = self.nbytes + max(self.direct_bytes.values(), default=0)
        return most > MAX_ANSWER or len(self.different) > MAX_FIELDS

    def why_too_large(self, topic: str, world: RefitWorld) -> tuple[int, str]:
        """The rank that brings most, and a sentence for all."""
        sizes = {rank: arrival.nbytes for rank, arrival in self.arrived.items()}
        most = max(sizes, key=sizes.__getitem__)
        return most, (
            f"what the ranks tell of {topic} comes to {self.nbytes} bytes in {len(self.different)} values, and up to "
            f"{max(self.direct_bytes.values(), default=0)} bytes for one rank alone, with {len(sizes)} of {world.size} ranks "
            f"there. That is above the limit of {MAX_ANSWER} bytes or {MAX_FIELDS} values. Most is told by "
            f"{world.describe(most)}: {sizes[most]} bytes"
        )

    def answers(self, size: int) -> list[Answer]:
        """What each of ``size`` ranks is told, now that all are here."""
        arrived = [self.arrived[rank] for rank in range(size)]
        rows = [arrival.values for arrival in arrived]
        if not self.compare:
            told = self._told(pack_values(rows), size)
        elif rows.count(rows[0]) < size:
            told = [pack_body(Status.DIFFER, [pack_values(rows)])] * size
        else:
            flags = 0
            for arrival in arrived:
                flags |= arrival.flags
            told = [pack_body(Status.OK, [bytes((flags,))])] * size
        # Rank 0 last: it shares the interpreter with the server, and once it runs on it would hold up the rest.
        return [(arrived[rank].caller, told[rank]) for rank in reversed(range(size))]

    def _told(self, values: bytes, size: int) -> list[Body]:
        """The values of all, and the direct data for each rank."""
        if not self.direct_bytes:
            return [pack_body(Status.OK, [values, b""])] * size
        senders: list[list[int]] = [[] for _ in range(size)]
        direct: list[list[bytes]] = [[] for _ in range(size)]
        for sender, arrival in sorted(self.arrived.items()):
            for rank, data in arrival.direct.items():
                senders[rank].append(sender)
                direct[rank].append(data)
        return [
            pack_body(Status.OK, [values, pack_numbers(senders[rank]), *direct[rank]]) for rank in range(size)
        ]
