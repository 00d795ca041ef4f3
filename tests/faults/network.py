"""A network of a victim's own between it and the rendezvous, which goes bad at a moment."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

from rlrefit.integration.control import Rendezvous

from .trials import Kind


class Network:
    """Passes all connections of a rank on to the rendezvous, until it is told to do otherwise.

    The rank is given its ``rendezvous``. Once it drips, ``drip_s`` are between two bytes.
    """

    def __init__(self, rendezvous: Rendezvous, drip_s: float):
        self._to = rendezvous.host, rendezvous.port
        self._drip_s = drip_s
        self._bad: Kind | None = None
        self._until = 0.0
        self._socks: list[socket.socket] = []
        self._listener = socket.create_server((rendezvous.host, 0))
        self.rendezvous = replace(rendezvous, port=self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def go_bad(self, kind: Kind, seconds: float) -> None:
        """From now on; messages that are late are so for ``seconds``."""
        self._until = time.monotonic() + seconds
        self._bad = kind
        if kind is Kind.CUT:
            self._hang_up()

    def close(self) -> None:
        """End all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._hang_up()

    def _hang_up(self) -> None:
        for sock in list(self._socks):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socks += (near, far)
                for pump in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=pump, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_rank: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._bad is Kind.LOST:
                    continue
                if self._bad is Kind.DELAYED:
                    time.sleep(max(0.0, self._until - time.monotonic()))
                if self._bad is Kind.DRIPPED and to_rank:
                    for byte in data:
                        sink.sendall(bytes((byte,)))
                        time.sleep(self._drip_s)
                    continue
                sink.sendall(data)
        if self._bad is not Kind.LOST:  # a network that loses all loses the end of a connection too
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
