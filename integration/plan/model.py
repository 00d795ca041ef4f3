"""The records of a plan.

From small to large. A **segment** is the intersection of a sender's and a receiver's fragment: one box of one weight. A
**message** is what one pair of ranks exchanges in a round: segments that fit the pair's share of a bucket. In a **round**
every pair exchanges at most one message, so staging never exceeds one bucket per direction and rank. A **bucket** is
staging memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..layout import Box

# Every segment starts at a multiple of this many bytes, so that any dtype can be viewed in place
# and copies use the widest loads.
ALIGNMENT = 16
# Each message ends in one checksum of this many bytes.
CHECKSUM_BYTES = 16
# The destination of a message that is broadcast to all.
EVERYONE = -1


@dataclass(frozen=True)
class Pace:
    """How messages are cut and staged so that a wire is kept busy.

    Attributes:
        alone: a segment of at least this many bytes gets a message of its own, which is bare.
        most: bytes of the segments in a message at most, however many a bucket holds; None for as many.
        buckets: that take turns in each lane and direction.
        ahead: rounds that are on the wire before the host unpacks the first of them, beside one for each lane.
    """

    alone: int
    most: int | None
    buckets: int
    ahead: int


# One large message loads NCCL's wire best, and its rounds follow each other on streams.
LARGE_SEGMENT = 32 << 20
NCCL_PACE = Pace(LARGE_SEGMENT, most=None, buckets=2, ahead=0)
# One side writes or reads the other's memory, and nothing is staged: no segment needs a message of its own, in which it would leave
# its place in the order.
ONE_SIDED_PACE = Pace(1 << 62, most=None, buckets=2, ahead=0)
# Over gloo, messages of a few MiB that follow each other closely go fastest (on 2 cores, 336 MB from two ranks to one took
# 136 to 196 ms in messages of 4 MiB, and 349 to 368 ms in one message each), and the host checks and unpacks some of
# them meanwhile. What a sampled check adds up is then little.
GLOO_PACE = Pace(1 << 20, most=4 << 20, buckets=4, ahead=15)


class Segment(NamedTuple):
    """One box of ``name`` at byte ``offset`` of its message, row-major."""

    name: str
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What ``source`` sends to ``destination``.

    Attributes:
        source: sending rank of the refit world.
        destination: receiving rank, or ``EVERYONE``.
        round_index: global order; equal on both ends. A rank runs its own rounds in ascending order.
        segments: at offsets that are multiples of ``ALIGNMENT``.
        nbytes: size on the wire; the last ``CHECKSUM_BYTES`` hold the checksum, unless it is bare.
        origin: the rank whose bytes these are: ``source`` itself, or for a relay the trainer from which
            ``source`` received the same message in an earlier round.
    """

    source: int
    destination: int
    round_index: int
    segments: tuple[Segment, ...]
    nbytes: int
    origin: int

    @property
    def payload_bytes(self) -> int:
        """The bytes of the segments alone, without alignment and checksum."""
        return sum(s.nbytes for s in self.segments)

    @property
    def is_bare(self) -> bool:
        """Whether the wire carries one segment's bytes and nothing else.

        Each end on which that segment is contiguous sends it from, or receives it into, its parameter, without a copy
        into a bucket, whatever the other end does. The checksum travels by itself.
        """
        return self.nbytes == self.segments[0].nbytes

    @property
    def is_relay(self) -> bool:
        """Whether ``source`` passes on what it received from ``origin``."""
        return self.origin != self.source


@dataclass(frozen=True)
class Plan:
    """One rank's own part of a refit's bulk path.

    Attributes:
        rank: of the refit world.
        sends: messages by this rank's own rounds, in ascending order of ``round_index``.
        receives: the same rounds' incoming messages; as long as ``sends``.
        digest: of all that every rank computes alike; must be equal on all ranks.
        pair_digests: for each (source, destination) pair of this rank, a digest of its messages; both
            ends of a pair must have the same.
        pace: that its messages were cut for.
    """

    rank: int
    sends: tuple[tuple[Message, ...], ...]
    receives: tuple[tuple[Message, ...], ...]
    digest: str
    pair_digests: dict[tuple[int, int], str]
    pace: Pace = NCCL_PACE

    @property
    def rounds(self) -> int:
        """Rounds in which this rank takes part."""
        return len(self.sends)

    @property
    def messages(self) -> int:
        """Messages that this rank sends or receives."""
        return sum(map(len, self.sends)) + sum(map(len, self.receives))

    @property
    def segments(self) -> int:
        """Segments that this rank sends or receives."""
        return sum(len(m.segments) for side in (self.sends, self.receives) for r in side for m in r)

    @property
    def staging_bytes(self) -> int:
        """The largest sum of one round's messages in one direction, bytes."""
        return max(
            (sum(m.nbytes for m in messages) for side in (self.sends, self.receives) for messages in side),
            default=0,
        )


@dataclass(frozen=True)
class BroadcastPlan:
    """The plan of the golden transport: every message goes to all ranks, one a round."""

    messages: tuple[Message, ...]
    digest: str

    @property
    def rounds(self) -> int:
        """One message a round."""
        return len(self.messages)


def messages_digest(messages: Iterable[Message]) -> str:
    """A digest of messages in order: pairs, rounds, sizes, and each segment's name, box and offset."""
    digest = hashlib.sha256()
    for m in messages:
        line = [m.source, m.destination, m.round_index, m.nbytes, m.origin]
        digest.update(json.dumps(line, separators=(",", ":")).encode())
        digest.update(repr(m.segments).encode())
    return digest.hexdigest()


def aligned(offset: int) -> int:
    """``offset`` rounded up to ``ALIGNMENT``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
