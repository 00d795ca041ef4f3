"""What a rank holds of the messages with its peers, and what the peers are told of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from ...gpu_memory.description import Description, Inbox, View
from ...gpu_memory.memory import ExportedMemory
from ...packing import EncodedView, Strided
from ...plan import Message, Segment
from ..views import LiveViews
from .mailbox import CHECKSUM_BYTES
from .proofs import Bound


def checksums_at(peer: Description, inbox: Inbox, messages: int, bases: Sequence[int]) -> int:
    """Where a receiver has the sums of this many messages, as it is mapped here."""
    return peer.region(inbox.checksums, CHECKSUM_BYTES * messages, bases)


def memory_of(peers: Mapping[int, Sequence[Bound]]) -> list[Strided]:
    """All memory behind the segments that are exchanged with some peers."""
    return [v for held in peers.values() for _, views in held for v in views if isinstance(v, Strided)]


def views_in(exported: ExportedMemory, held: Sequence[Bound]) -> tuple[View, ...]:
    """The memory of each segment, as a peer is told of it."""
    live = memory_of({0: held})
    return tuple(View(exported.place(view.address), view.strides, view.itemsize) for view in live)


def bound(peers: Mapping[int, Sequence[Message]], views: LiveViews) -> dict[int, list[Bound]]:
    """Each peer's messages with what this rank holds of their segments, as plain addresses: views would keep the memory of
    parameters that are offloaded meanwhile."""

    def held(segment: Segment) -> Strided | EncodedView:
        found = views.of(segment)
        return Strided.of(found) if isinstance(found, torch.Tensor) else found

    return {peer: [(m, [held(s) for s in m.segments]) for m in messages] for peer, messages in peers.items()}


def by_peer(
    rounds: Sequence[Sequence[Message]], peer: Callable[[Message], int]
) -> dict[int, tuple[Message, ...]]:
    """Each peer's messages in the order of rounds, peers ascending."""
    found: dict[int, list[Message]] = defaultdict(list)
    for messages in rounds:
        for message in messages:
            found[peer(message)].append(message)
    return {key: tuple(found[key]) for key in sorted(found)}
