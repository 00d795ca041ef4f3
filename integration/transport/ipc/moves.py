"""What a refit moves between this rank and its peers, in either direction, as addresses in this process."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...gpu_memory.description import Description
from ...packing import EncodedView, Strided
from .checksums import BoundMessage
from .copy_order import EncodedWrite
from .portions import PORTIONS, portions_of
from .signals import CHECKSUM_BYTES, SIGNAL_BYTES, SignalBuffer
from .views import mapped_views

Copied = tuple[Strided, Strided]
# From where a segment is moved, and to where.
Move = tuple[Strided | EncodedView, Strided | EncodedView]


@dataclass(frozen=True)
class PeerPlaces:
    """Where a peer's memory is mapped: that of each segment, its checksums and its signal for this rank."""

    views: Sequence[Strided | EncodedView]
    checksums: int
    signal: int

    @staticmethod
    def of(
        messages: Sequence[BoundMessage],
        peer: Description,
        rank: int,
        bases: Sequence[int],
        device: torch.device,
    ) -> PeerPlaces:
        """Of the peer's memory that this rank writes or reads.

        Args:
            messages: that are exchanged with it.
            peer: as it describes itself.
            rank: this one.
            bases: address of each of its allocations here.
            device: that works on it.

        Raises:
            ValueError: it describes other memory than the messages need.
            KeyError: it describes none for this rank.
        """
        shared = peer.shared[rank]
        return PeerPlaces(
            mapped_views(messages, peer, shared, bases, device),
            peer.region(shared.checksums, CHECKSUM_BYTES * len(messages), bases),
            peer.region(shared.signal, SIGNAL_BYTES, bases),
        )


@dataclass(frozen=True)
class Outgoing:
    """What a sender moves, and tells.

    Attributes:
        moves: to each receiver that it writes.
        checksums: of each receiver, in ascending order, how many there are and where it has them or reads them.
        signals: addresses in the memory of those that it writes.
        lent: addresses in its own memory, for those that read its weights.
    """

    moves: Mapping[int, Sequence[Move]]
    checksums: Sequence[tuple[int, int]]
    signals: list[int]
    lent: list[int]

    @staticmethod
    def of(
        bound: Mapping[int, Sequence[BoundMessage]],
        mapped: Mapping[int, PeerPlaces],
        own: SignalBuffer | None,
    ) -> Outgoing:
        """Of messages to each receiver.

        Args:
            bound: messages with this rank's memory, receivers ascending.
            mapped: of the receivers that are written; the others read.
            own: signals of this rank, if there are such others.
        """
        moves: dict[int, Sequence[Move]] = {}
        checksums: list[tuple[int, int]] = []
        signals: list[int] = []
        lent: list[int] = []
        for receiver, messages in bound.items():
            if (place := mapped.get(receiver)) is None:
                assert own is not None, "a sender that lends has signals of its own"
                checksums.append((len(messages), own.checksum_address(receiver)))
                lent.append(own.signal_address(receiver))
                continue
            moves[receiver] = list(zip(_held(messages), place.views, strict=True))
            checksums.append((len(messages), place.checksums))
            signals.append(place.signal)
        return Outgoing(moves, checksums, signals, lent)

    def checksum_copies(self, sums: torch.Tensor) -> list[Copied]:
        """Copies of the sender's checksums to where each receiver has them.

        Args:
            sums: int64 ``[messages, 2]``, contiguous, receivers in ascending order.
        """
        copies: list[Copied] = []
        row = 0
        for count, address in self.checksums:
            part = sums[row : row + count]
            row += count
            copies.append((Strided.flat(part.data_ptr(), part.nbytes), Strided.flat(address, part.nbytes)))
        return copies


@dataclass(frozen=True)
class Incoming:
    """What a receiver that pulls moves.

    Attributes:
        moves: from each sender.
        fetched: copies of the senders' checksums and signals into its own.
    """

    moves: Mapping[int, Sequence[Move]]
    fetched: Sequence[Copied]

    @staticmethod
    def of(
        bound: Mapping[int, Sequence[BoundMessage]], mapped: Mapping[int, PeerPlaces], own: SignalBuffer
    ) -> Incoming:
        """Of messages from each sender.

        Args:
            bound: messages with this rank's memory.
            mapped: of all these senders.
            own: signals of this rank.
        """
        moves: dict[int, Sequence[Move]] = {}
        fetched: list[Copied] = []
        for sender, messages in bound.items():
            place = mapped[sender]
            moves[sender] = list(zip(place.views, _held(messages), strict=True))
            for there, here, nbytes in (
                (place.checksums, own.checksum_address(sender), CHECKSUM_BYTES * len(messages)),
                (place.signal, own.signal_address(sender), SIGNAL_BYTES),
            ):
                fetched.append((Strided.flat(there, nbytes), Strided.flat(here, nbytes)))
        return Incoming(moves, fetched)


def by_kind(moves: Sequence[Move]) -> tuple[list[Copied], list[EncodedWrite]]:
    """What is copied as it is, and what is encoded on the way.

    Raises:
        ValueError: memory that is written is itself encoded.
    """
    plain = [(a, _plain(b)) for a, b in moves]
    return (
        [(a, b) for a, b in plain if isinstance(a, Strided)],
        [(a, b) for a, b in plain if isinstance(a, EncodedView)],
    )


def by_portion(
    moves: Mapping[int, Sequence[Move]], bound: Mapping[int, Sequence[BoundMessage]]
) -> list[dict[int, Sequence[Move]]]:
    """The moves of each portion.

    Args:
        moves: with each peer, one for each segment of its messages.
        bound: the messages of all peers.
    """
    found: list[dict[int, Sequence[Move]]] = [{} for _ in range(PORTIONS)]
    for peer, whole in moves.items():
        messages = [message for message, _ in bound[peer]]
        of_segments = [
            portion
            for portion, message in zip(portions_of(messages), messages, strict=True)
            for _ in message.segments
        ]
        for portion, part in enumerate(found):
            part[peer] = whole[bisect_left(of_segments, portion) : bisect_right(of_segments, portion)]
    return found


def _held(messages: Sequence[BoundMessage]) -> list[Strided | EncodedView]:
    """What this rank holds of all segments of some messages."""
    return [view for _, views in messages for view in views]


def _plain(target: Strided | EncodedView) -> Strided:
    """Memory that is written, which nothing encodes."""
    if not isinstance(target, Strided):
        raise ValueError("a receiver's memory that is encoded")
    return target
