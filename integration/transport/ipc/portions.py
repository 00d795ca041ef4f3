"""The portions of a refit: a receiver that can work on what has landed hears after each of them, while the rest is on its way.

Both ends of a pair cut its messages alike, by the plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from ...plan import Message

PORTIONS = 8


def portions_of(messages: Sequence[Message]) -> list[int]:
    """The portion of each of a pair's messages, in the order of the plan: never a smaller one than of the message before.

    Of n portions those from the k-th on have ((n - k) / n)² of the bytes, as far as messages allow. So each is smaller than the one
    before: what is left to be done once all has landed is work on the last one.
    """
    whole = sum(message.payload_bytes for message in messages)
    sent = accumulate((message.payload_bytes for message in messages), initial=0)
    return [
        next(PORTIONS - k for k in range(1, PORTIONS + 1) if k * k * whole >= (whole - before) * PORTIONS**2)
        for before, _ in zip(sent, messages, strict=False)
    ]


def last_portions(pairs: Mapping[int, Sequence[Message]]) -> dict[str, int]:
    """Of each weight in the messages of some senders the portion with which the last of it lands."""
    last: dict[str, int] = {}
    for messages in pairs.values():
        for portion, message in zip(portions_of(messages), messages, strict=True):
            for segment in message.segments:
                last[segment.name] = max(last.get(segment.name, 0), portion)
    return last
