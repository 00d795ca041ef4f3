"""What a delta counts in: for each pair of ranks all bulk bytes in one row, the *stream*, the same on both sides.

A rank that sends the same parts of the same weights to several engines has one stream for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from ..layout import Box, volume
from ..plan import Message, Plan, Segment, aligned


class Part(NamedTuple):
    """A segment and its place in the stream.

    Attributes:
        segment: of the plan.
        start: byte of the stream at which it begins, row-major; a multiple of 16.
        itemsize: bytes of an element.
    """

    segment: Segment
    start: int
    itemsize: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the segment's box."""
        return tuple(stop - start for start, stop in self.segment.box)


@dataclass(frozen=True)
class Stream:
    """All that one rank sends to another, in the order that both know.

    Attributes:
        parts: elements of one size stand together, larger ones first.
        nbytes: from the first byte to behind the last.
    """

    parts: tuple[Part, ...]
    nbytes: int

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Stream:
        """The stream of a pair's messages, in their order."""
        sized = [
            (segment.nbytes // elements, segment)
            for message in messages
            for segment in message.segments
            if (elements := volume(segment.box))
        ]
        sized.sort(key=itemgetter(0), reverse=True)  # stable
        parts, cursor = [], 0
        for itemsize, segment in sized:
            parts.append(Part(segment, cursor, itemsize))
            cursor = aligned(cursor + segment.nbytes)
        return cls(tuple(parts), cursor)

    @property
    def payload_bytes(self) -> int:
        """Without the gaps between parts."""
        return sum(part.segment.nbytes for part in self.parts)

    @property
    def elements(self) -> int:
        """Of all parts."""
        return sum(part.segment.nbytes // part.itemsize for part in self.parts)

    @property
    def extents(self) -> dict[int, tuple[int, int]]:
        """For each size of an element where such elements begin and end, in bytes; they stand together."""
        found: dict[int, tuple[int, int]] = {}
        for part in self.parts:
            begin, _ = found.get(part.itemsize, (part.start, 0))
            found[part.itemsize] = begin, part.start + part.segment.nbytes
        return found

    @property
    def key(self) -> tuple[tuple[str, Box], ...]:
        """Equal for streams of the same parts of the same weights."""
        return tuple((part.segment.name, part.segment.box) for part in self.parts)

    def sections(self, most_bytes: int) -> list[tuple[Part, ...]]:
        """Neighbouring parts of elements of one size, ``most_bytes`` together unless one part has more.

        Small elements come first: codes, with which the scales are made that follow later.
        """
        found: list[list[Part]] = []
        held = 0
        for part in self.parts:
            new = not found or found[-1][-1].itemsize != part.itemsize
            if new or held + part.segment.nbytes > most_bytes:
                found.append([])
                held = 0
            found[-1].append(part)
            held += part.segment.nbytes
        found.sort(key=lambda parts: parts[0].itemsize)  # stable
        return [tuple(parts) for parts in found]


# A message by what all ranks know of it: the first rank that gets it, and the round in which it leaves its origin.
MessageKey = tuple[int, int]


def received(plan: Plan) -> dict[int, list[tuple[MessageKey, Message]]]:
    """By the trainer rank whose bytes they are, the messages that this rank receives, relays among them."""
    found: dict[int, list[tuple[MessageKey, Message]]] = {}
    for messages in plan.receives:
        for message in messages:
            # A relay comes in the round after the one in which the passing rank got it.
            first = message.source if message.is_relay else message.destination
            found.setdefault(message.origin, []).append(((first, message.round_index & ~1), message))
    # Alike for replicas that pass on to each other what they get, so that they share a stream.
    return {origin: sorted(held, key=lambda pair: pair[0]) for origin, held in found.items()}


def sent(plan: Plan) -> dict[MessageKey, Message]:
    """The messages of this rank's own bytes."""
    own = (message for messages in plan.sends for message in messages if not message.is_relay)
    return {(message.destination, message.round_index & ~1): message for message in own}
