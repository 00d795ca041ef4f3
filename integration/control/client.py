"""A rank's connection to the rendezvous."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Never

from ..errors import PeerLost, RefitError, RefitMismatch, RefitTimeout
from .address import Rendezvous, is_loopback
from .frames import (
    GREETING_BYTES,
    HEADER_BYTES,
    MAX_ANSWER,
    MAX_MESSAGE,
    NONCE_BYTES,
    PROOF_BYTES,
    PROTOCOL_VERSION,
    SPIN_S,
    Body,
    Malformed,
    Op,
    Role,
    Signer,
    Status,
    check_proof,
    pack_body,
    pack_hello,
    parse_header,
    unpack_body,
    unpack_greeting,
    unpack_int,
)
from .sockets import tune, unshared

_RETRY_S = 0.05
# Seconds for one of the addresses that a name has: another one may be the one that this host reaches.
_ADDRESS_S = 10.0
# A server that too many strangers connect to drops connections that have not opened, which looks like a refused token.
_ATTEMPTS = 4
_READ = 1 << 18
# Python lets a socket wait for no more milliseconds than an int of C holds.
_LONGEST_S = 2e6
# Seconds beyond a wait that the server may take to answer that it ran out.
_GRACE_S = 5.0
# What a rank tells as it ends, and the seconds for which it lets another thread's request end first.
_LAST = (Op.ABORT, Op.LEAVE)
_ELSEWHERE_S = 0.5
# Bytes of an answer: the table of all values, and what comes with it.
_MOST_ANSWER = MAX_ANSWER + (16 << 20)


def _remedy(host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return (
            f"{socket.gethostname()} can't resolve that name. Have trainer rank 0 open the rendezvous at an address that all ranks "
            "reach, or make the name known to all hosts"
        )
    if is_loopback(host):
        return (
            f"That address is {socket.gethostname()} itself. Is trainer rank 0 up, and does it wait still? If it is on another host, "
            "have it open the rendezvous at an address that all ranks reach"
        )
    return (
        f"Is trainer rank 0 up? Does {socket.gethostname()} reach that address, and is the port open between the hosts? If trainer "
        "rank 0's host has several addresses, have it open the rendezvous at one that all ranks reach; policy.refit.port fixes the "
        "port"
    )


class _ClosedUnopened(Exception):
    """The server closed before it proved the token; worth another attempt."""


class Connection:
    """Sends one request at a time and receives its answer, each within a limit; safe to share between threads. What ends a rank does not
    wait for another thread's request, nor for an answer then.

    When a wait runs out, the server answers so. A server that does not answer at all (its host is frozen) gets the wait and a
    few seconds more, then counts as lost. The limit is for the whole request, even if the answer comes in small parts, or signals
    interrupt the wait. A signal's handler that runs within a request may give up or leave; what else it asks for is refused.

    Attributes:
        address: this host's own, on its way to the rendezvous.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, timeout_s: float, role: Role = Role.MEMBER):
        """Connect, and prove the token to each other.

        Args:
            rendezvous: where to connect.
            rank: refit-world rank of this process.
            timeout_s: seconds for connecting, and for a request that does not wait.
            role: ``MEMBER`` for the one connection whose end is this rank's end.

        Raises:
            RefitTimeout: nobody answers at the address.
            RefitError: the token is missing or another one, or the rank is taken.
            RefitMismatch: the rendezvous was opened for other numbers of ranks or another epoch, or trainer rank 0 runs
                another version of the protocol.
        """
        self._where = rendezvous.where
        self._rank = rank
        self._timeout_s = timeout_s
        # A thread may come to it twice: in the handler of a signal, in the middle of a request.
        self._lock = threading.RLock()
        # A frame at a time, if not all of them are of one thread.
        self._sending = threading.RLock()
        self._broken = ""
        # Requests whose answers have not been read: what comes is for the first of them.
        self._unanswered = 0
        self._incoming = bytearray()
        key = rendezvous.key
        self._deadline = time.monotonic() + timeout_s
        for attempts_left in reversed(range(_ATTEMPTS)):
            self._sock = self._connect(rendezvous.host, rendezvous.port)
            try:
                self._limit(self._deadline - time.monotonic())
                numbers = self._open(key, role, last=not attempts_left)
                break
            except _ClosedUnopened:
                self._sock.close()
                self._incoming.clear()
            except BaseException:
                self._sock.close()
                raise
        self._require_same(rendezvous, numbers)

    def request(
        self,
        op: Op,
        fields: Sequence[bytes],
        *,
        stage: str,
        wait_s: float = 0.0,
        limit_s: float | None = None,
    ) -> tuple[Status, list[bytes]]:
        """Send a request and return its answer.

        Args:
            op: what is asked.
            fields: as ``op`` has them.
            stage: for errors.
            wait_s: seconds that it asks the server to wait.
            limit_s: seconds for a request that does not wait, if they are other than the connection's.

        Raises:
            PeerLost: the connection broke, or the server stopped answering.
            RefitError: the request is larger than a message may be; nothing was sent.
        """
        body = pack_body(op, fields)
        if len(body) > MAX_MESSAGE:
            raise RefitError(
                f"what this rank has to tell is {len(body)} bytes, above the limit of {MAX_MESSAGE} for a message",
                stage=stage,
                rank=self._rank,
            )
        if limit_s is None:
            limit_s = wait_s + min(_GRACE_S, max(2.0, self._timeout_s / 2)) if wait_s else self._timeout_s
        # Another thread's request may wait for ranks that wait for this one to end.
        if not self._lock.acquire(timeout=_ELSEWHERE_S if op in _LAST else -1):
            return self._tell(op, body, stage)
        try:
            return self._exchange(op, body, stage, limit_s)
        finally:
            self._lock.release()

    def _exchange(self, op: Op, body: Body, stage: str, limit_s: float) -> tuple[Status, list[bytes]]:
        """Send ``body`` and read the answer, by the one thread that does; errors as of :meth:`request`."""
        if self._broken:
            self._lost(stage, self._broken)
        if self._unanswered:
            return self._tell(op, body, stage)
        self._unanswered = 1
        try:
            self._deadline = time.monotonic() + limit_s
            if limit_s != self._set_limit_s:
                self._limit(limit_s)
            with self._sending:
                self._send(self._ours.frame(body))
            # Rank 0 shares the interpreter with the server, which could not run meanwhile.
            if op is Op.MEET and self._rank:
                self._look_for_answer()
            status, answer = unpack_body(self._receive_frame())
            self._unanswered -= 1
            return Status(status), answer
        except TimeoutError:
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

    def _tell(self, op: Op, body: Body, stage: str) -> tuple[Status, list[bytes]]:
        """Send ``body`` without reading the answer: after an interrupt, and in another thread, what comes may be the answer to the earlier
        request."""
        if op not in _LAST:
            self._lost(stage, "an earlier request was interrupted, and what comes may be its answer")
        if not self._sending.acquire(timeout=_ELSEWHERE_S):
            self._break("another thread's request could not be sent to its end")
            self._lost(stage, self._broken)
        try:
            self._unanswered += 1
            self._send(self._ours.frame(body))
        except OSError as error:
            self._break(f"the connection ended: {error}")
            self._lost(stage, self._broken)
        finally:
            self._sending.release()
        return Status.OK, []

    def close(self) -> None:
        """End the connection; safe to call twice."""
        self._break("this rank has closed it")

    def _connect(self, host: str, port: int) -> socket.socket:
        while True:
            try:
                left = max(0.01, self._deadline - time.monotonic())
                sock = unshared(socket.create_connection((host, port), min(_ADDRESS_S, left)))
                tune(sock)
                self.address = str(sock.getsockname()[0])
                return sock
            except OSError as error:
                if time.monotonic() + _RETRY_S > self._deadline:
                    raise RefitTimeout(
                        f"no rendezvous at {self._where} within {self._timeout_s:.0f} s: {error}. {_remedy(host, error)}",
                        stage="rendezvous",
                        rank=self._rank,
                        blamed=0,
                    ) from error
                time.sleep(_RETRY_S)

    def _open(self, key: bytes, role: Role, last: bool) -> list[bytes]:
        """Prove the token to each other; returns what the rendezvous was opened for."""
        try:
            greeting = self._receive(GREETING_BYTES)
            try:
                version, server = unpack_greeting(greeting)
            except Malformed as error:
                self._refused(str(error))
            client = secrets.token_bytes(NONCE_BYTES)
            # With another version too: trainer rank 0 then tells all ranks why this one does not come.
            self._sock.sendall(pack_hello(key, server, client, self._rank, role, PROTOCOL_VERSION))
            if version != PROTOCOL_VERSION:
                raise RefitMismatch(
                    f"this rank runs version {PROTOCOL_VERSION} of rlrefit's protocol, and trainer rank 0 ({self._where}) "
                    f"runs version {version}. Nothing has moved; install the same rlrefit on all ranks",
                    stage="rendezvous",
                    rank=self._rank,
                    blamed=self._rank,
                )
            if not check_proof(self._receive(PROOF_BYTES), key, server, client, self._rank, role):
                self._refused("what listens there does not hold the token; it may be an impostor")
            self._ours = Signer(key, b"to server", server, client)
            self._theirs = Signer(key, b"to client", server, client)
            status, fields = unpack_body(self._receive_frame())
            if status != Status.OK:
                self._refused(b"; ".join(fields).decode(errors="replace"))
            return fields
        except TimeoutError as error:
            raise RefitTimeout(
                f"the rendezvous at {self._where} took the connection and did not answer within "
                f"{self._timeout_s:.0f} s; is the host of trainer rank 0 frozen?",
                stage="rendezvous",
                rank=self._rank,
                blamed=0,
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

    def _require_same(self, rendezvous: Rendezvous, opened_for: Sequence[bytes]) -> None:
        """A rank that counts the ranks otherwise would read answers wrongly."""
        ours = (rendezvous.train_ranks, rendezvous.gen_ranks, rendezvous.epoch)
        theirs = tuple(map(unpack_int, opened_for))
        if theirs == ours:
            return
        told, opened = (
            "{} trainer and {} generation ranks in epoch {}".format(*numbers)
            if len(numbers) == 3
            else "unknown"
            for numbers in (ours, theirs)
        )
        why = f"it was given a rendezvous of {told}, and trainer rank 0 opened it for {opened}"
        self.request(Op.ABORT, [why.encode()], stage="rendezvous")
        self.close()
        raise RefitMismatch(
            f"this rank can't join: {why}. Nothing has moved; hand over what trainer rank 0 opened, unchanged",
            stage="rendezvous",
            rank=self._rank,
            blamed=self._rank,
        )

    def _receive_frame(self) -> Body:
        length, signature = parse_header(self._receive(HEADER_BYTES), _MOST_ANSWER)
        body = Body(self._receive(length))
        self._theirs.check(signature, body)
        return body

    def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._sock.send(left) :]
            if left:
                self._limit_the_rest()

    def _receive(self, nbytes: int) -> bytes:
        while len(self._incoming) < nbytes:
            data = self._sock.recv(_READ)
            if not data:
                raise EOFError
            self._incoming += data
            if len(self._incoming) < nbytes:
                self._limit_the_rest()
        taken = bytes(memoryview(self._incoming)[:nbytes])
        del self._incoming[:nbytes]
        return taken

    def _look_for_answer(self) -> None:
        """Take in what comes soon, without a pause; where nothing does, it is left to be waited for."""
        until = time.monotonic() + SPIN_S
        self._sock.settimeout(0)
        try:
            while time.monotonic() < until:
                try:
                    data = self._sock.recv(_READ)
                except BlockingIOError:
                    os.sched_yield()
                    continue
                if not data:
                    raise EOFError
                self._incoming += data
                return
        finally:
            self._limit(self._deadline - time.monotonic())

    def _limit_the_rest(self) -> None:
        """Keep one limit for all parts of what is sent or received."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._limit(left)

    def _limit(self, seconds: float) -> None:
        """Let any one send or receive raise TimeoutError after ``seconds``, whatever signals come meanwhile."""
        # Not 0, which would not wait at all.
        self._sock.settimeout(min(max(seconds, 1e-3), _LONGEST_S))
        self._set_limit_s = seconds

    def _break(self, why: str) -> None:
        # What comes later on this connection would be read as the answer to something else.
        if not self._broken:
            self._broken = why
            with contextlib.suppress(OSError):  # it has ended
                # A thread that reads it would go on to do so on a socket that is only closed.
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def _lost(self, stage: str, why: str) -> Never:
        raise PeerLost(
            f"the rendezvous on trainer rank 0 ({self._where}) is lost: {why}. The epoch is over; an engine that was "
            "being written stays dirty.",
            stage=stage,
            rank=self._rank,
            blamed=0,
        )
