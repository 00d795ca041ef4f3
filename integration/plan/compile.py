"""From segments to messages: one rank's part of the plan, and the golden transport's plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from ..layout import Box, split, volume
from ..weights.holdings import Holdings
from ..weights.manifest import Manifest
from .assignment import Assignment
from .classes import TensorClass
from .model import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    EVERYONE,
    BroadcastPlan,
    Message,
    Pace,
    Plan,
    Segment,
    aligned,
    messages_digest,
)
from .schedule import Matrix, round_index

# A segment before it has its place in a message: (name, box, bytes).
_Unplaced = tuple[str, Box, int]
# The same with the position of its weight in the specs in place of the name.
_Listed = tuple[int, Box, int]


@dataclass
class _Pairs:
    """What every pair that concerns a rank exchanges."""

    names: Sequence[str]
    classes: Sequence[TensorClass]
    of: dict[tuple[int, int], list[_Listed]]

    def in_order(self) -> Iterator[tuple[tuple[int, int], Iterator[_Unplaced]]]:
        """Each pair's segments in an order that both ends know: that of the specs.

        What belongs together then travels together: codes with their scales, which are made by reading a weight once, and the
        weights of a layer, on which an engine can work once it has all of them.
        """
        for pair, listed in sorted(self.of.items()):
            listed.sort(key=itemgetter(0))
            yield pair, ((self.names[position], box, nbytes) for position, box, nbytes in listed)

    def add(self, assignment: Assignment, number: int, receiver: int, source: int | None) -> None:
        """Add the segments of a replica set for a receiver, or those that ``source`` sends of them."""
        boxes, sources, targets = assignment.segments(number, receiver)
        cursor = 0
        for index, box, nbytes in boxes:
            members = self.classes[index].members
            here = slice(cursor, cursor + len(members))
            cursor += len(members)
            chosen = np.arange(len(members)) if source is None else np.flatnonzero(sources[here] == source)
            positions = members[chosen].tolist()
            ends = zip(sources[here][chosen].tolist(), targets[here][chosen].tolist(), strict=True)
            for position, pair in zip(positions, ends, strict=True):
                self.of[pair].append((position, box, nbytes))


def compile_rank(
    rank: int,
    names: Sequence[str],
    classes: Sequence[TensorClass],
    assignment: Assignment,
    blocks: Matrix,
    room: int,
    pace: Pace,
    digest: str,
) -> Plan:
    """List and pack what ``rank`` sends or receives; see :class:`~.model.Plan`."""
    train_ranks = len(blocks)
    pairs = _Pairs(names, classes, defaultdict(list))
    if rank < train_ranks:
        for number in assignment.sets_of(rank):
            for receiver in np.flatnonzero(assignment.nbytes[number]).tolist():
                pairs.add(assignment, number, receiver, rank)
        siblings: tuple[int, ...] = ()
    else:
        receiver = assignment.receiver_of(rank)
        for number in np.flatnonzero(assignment.nbytes[:, receiver]).tolist():
            pairs.add(assignment, number, receiver, None)
        siblings = tuple(r for r in assignment.receivers[receiver].ranks if r != rank)
    sends: dict[int, list[Message]] = defaultdict(list)
    receives: dict[int, list[Message]] = defaultdict(list)
    pair_digests: dict[tuple[int, int], str] = {}
    for (source, target), listed in pairs.in_order():
        block = int(blocks[source, target - train_ranks])
        # What is passed on keeps its checksum with it, and is read where it arrived.
        passed_on = len(assignment.receivers[assignment.receiver_of(target)].ranks) > 1
        messages = [
            Message(source, target, round_index(block, i, relay=False), segments, nbytes, source)
            for i, (segments, nbytes) in enumerate(
                _pack_messages(listed, room, pace.alone, bare=not passed_on)
            )
        ]
        if rank in (source, target):
            pair_digests[source, target] = messages_digest(messages)
        for message in messages:
            if source == rank:
                sends[message.round_index].append(message)
            elif target == rank:
                receives[message.round_index].append(message)
                for sibling in siblings:
                    sends[message.round_index + 1].append(_relay(message, sibling))
            elif rank >= train_ranks:
                receives[message.round_index + 1].append(_relay(message, rank))
    rounds = sorted({*sends, *receives})
    return Plan(
        rank,
        tuple(tuple(sorted(sends[i], key=_wire_order)) for i in rounds),
        tuple(tuple(sorted(receives[i], key=_wire_order)) for i in rounds),
        digest,
        pair_digests,
        pace,
    )


def _pack_messages(
    segments: Iterable[_Unplaced], room: int, alone: int, *, bare: bool
) -> list[tuple[tuple[Segment, ...], int]]:
    """Messages of at most ``room`` bytes of segments: the segments, and the bytes on the wire.

    A segment of ``alone`` bytes or more gets a message of its own; ``bare``: without a checksum in it. No segment may
    be larger than ``room``.
    """
    messages: list[tuple[tuple[Segment, ...], int]] = []
    placed: list[Segment] = []
    cursor = 0

    def close() -> None:
        nonlocal placed, cursor
        if placed:
            messages.append((tuple(placed), aligned(cursor) + CHECKSUM_BYTES))
        placed, cursor = [], 0

    for name, box, nbytes in segments:
        if nbytes >= alone:
            on_wire = nbytes if bare else aligned(nbytes) + CHECKSUM_BYTES
            messages.append(((Segment(name, box, 0, nbytes),), on_wire))
            continue
        if cursor + nbytes > room:
            close()
        placed.append(Segment(name, box, cursor, nbytes))
        cursor = aligned(cursor + nbytes)
    close()
    return messages


def plan_broadcast(manifest: Manifest, sources: Sequence[Holdings], bucket_bytes: int) -> BroadcastPlan:
    """The lowest rank that holds a box sends it to all; one message a round. Slow, and obviously right.

    It shares no cutting, sharing or pairing with :func:`~.analysis.analyse`, so it can judge it.
    """
    entries = list(manifest)
    segments: dict[int, list[_Unplaced]] = defaultdict(list)
    seen: set[tuple[int, Box]] = set()
    room = bucket_bytes // ALIGNMENT * ALIGNMENT - CHECKSUM_BYTES
    for holdings in sources:
        for group in holdings.groups:
            for position in group.indices.tolist():
                entry = entries[position]
                if entry.route != "bulk":
                    continue
                for box in group.boxes:
                    if (position, box) not in seen:
                        seen.add((position, box))
                        segments[holdings.rank] += _split(
                            entry.spec.name, box, entry.spec.dtype.itemsize, room
                        )
    messages: list[Message] = []
    for source, listed in sorted(segments.items()):
        for placed, nbytes in _pack_messages(listed, room, room, bare=False):
            messages.append(Message(source, EVERYONE, len(messages), placed, nbytes, source))
    return BroadcastPlan(tuple(messages), messages_digest(messages))


def _relay(message: Message, sibling: int) -> Message:
    return replace(
        message, source=message.destination, destination=sibling, round_index=message.round_index + 1
    )


def _wire_order(message: Message) -> tuple[int, int, int]:
    return message.source, message.destination, message.origin


def _split(name: str, box: Box, itemsize: int, room: int) -> list[_Unplaced]:
    return [(name, small, volume(small) * itemsize) for small in split(box, max(1, room // itemsize))]
