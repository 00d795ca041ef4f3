"""Damage to sparse refits: to blocks and headers between two ranks, and to the base that a trainer rank compares with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch

from rlrefit.integration.delta.applier import HostApplier
from rlrefit.integration.delta.blocks import Counts, Header
from rlrefit.integration.delta.packer import Room

from .flips import Flipped
from .trials import Kind


class OnTheWire:
    """Damages once, after it has been armed, what this rank has packed or what has arrived there.

    The library's own classes are patched, in the victim's process alone.
    """

    def __init__(self, kind: Kind, rank: int, rng: Random, told: Callable[[Flipped], None]):
        self._kind, self._rank, self._rng, self._told = kind, rank, rng, told
        # Sections with blocks, or headers, that pass unharmed; None before it is armed and after it has hit.
        self._left: int | None = None
        self._patches = ExitStack()

    def __enter__(self) -> OnTheWire:
        payload, apply, read = Room.payload, HostApplier.apply, Header.read

        def packed(room: Any, counts: Counts) -> list[torch.Tensor]:
            entries, data = payload(room, counts)
            if self._kind is not Kind.HEADERS and self._is_due(counts.blocks):
                hit, data = self._damaged(entries.view(torch.int64).view(-1, 2), data, sends=True)
                entries = hit.view(torch.uint8).view(-1)
            return [entries, data]

        def arrived(applier: Any, entries: torch.Tensor, data: torch.Tensor, itemsize: int) -> None:
            if self._kind is not Kind.HEADERS and self._is_due(len(entries)):
                entries, data = self._damaged(entries, data, sends=False)
            apply(applier, entries, data, itemsize)

        def heard(numbers: Sequence[int]) -> Header:
            if self._kind is Kind.HEADERS and self._is_due(1):
                numbers = self._other_numbers(list(numbers))
            return read(numbers)

        for owner, name, patched in (
            (Room, "payload", packed),
            (HostApplier, "apply", arrived),
            (Header, "read", heard),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, patched))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def arm(self) -> None:
        """From now on, hit once."""
        self._left = self._rng.choice((0, 0, 1, 2))

    def _is_due(self, blocks: int) -> bool:
        if self._left is None or not blocks:
            return False
        self._left -= 1
        return self._left < 0

    def _damaged(
        self, entries: torch.Tensor, data: torch.Tensor, *, sends: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Others in place of int64 ``[n, 2]`` and uint8 ``[m]``, of which the sender can't change the sizes."""
        rng, count = self._rng, len(entries)
        entries, data = entries.clone(), data.clone()
        one, other = rng.randrange(count), rng.randrange(count)
        match self._kind:
            case Kind.LOST_BLOCKS if sends:
                if count == 1:
                    self._left = 0  # there is none in whose place another one could come
                    return entries, data
                other = (one + 1 + rng.randrange(count - 1)) % count
                entries[one] = entries[other]
                how = f"block {other} in place of block {one}"
            case Kind.LOST_BLOCKS:
                entries = torch.cat([entries[:one], entries[one + 1 :]])
                how = f"block {one} lost"
            case Kind.DOUBLED if not sends:
                entries = torch.cat([entries, entries[one : one + 1]])
                how = f"block {one} twice"
            case Kind.DOUBLED | Kind.REORDERED:
                entries = entries[torch.randperm(count, generator=torch.Generator().manual_seed(one))]
                how = "in another order"
            case Kind.ENTRIES:
                how = self._other_entry(entries[one].numpy())
            case Kind.BLOCK_DATA:
                at, bit = rng.randrange(data.numel()), rng.randrange(8)
                data[at] = int(data[at]) ^ (1 << bit)
                how = f"bit {bit} of byte {at} of the data"
            case kind:
                raise AssertionError(kind)
        self._hit(f"{how}, of {count}, {'as sent' if sends else 'as arrived'}")
        return entries, data

    def _other_entry(self, entry: np.ndarray[Any, Any]) -> str:
        rng = self._rng
        way = rng.choice(("bit", "bit", "bit", "elsewhere", "behind", "before", "data", "elements"))
        match way:
            case "bit":
                entry[rng.randrange(2)] ^= np.int64(1) << np.int64(rng.randrange(64))
            case "elsewhere":
                entry[0] += 16 * rng.randint(1, 64)
            case "behind":
                entry[0] += 1 << rng.randint(17, 62)
            case "before":
                entry[0] -= 16 * rng.randint(1, 1 << 20)
            case "data":
                entry[1] |= (1 << 30) - 1
            case "elements":
                entry[1] |= np.int64(0xFFFF) << np.int64(rng.choice((32, 48)))
        return f"an entry with another {way}"

    def _other_numbers(self, numbers: list[int]) -> list[int]:
        rng = self._rng
        place = rng.randrange(len(numbers))
        way = rng.choice(("bit", "bit", "more", "less"))
        if way == "bit":
            bit = rng.randrange(64)
            number = numbers[place] ^ (1 << bit) if bit < 63 else numbers[place] - (1 << 63)
            number = (number + (1 << 63)) % (1 << 64) - (1 << 63)
        else:
            number = numbers[place] + (1 if way == "more" else -1) * rng.choice((1, 16, 1 << 40))
        self._hit(f"{Header._fields[place]} {number} in place of {numbers[place]}")
        numbers[place] = number
        return numbers

    def _hit(self, how: str) -> None:
        self._left = None
        self._told(Flipped(how, True, (self._rank,), ("",)))


class Bases:
    """What the victim's bases held as each refit began; ``spoil`` changes one."""

    def __init__(self, rng: Random):
        self._rng = rng
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(self, session: Any) -> None:
        """As a refit begins."""
        base = session.engine._bulk._deltas._outgoing[self._chosen(session)].base
        self._before.append((base.memory.clone(), base.total.clone()))

    def spoil(self, session: Any, *, ahead: bool) -> str:
        """Change a base before the refit under way reads it; ``ahead``: to what the weights are now, without its sum."""
        one = session.engine._bulk._deltas._outgoing[self._chosen(session)]
        base, packer, rng = one.base, one.packer, self._rng
        memory, total = base.memory.clone(), base.total.clone()
        packer.take()
        new, of_new = base.memory.clone(), base.total.clone()
        base.memory.copy_(memory)
        base.total.copy_(total)
        differs = (new != memory).nonzero().view(-1)
        if ahead:
            if rng.random() < 0.5:
                base.memory.copy_(new)
                return "all of the base is what the weights are now"
            at = int(rng.choice(differs.tolist()))
            at -= at % 4  # whole elements
            base.memory[at : at + 4] = new[at : at + 4]
            return f"bytes {at} to {at + 4} of the base are what the weights are now"
        match rng.choice(("changed", "kept", "older", "older with its sum", "newer with its sum", "sum")):
            case "changed":
                return self._flip(base.memory, int(rng.choice(differs.tolist())), avoided=new)
            case "kept":
                part = rng.choice(one.stream.parts)
                at = part.start + rng.randrange(part.segment.nbytes)
                return self._flip(base.memory, at, avoided=new)
            case "sum":
                base.total += 1 << rng.randrange(63)
                return "the base's sum"
            case "newer with its sum":
                base.memory.copy_(new)
                base.total.copy_(of_new)
                return "the base and its sum are of the weights now"
            case way:
                older = (
                    self._before[-2]
                    if len(self._before) > 1
                    else tuple(map(torch.zeros_like, (memory, total)))
                )
                base.memory.copy_(older[0])
                if way == "older with its sum":
                    base.total.copy_(older[1])
                return f"the base is {way}"

    def _flip(self, memory: torch.Tensor, at: int, avoided: torch.Tensor) -> str:
        """Flip a bit of byte ``at``, but not so that it becomes that of ``avoided``."""
        bits = [bit for bit in range(8) if int(memory[at]) ^ (1 << bit) != int(avoided[at])]
        bit = self._rng.choice(bits)
        memory[at] = int(memory[at]) ^ (1 << bit)
        return f"bit {bit} of byte {at} of the base"

    def _chosen(self, session: Any) -> int:
        return int(session.world.rank) % len(session.engine._bulk._deltas._outgoing)
