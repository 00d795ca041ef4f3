"""The golden transport's plan: every held box of a bulk weight goes once to everyone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..layout import Box, split, volume
from ..weights.holdings import Holdings
from ..weights.manifest import Manifest
from .model import ALIGNMENT, CHECKSUM_BYTES, EVERYONE, BroadcastPlan, Message, messages_digest
from .own_part import Row, pack


def plan_broadcast(manifest: Manifest, sources: Sequence[Holdings], bucket_bytes: int) -> BroadcastPlan:
    """The lowest rank that holds a box sends it to all; one message a round. Slow, and obviously right.

    It shares no cutting, sharing or pairing with :func:`~.analysis.analyse`, so it can judge it.
    """
    entries = list(manifest)
    rows: dict[int, list[Row]] = defaultdict(list)
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
                        rows[holdings.rank] += _rows(entry.spec.name, box, entry.spec.dtype.itemsize, room)
    messages: list[Message] = []
    for source, listed in sorted(rows.items()):
        for segments, nbytes in pack(listed, room, room, bare=False):
            messages.append(Message(source, EVERYONE, len(messages), segments, nbytes, source))
    return BroadcastPlan(tuple(messages), messages_digest(messages))


def _rows(name: str, box: Box, itemsize: int, room: int) -> list[Row]:
    return [(name, part, volume(part) * itemsize) for part in split(box, max(1, room // itemsize))]
