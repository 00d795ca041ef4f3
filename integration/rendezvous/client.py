"""A rank's connection to the rendezvous."""

from __future__ import annotations

import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Never

from ..errors import PeerLost, RefitError, RefitTimeout
from .address import Rendezvous
from .wire import (
    GREETING_BYTES,
    HEADER_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Malformed,
    Op,
    Role,
    Signer,
    Status,
    check_proof,
    pack_body,
    pack_hello,
    parse_header,
    tune,
    unpack_body,
)

_RETRY_S = 0.05
# A server under a flood of strangers drops those that have not opened, which looks like the refusal of a token.
_ATTEMPTS = 4
_READ = 1 << 18
# Beyond the longest wait that a rank asks for, what the server may take to say that it ran out.
_GRACE_S = 5.0


class _ClosedUnopened(Exception):
    """The server closed before it proved the token; worth another attempt."""


class Connection:
    """One request at a time and its answer, each within a limit; safe to share between threads.

    The server answers waits itself when they run out. One that does not answer at all (its host is frozen)
    is given ``timeout_s`` and a few seconds more, and then counts as lost. The kernel keeps that limit
    (``SO_RCVTIMEO``), so that a request costs one send and one receive.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, timeout_s: float, role: Role = Role.MEMBER):
        """Connect, and prove the token to each other.

        Args:
            rendezvous: where to connect.
            rank: refit-world rank of this process.
            timeout_s: seconds for connecting, and the longest that a request may ask the server to wait.
            role: ``MEMBER`` for the one connection whose end is this rank's end.

        Raises:
            RefitTimeout: nobody answers at the address.
            RefitError: the token is missing or another one, or the rank is taken.
        """
        self._where = f"{rendezvous.host}:{rendezvous.port}"
        self._rank = rank
        self._timeout_s = timeout_s
        self._limit_s = timeout_s + min(_GRACE_S, max(1.0, timeout_s / 2))
        self._lock = threading.Lock()
        self._broken = ""
        self._incoming = bytearray()
        key = rendezvous.key
        for attempts_left in reversed(range(_ATTEMPTS)):
            self._sock = self._connect(rendezvous.host, rendezvous.port)
            self._limit(timeout_s)
            try:
                self._open(key, role, last=not attempts_left)
                return
            except _ClosedUnopened:
                self._sock.close()
                self._incoming.clear()
            except BaseException:
                self._sock.close()
                raise

    def request(
        self, op: Op, fields: Sequence[bytes], *, stage: str, limit_s: float = math.inf
    ) -> tuple[Status, list[bytes]]:
        """Send a request and return its answer.

        Args:
            op: what is asked.
            fields: as ``op`` has them.
            stage: for errors.
            limit_s: seconds for a request that does not wait, if the connection's own limit is too long for it.

        Raises:
            PeerLost: the connection broke, or the server stopped answering.
        """
        with self._lock:
            if self._broken:
                self._lost(stage, self._broken)
            limit_s = min(limit_s, self._limit_s)
            try:
                if limit_s != self._set_limit_s:
                    self._limit(limit_s)
                self._sock.sendall(self._ours.frame(pack_body(op, fields)))
                status, answer = unpack_body(self._receive_frame())
                return Status(status), answer
            except BlockingIOError:
                self._break(
                    f"it did not answer within {limit_s:.1f} s; its host may be frozen, or its network gone"
                )
                self._lost(stage, self._broken)
            except (OSError, EOFError) as error:
                self._break(f"the connection ended: {str(error) or 'closed by the other side'}")
                self._lost(stage, self._broken)
            except ValueError as error:
                self._break(f"a message was refused: {error}")
                self._lost(stage, self._broken)

    def close(self) -> None:
        """End the connection; safe to call twice."""
        self._break("this rank has closed it")

    def _connect(self, host: str, port: int) -> socket.socket:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                sock = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
                tune(sock)
                sock.settimeout(None)  # the kernel's limit, set below, needs a blocking socket
                return sock
            except OSError as error:
                if time.monotonic() + _RETRY_S > deadline:
                    raise RefitTimeout(
                        f"no rendezvous at {self._where} within {self._timeout_s:.0f} s: {error}. Is trainer rank 0 "
                        "up, and is the port open between the hosts?",
                        stage="rendezvous",
                        rank=self._rank,
                    ) from error
                time.sleep(_RETRY_S)

    def _open(self, key: bytes, role: Role, last: bool) -> None:
        try:
            greeting = self._receive(GREETING_BYTES)
            if not greeting.startswith(MAGIC):
                self._refused("what listens there is no rendezvous of this version of rlrefit")
            server, client = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
            self._sock.sendall(pack_hello(key, server, client, self._rank, role))
            if not check_proof(self._receive(PROOF_BYTES), key, server, client, self._rank, role):
                self._refused("what listens there does not hold the token; it may be an impostor")
            self._ours = Signer(key, b"to server", server, client)
            self._theirs = Signer(key, b"to client", server, client)
            status, fields = unpack_body(self._receive_frame())
            if status != Status.OK:
                self._refused(b"; ".join(fields).decode(errors="replace"))
        except BlockingIOError as error:
            raise RefitTimeout(
                f"the rendezvous at {self._where} took the connection and did not answer within "
                f"{self._timeout_s:.0f} s; is the host of trainer rank 0 frozen?",
                stage="rendezvous",
                rank=self._rank,
            ) from error
        except (OSError, EOFError, Malformed) as error:
            if not last:
                raise _ClosedUnopened from error
            self._refused(
                "it closed the connection, as it does for another token: is the rendezvous the one that "
                f"trainer rank 0 opened for this epoch? ({str(error) or 'closed by the other side'})"
            )

    def _refused(self, why: str) -> Never:
        raise RefitError(
            f"the rendezvous at {self._where} refused this rank: {why}", stage="rendezvous", rank=self._rank
        )

    def _receive_frame(self) -> bytes:
        length, signature = parse_header(self._receive(HEADER_BYTES))
        body = self._receive(length)
        self._theirs.check(signature, body)
        return body

    def _receive(self, nbytes: int) -> bytes:
        while len(self._incoming) < nbytes:
            data = self._sock.recv(_READ)
            if not data:
                raise EOFError
            self._incoming += data
        taken = bytes(self._incoming[:nbytes])
        del self._incoming[:nbytes]
        return taken

    def _limit(self, seconds: float) -> None:
        """Let any one send or receive fail (EAGAIN) after ``seconds``."""
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._set_limit_s = seconds

    def _break(self, why: str) -> None:
        # What comes later on this connection would be read as the answer to something else.
        if not self._broken:
            self._broken = why
            self._sock.close()

    def _lost(self, stage: str, why: str) -> Never:
        raise PeerLost(
            f"the rendezvous on trainer rank 0 ({self._where}) is lost: {why}. The epoch is over; an engine that was "
            "being written stays dirty.",
            stage=stage,
            rank=self._rank,
        )
