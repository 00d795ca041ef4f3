"""One lane between two ranks of a host: two buckets for each direction, and signals that say which are full and free."""

from __future__ import annotations

import socket

import torch

# Buckets of a direction: one is filled while the other is emptied.
BUCKETS = 2
_FILLED, _FREED = b"s", b"f"
_MOST_SIGNALS = 64


class HostLink:
    """This rank's end.

    Signals are bytes of a connection. The kernel orders them with what was written before, which plain counters in
    shared memory would not be on every processor, and a wait for them takes no time of a core.

    Attributes:
        peer: the other rank.
        connection: non-blocking; readable when there is a signal, or the peer is gone.
        ended: whether the peer has closed its end.
        bucket_bytes: of each bucket.
    """

    def __init__(
        self, peer: int, connection: socket.socket, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]
    ):
        """
        Args:
            peer: the other rank.
            connection: to it.
            outgoing: buckets that this rank fills and the peer empties, uint8.
            incoming: the other way.
        """
        self.peer = peer
        self.connection = connection
        self.ended = False
        self.bucket_bytes = outgoing[0].numel()
        self._outgoing, self._incoming = outgoing, incoming
        self._credit, self._arrived = len(outgoing), 0
        self._filled = self._emptied = 0

    def free_bucket(self) -> torch.Tensor | None:
        """The bucket to be filled next, or None as long as the peer has not emptied it."""
        if not self._credit:
            self._take_signals()
        return self._outgoing[self._filled % len(self._outgoing)] if self._credit else None

    def filled(self) -> None:
        """The bucket of :meth:`free_bucket` has been filled."""
        self._credit -= 1
        self._filled += 1
        self._signal(_FILLED)

    def full_bucket(self) -> torch.Tensor | None:
        """The bucket to be emptied next, or None as long as the peer has not filled it."""
        if not self._arrived:
            self._take_signals()
        return self._incoming[self._emptied % len(self._incoming)] if self._arrived else None

    def emptied(self) -> None:
        """The bucket of :meth:`full_bucket` has been emptied."""
        self._arrived -= 1
        self._emptied += 1
        self._signal(_FREED)

    def close(self) -> None:
        """Let go of the buckets, whoever keeps the link, as a traceback does; the connection is its maker's."""
        self._outgoing, self._incoming = [], []

    def _signal(self, signal: bytes) -> None:
        try:
            self.connection.send(signal)
        except (BrokenPipeError, ConnectionResetError):
            # No failure yet: a peer that has all it wants may leave before the last bucket is given back.
            self.ended = True

    def _take_signals(self) -> None:
        try:
            signals = self.connection.recv(_MOST_SIGNALS)
        except BlockingIOError:
            return
        except ConnectionResetError:
            signals = b""
        self.ended |= not signals
        self._arrived += signals.count(_FILLED)
        self._credit += signals.count(_FREED)
