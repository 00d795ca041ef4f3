"""One rank's own part: its items, packed into messages, arranged in rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..layout import Box
from .assignment import Assignment
from .classes import TensorClass
from .model import CHECKSUM_BYTES, Message, Pace, Plan, Segment, aligned, messages_digest
from .schedule import Matrix, round_index

# What one pair exchanges, in the order that both ends know: (name, box, bytes).
Row = tuple[str, Box, int]


@dataclass
class _Rows:
    """Rows of every pair that concerns a rank."""

    names: Sequence[str]
    classes: Sequence[TensorClass]
    pairs: dict[tuple[int, int], list[Row]]

    def add(self, assignment: Assignment, number: int, receiver: int, source: int | None) -> None:
        """Add the items of a replica set for a receiver, or those that ``source`` sends of them."""
        blocks, sources, targets = assignment.items(number, receiver)
        cursor = 0
        for index, box, nbytes in blocks:
            members = self.classes[index].members
            here = slice(cursor, cursor + len(members))
            cursor += len(members)
            chosen = np.arange(len(members)) if source is None else np.flatnonzero(sources[here] == source)
            positions = members[chosen].tolist()
            ends = zip(sources[here][chosen].tolist(), targets[here][chosen].tolist(), strict=True)
            for position, pair in zip(positions, ends, strict=True):
                self.pairs[pair].append((self.names[position], box, nbytes))


def compile_own_part(
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
    rows = _Rows(names, classes, defaultdict(list))
    if rank < train_ranks:
        for number in assignment.sets_of(rank):
            for receiver in np.flatnonzero(assignment.nbytes[number]).tolist():
                rows.add(assignment, number, receiver, rank)
        siblings: tuple[int, ...] = ()
    else:
        receiver = assignment.receiver_of(rank)
        for number in np.flatnonzero(assignment.nbytes[:, receiver]).tolist():
            rows.add(assignment, number, receiver, None)
        siblings = tuple(r for r in assignment.receivers[receiver].ranks if r != rank)
    sends: dict[int, list[Message]] = defaultdict(list)
    receives: dict[int, list[Message]] = defaultdict(list)
    pair_digests: dict[tuple[int, int], str] = {}
    for (source, target), listed in sorted(rows.pairs.items()):
        block = int(blocks[source, target - train_ranks])
        # What is passed on keeps its checksum with it, and is read where it arrived.
        passed_on = len(assignment.receivers[assignment.receiver_of(target)].ranks) > 1
        messages = [
            Message(source, target, round_index(block, i, relay=False), segments, nbytes, source)
            for i, (segments, nbytes) in enumerate(pack(listed, room, pace.alone, bare=not passed_on))
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


def pack(rows: Iterable[Row], room: int, alone: int, *, bare: bool) -> list[tuple[tuple[Segment, ...], int]]:
    """Messages of at most ``room`` bytes of segments: the segments, and the bytes on the wire.

    A segment of ``alone`` bytes or more gets a message of its own; ``bare``: without a checksum in it. No row may be
    larger than ``room``.
    """
    messages: list[tuple[tuple[Segment, ...], int]] = []
    segments: list[Segment] = []
    cursor = 0

    def close() -> None:
        nonlocal segments, cursor
        if segments:
            messages.append((tuple(segments), aligned(cursor) + CHECKSUM_BYTES))
        segments, cursor = [], 0

    for name, box, nbytes in rows:
        if nbytes >= alone:
            on_wire = nbytes if bare else aligned(nbytes) + CHECKSUM_BYTES
            messages.append(((Segment(name, box, 0, nbytes),), on_wire))
            continue
        if cursor + nbytes > room:
            close()
        segments.append(Segment(name, box, cursor, nbytes))
        cursor = aligned(cursor + nbytes)
    close()
    return messages


def _relay(message: Message, sibling: int) -> Message:
    return replace(
        message, source=message.destination, destination=sibling, round_index=message.round_index + 1
    )


def _wire_order(message: Message) -> tuple[int, int, int]:
    return message.source, message.destination, message.origin
