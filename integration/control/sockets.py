"""Sockets of this process alone, and their options."""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

_ours: WeakSet[socket.socket] = WeakSet()


def unshared(sock: socket.socket) -> socket.socket:
    """``sock``, which processes that this one forks will close as they begin.

    The kernel ends a connection, and frees a port, once the last process has closed it. With a copy in a data loader's worker, a rank
    that dies would keep its peers waiting.
    """
    _ours.add(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """Set a connection's options: small messages leave at once, and a host that is gone is noticed in minutes.

    The probes also keep firewalls from forgetting a connection that is idle while a policy trains.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def _close_inherited() -> None:
    for sock in list(_ours):
        # The connection itself goes on in the parent, so it is not shut down.
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)
