"""Sends file descriptors over a Unix domain socket to processes of this host that hold a token."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from ..control.sockets import unshared

logger = logging.getLogger(__name__)

# Descriptors of one answer. They are open on both sides meanwhile, and a process may have 1024 only.
_BATCH = 32
_REQUEST = struct.Struct("<II")
_CREDENTIALS = struct.Struct("3i")
TOKEN_BYTES = 32
# Seconds until a reader has to have sent the token. Readers send it as they connect.
_TOKEN_WITHIN = 2.0


class DescriptorServer:
    """Opens descriptors on demand and sends them to readers that know the token.

    It listens on an abstract address, which leaves nothing in the file system. It answers processes of its own user only.
    Each connection has a thread, so that no reader waits for another one. The server ends when all readers have been
    served.

    Attributes:
        address: to connect to, without the leading zero byte.
        token: hex; readers send it.
    """

    def __init__(self, open_descriptor: Callable[[int], int], count: int, readers: int, timeout_s: float):
        """Begin to serve.

        Args:
            open_descriptor: opens descriptor ``i`` (< ``count``); the server closes it after it was sent. Several threads
                call it at the same time.
            count: number of descriptors.
            readers: number of readers that will come, each once.
            timeout_s: seconds that a reader may be silent.
        """
        self._open = open_descriptor
        self._count = count
        self._readers = readers
        self._timeout = timeout_s
        self.address = f"rlrefit-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._listener = unshared(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)
        self._lock = threading.Lock()
        self._ended = False
        self._attended: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._serve, name="rlrefit-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and end all connections; safe to call twice."""
        self._end()
        self._thread.join(self._timeout)
        with self._lock:
            attended = dict(self._attended)
            for connection in attended:
                _shut(connection)
        for thread in attended.values():
            thread.join(self._timeout)

    def _end(self) -> None:
        """Accept no more connections."""
        with self._lock:
            if not self._ended:
                self._ended = True
                # The thread's accept returns then.
                _shut(self._listener)

    def _serve(self) -> None:
        with closing(self._listener):
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._ended:
                        logger.warning("GPU memory handles are not served any more: %s", error)
                    return
                # Before anything is read, so that a process of another user takes no thread.
                if not _is_ours(unshared(connection)):
                    connection.close()
                    continue
                thread = threading.Thread(
                    target=self._attend, args=(connection,), name="rlrefit-descriptors-reader", daemon=True
                )
                with self._lock:
                    self._attended[connection] = thread
                    thread.start()

    def _attend(self, connection: socket.socket) -> None:
        served = False
        try:
            connection.settimeout(min(_TOKEN_WITHIN, self._timeout))
            if self._admits(connection):
                connection.settimeout(self._timeout)
                self._answer(connection)
                served = True
        except Exception as error:
            # The reader sees its connection end and raises there.
            logger.warning("a reader of GPU memory handles was not served: %s", error)
        finally:
            with self._lock:
                del self._attended[connection]
                connection.close()
                self._readers -= served
                finished = self._readers <= 0
            if finished:
                self._end()

    def _admits(self, connection: socket.socket) -> bool:
        if hmac.compare_digest(_read(connection, TOKEN_BYTES), bytes.fromhex(self.token)):
            return True
        logger.warning("process %d asked for GPU memory handles without the token", _peer(connection)[0])
        return False

    def _answer(self, connection: socket.socket) -> None:
        while request := _read(connection, _REQUEST.size, may_end=True):
            start, count = _REQUEST.unpack(request)
            if not 0 < count <= _BATCH or start + count > self._count:
                raise ValueError(f"descriptors {start} to {start + count} of {self._count} were asked for")
            opened: list[int] = []
            try:
                for index in range(start, start + count):
                    opened.append(self._open(index))
                socket.send_fds(connection, [b"\0"], opened)
            finally:
                for descriptor in opened:
                    os.close(descriptor)


def fetch(address: str, token: str, spans: Sequence[tuple[int, int]], timeout_s: float) -> Generator[int]:
    """Descriptors of a :class:`DescriptorServer`, in order. The caller closes each of them, and the generator.

    Args:
        address: of the server.
        token: hex, of the server.
        spans: (first descriptor, how many) for each run of descriptors. Without any the server is not asked.
        timeout_s: seconds that the server may be silent.

    Raises:
        OSError: the server is not there, refuses, or does not answer in time.
    """
    asked = [
        (start, min(_BATCH, first + count - start))
        for first, count in spans
        for start in range(first, first + count, _BATCH)
    ]
    if not asked:
        return
    with unshared(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(timeout_s)
        connection.connect("\0" + address)
        connection.sendall(bytes.fromhex(token))
        for start, wanted in asked:
            connection.sendall(_REQUEST.pack(start, wanted))
            data, descriptors, _, _ = socket.recv_fds(connection, 1, wanted)
            pending = list(descriptors)
            try:
                if not data or len(descriptors) != wanted:
                    raise OSError(f"the exporter sent {len(descriptors)} of {wanted} descriptors")
                while pending:
                    yield pending.pop(0)
            finally:
                for descriptor in pending:
                    os.close(descriptor)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a connection."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end has this process's user."""
    pid, user = _peer(connection)
    if user != os.getuid():
        logger.warning("process %d of user %d, another user, asked for GPU memory handles", pid, user)
    return user == os.getuid()


def _shut(connection: socket.socket) -> None:
    """End a connection, so that waits on it return here and at the other end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("a socket was closed already: %s", error)


def _read(connection: socket.socket, nbytes: int, *, may_end: bool = False) -> bytes:
    """Exactly ``nbytes``, or nothing where the stream may end."""
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            if may_end and not data:
                return b""
            raise OSError("the connection ended in the middle of a request")
        data += part
    return data
