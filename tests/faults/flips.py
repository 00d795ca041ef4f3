"""Bytes that change on their way: in what a rank has packed, in what has arrived there, or in what has landed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import torch

from rlrefit.integration.broadcast.buckets import Buckets
from rlrefit.integration.plan import CHECKSUM_BYTES
from rlrefit.integration.transport.bound_plan import BoundPlan
from rlrefit.integration.transport.messages import LocalMessage

from .weights import MISC


@dataclass(frozen=True)
class Flipped:
    """What was changed."""

    how: str
    due: bool  # it lies in what is checked in that refit
    ends: tuple[int, ...]  # refit ranks that have to do with it; nothing that landed can tell them apart
    weights: tuple[str, ...]  # one of them was damaged


class Flips:
    """Changes bytes once on this rank, after it has been armed.

    The library's own classes are patched, in the victim's process alone.
    """

    def __init__(self, rank: int, *, is_source: bool, rng: Random, told: Callable[[Flipped], None]):
        self._rank, self._is_source, self._rng, self._told = rank, is_source, rng, told
        self._armed = False
        # Of the misc path's buckets, the one that is hit; of the messages, (round, place in it), once it is chosen.
        self._bucket = -1
        self._message: tuple[int, int] | None = None
        # A bucket that was hit before the library said whether it is checked, and what it said last.
        self._undecided = ""
        self._due = False
        self._patches = ExitStack()

    def __enter__(self) -> Flips:
        pack, unpack = BoundPlan.pack, BoundPlan.unpack
        send, arrived, checks = Buckets.send, Buckets.arrived, Buckets.checks

        def packing(bound: Any, index: int, refit: int) -> None:
            pack(bound, index, refit)
            if self._armed and self._is_source:
                self._hit_round(bound, index, refit, bound._messages.sends, "_sends")

        def unpacking(bound: Any, index: int, refit: int) -> None:
            if self._armed and not self._is_source:
                self._hit_round(bound, index, refit, bound._messages.receives, "_receives")
            unpack(bound, index, refit)

        def sending(buckets: Any, bucket: torch.Tensor) -> None:
            if self._armed:
                self._hit_misc(bucket)
            send(buckets, bucket)

        def arriving(buckets: Any) -> torch.Tensor:
            bucket = arrived(buckets)
            if self._armed:
                self._hit_misc(bucket)
            return bucket

        def checking(buckets: Any, index: int, count: int) -> bool:
            found = checks(buckets, index, count)
            self._checked(found)
            return found

        for owner, name, patched in (
            (BoundPlan, "pack", packing),
            (BoundPlan, "unpack", unpacking),
            (Buckets, "send", sending),
            (Buckets, "arrived", arriving),
            (Buckets, "checks", checking),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, patched))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def arm(self) -> None:
        """From now on, change something once: mostly in the bulk path, and in the misc path where this rank is in it."""
        self._armed = True
        if (self._rank == 0 or not self._is_source) and self._rng.random() < 0.3:
            self._bucket = self._rng.randrange(len(MISC))

    def _hit_round(
        self, bound: Any, index: int, refit: int, rounds: list[list[LocalMessage]], parcels: str
    ) -> None:
        if self._bucket >= 0:
            return
        if self._message is None:
            # Relays leave from the bucket in which they arrived, whose change is another case.
            places = [(i, k) for i, messages in enumerate(rounds) for k in range(len(messages))]
            self._message = self._rng.choice([(i, k) for i, k in places if rounds[i][k].relay_of is None])
        if index != self._message[0]:
            return
        one = rounds[index][self._message[1]]
        buffer = getattr(bound.rounds[index].exchange, parcels)[self._message[1]].buffer
        segment = self._rng.choice(one.message.segments)
        part = buffer[segment.offset : segment.offset + segment.nbytes]
        how = self._change(part)
        turn, of = bound._messages.turns[one]
        due = bound._verify == "full" or refit % of == turn
        message = one.message
        ends = {message.source, message.destination, message.origin}
        names = {s.name for s in message.segments}
        how = f"{how} of {segment.name} in {parcels}, message {turn} of {of}"
        self._tell(Flipped(how, due, tuple(sorted(ends)), tuple(sorted(names))))

    def _hit_misc(self, buffer: torch.Tensor) -> None:
        if self._bucket < 0 or self._undecided:
            return
        if self._bucket > 0:
            self._bucket -= 1
            return
        self._undecided = f"{self._change(buffer[:-CHECKSUM_BYTES])} of a misc bucket on rank {self._rank}"
        if self._rank == 0:  # who sends it has decided before
            self._checked(self._due)

    def _checked(self, due: bool) -> None:
        self._due = due
        if self._armed and self._undecided:
            ends = tuple(sorted({0, self._rank}))
            self._tell(Flipped(self._undecided, due, ends, tuple(spec.name for spec in MISC)))

    def _tell(self, flipped: Flipped) -> None:
        self._armed = False
        self._told(flipped)

    def _change(self, part: torch.Tensor) -> str:
        """Change bytes of uint8 ``[n]``."""
        n = part.numel()
        if self._rng.random() < 0.5:
            a, b = self._rng.randrange(n), self._rng.randrange(n)
            if part[a] != part[b]:
                first, second = int(part[a]), int(part[b])
                part[a], part[b] = second, first
                return f"bytes {a} and {b} swapped"
        at, bit = self._rng.randrange(n), self._rng.randrange(8)
        part[at] = int(part[at]) ^ (1 << bit)
        return f"bit {bit} of byte {at} flipped"
