"""The rendezvous: one thread on trainer rank 0 serves the epoch's state to the ranks that hold the token."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from ..errors import RefitError
from .address import Rendezvous, is_loopback, joined
from .epoch_state import EpochState
from .frames import (
    HEADER_BYTES,
    HELLO_BYTES,
    MAX_MESSAGE,
    NO_RANK,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    SPIN_S,
    Body,
    Malformed,
    Op,
    Role,
    Signer,
    Status,
    check_hello,
    pack_body,
    pack_greeting,
    pack_int,
    parse_header,
    proof,
    unpack_body,
)
from .meeting import Answer
from .sockets import tune, unshared
from .world import RefitWorld

logger = logging.getLogger(__name__)

# Connections that have not proved the token yet: how many may be open beside the ranks' own, and for how many seconds. If
# there are more, the oldest is closed.
_MAX_STRANGERS = 256
_OPENING_S = 10.0
# Seconds without a new connection after descriptors or memory ran out. Open connections are served meanwhile.
_ACCEPT_AGAIN_S = 0.2
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Seconds between two log lines about refusals. The refusals between them are counted.
_LOG_EVERY = 10.0
# Seconds for which ranks that still read an answer are served: after close(), and when this process exits.
_LINGER_S, _EXIT_LINGER_S = 5.0, 1.0
_LONGEST_PAUSE_S = 3600.0
# Seconds for which a port that is asked for is waited for, and seconds between two looks.
_PORT_S, _PORT_AGAIN_S = 5.0, 0.02
_READ = 1 << 18
# Parts of answers in one system call.
_MOST_PARTS = 64
# Open files of this process without the ranks' connections, and connections of one rank: its own, its groups', NCCL's.
_FILES, _FILES_A_RANK = 1024, 4


@dataclass(eq=False)
class _Peer:
    """A connection from an address and port; ``rank`` is -1 until it has proved the token."""

    sock: socket.socket
    host: str
    port: int
    nonce: bytes
    deadline: float
    rank: int = -1
    role: Role = Role.MEMBER
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: deque[memoryview] = field(default_factory=deque)
    theirs: Signer | None = None
    ours: Signer | None = None

    @property
    def where(self) -> str:
        """Address and port."""
        return joined(self.host, self.port)


class RendezvousServer:
    """Listens on one interface and serves one epoch; see :func:`open_rendezvous`.

    Attributes:
        rendezvous: what the ranks need to join.
    """

    def __init__(self, listener: socket.socket, rendezvous: Rendezvous):
        self.rendezvous = rendezvous
        self._key = rendezvous.key
        _allow_files(_FILES + _FILES_A_RANK * rendezvous.size)
        world = RefitWorld(0, rendezvous.train_ranks, rendezvous.gen_ranks, rendezvous.epoch)
        self._state = EpochState(world)
        self._listener = listener
        self._strangers: dict[_Peer, None] = {}  # in the order in which they came
        self._members: dict[int, _Peer] = {}
        self._peers: set[_Peer] = set()
        self._refused, self._next_log = 0, 0.0
        self._accept_at: float | None = None
        self._closing: float | None = None
        self._linger_s = _LINGER_S
        self._wake, self._woken = map(unshared, socket.socketpair())
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="rlrefit-rendezvous", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    @property
    def entries(self) -> int:
        """Values and waits that the store holds at the moment."""
        return self._state.entries

    def close(self) -> None:
        """Accept no more connections. The thread ends once all ranks have left, or 5 s later; this call does not wait for it.

        The port is free a moment after this call; :func:`listen` waits for it.
        """
        self._end_within(_LINGER_S)

    def _exit(self) -> None:
        # Otherwise the thread stops with its connections open until the interpreter ends, and the ranks take this host for
        # a frozen one.
        self._end_within(_EXIT_LINGER_S)
        self._thread.join(2 * _EXIT_LINGER_S)

    def _end_within(self, seconds: float) -> None:
        self._linger_s = seconds
        with contextlib.suppress(OSError):  # it has ended by itself
            self._wake.send(b"\0")

    def _serve(self) -> None:
        try:
            while self._closing is None or (self._members and time.monotonic() < self._closing):
                ready = self._ready()
                now = time.monotonic()
                for key, events in ready:
                    if key.fileobj is self._listener:
                        self._accept(now)
                    elif key.fileobj is self._woken:
                        self._stop_listening(now)
                    else:
                        self._attend(key.data, events, now)
                if self._accept_at is not None and now >= self._accept_at and self._closing is None:
                    self._accept_at = None
                    self._selector.register(self._listener, selectors.EVENT_READ)
                if now >= self._state.next_deadline:
                    self._answer(self._state.expire(now))
                for late in [peer for peer in self._strangers if peer.deadline <= now]:
                    self._refuse(late, f"it did not open within {_OPENING_S:.0f} s")
        finally:
            atexit.unregister(self._exit)
            self._selector.close()
            for sock in (self._listener, self._woken, self._wake, *(peer.sock for peer in self._peers)):
                sock.close()

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for what comes next.

        While trainer rank 0 waits at a meeting, its thread leaves the interpreter to this one, which looks without a pause for
        the ranks that are still to come. At any other time that would slow its training down.
        """
        until = time.monotonic() + SPIN_S if self._state.host_meets else 0.0
        while time.monotonic() < until:
            if ready := self._selector.select(0):
                return ready
            os.sched_yield()
        return self._selector.select(self._pause())

    def _pause(self) -> float | None:
        oldest = next(iter(self._strangers), None)
        deadline = min(
            self._state.next_deadline,
            oldest.deadline if oldest is not None else float("inf"),
            self._closing if self._closing is not None else float("inf"),
            self._accept_at if self._accept_at is not None and self._closing is None else float("inf"),
        )
        if deadline == float("inf"):
            return None
        # Bounded, since a rank names its own deadline, and the selector takes no pause of months.
        return min(max(0.0, deadline - time.monotonic()), _LONGEST_PAUSE_S)

    def _stop_listening(self, now: float) -> None:
        self._woken.recv(64)
        if self._closing is not None:
            self._closing = min(self._closing, now + self._linger_s)
        else:
            self._closing = now + self._linger_s
            if self._accept_at is None:
                self._selector.unregister(self._listener)
            self._listener.close()
            for stranger in list(self._strangers):
                self._drop(stranger)

    def _accept(self, now: float) -> None:
        try:
            sock, address = self._listener.accept()
            unshared(sock)
        except OSError as error:
            self._log_refusal(f"a connection was not accepted: {error}")
            if error.errno in _EXHAUSTED:
                # The connection stays ready, so select would return at once each time.
                self._selector.unregister(self._listener)
                self._accept_at = now + _ACCEPT_AGAIN_S
            return
        sock.setblocking(False)
        tune(sock)
        peer = _Peer(sock, address[0], address[1], secrets.token_bytes(NONCE_BYTES), now + _OPENING_S)
        self._strangers[peer] = None
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._send(peer, pack_greeting(peer.nonce))
        if len(self._strangers) > _MAX_STRANGERS + self.rendezvous.size - len(self._members):
            self._refuse(next(iter(self._strangers)), "too many connections wait to open")

    def _attend(self, peer: _Peer, events: int, now: float) -> None:
        if peer not in self._peers:
            return  # dropped meanwhile
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if events & selectors.EVENT_READ and peer in self._peers:
            try:
                data = peer.sock.recv(_READ)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(peer)
                return
            peer.incoming += data
            try:
                self._take_in(peer, now)
            except Malformed as error:
                self._refuse(peer, str(error))

    def _take_in(self, peer: _Peer, now: float) -> None:
        if peer.rank < 0:
            if len(peer.incoming) < HELLO_BYTES:
                return
            self._admit(peer, bytes(peer.incoming[:HELLO_BYTES]), now)
            del peer.incoming[:HELLO_BYTES]
        while peer in self._peers and len(peer.incoming) >= HEADER_BYTES:
            length, signature = parse_header(bytes(peer.incoming[:HEADER_BYTES]), MAX_MESSAGE)
            end = HEADER_BYTES + length
            if len(peer.incoming) < end:
                return
            body = Body(memoryview(peer.incoming)[HEADER_BYTES:end])
            del peer.incoming[:end]
            assert peer.theirs is not None, "members sign"
            peer.theirs.check(signature, body)
            code, fields = unpack_body(body)
            self._answer(self._state.request(peer, peer.rank, code, fields, now))

    def _admit(self, peer: _Peer, hello: bytes, now: float) -> None:
        version, nonce, rank, role = check_hello(self._key, peer.nonce, hello)
        del self._strangers[peer]
        if version != PROTOCOL_VERSION:
            self._end_for_version(peer, rank, version, now)
            return
        peer.theirs = Signer(self._key, b"to server", peer.nonce, nonce)
        peer.ours = Signer(self._key, b"to client", peer.nonce, nonce)
        self._send(peer, proof(self._key, b"server", peer.nonce, nonce, rank, role))
        meeting = self.rendezvous
        if rank >= meeting.size:
            given = "what it was given as its rank" if rank == NO_RANK else f"rank {rank}"
            why = (
                f"{given} is not in the refit world of {meeting.size} ranks, which was opened for "
                f"{meeting.train_ranks} trainer and {meeting.gen_ranks} generation ranks"
            )
        elif role is Role.MEMBER and rank in self._members:
            why = f"rank {rank} has joined already, from {self._members[rank].where}; two processes were given one rank"
        else:
            peer.rank, peer.role = rank, role
            if role is Role.MEMBER:
                self._members[rank] = peer
                # On one host alone it would tell nothing.
                self._state.joined(rank, "" if is_loopback(peer.host) else peer.host)
            numbers = [pack_int(n) for n in (meeting.train_ranks, meeting.gen_ranks, meeting.epoch)]
            self._answer([(peer, pack_body(Status.OK, numbers))])
            return
        self._answer([(peer, pack_body(Status.REFUSED, [why.encode()]))])
        if len(self._members) < meeting.size:
            # Some rank's place stays empty, and all others would wait for it to their limit.
            self._answer(self._state.turned_away(rank if rank < meeting.size else -1, peer.host, why))
        self._refuse(peer, why)

    def _end_for_version(self, peer: _Peer, rank: int, version: int, now: float) -> None:
        """Tell all ranks that ``rank`` runs another version. It holds the token, and has read this side's version and left."""
        why = (
            f"it runs version {version} of rlrefit's protocol, and trainer rank 0 runs version {PROTOCOL_VERSION}; install "
            "the same rlrefit on all ranks"
        )
        if rank < self.rendezvous.size:
            self._answer(self._state.request(peer, rank, Op.ABORT, [why.encode()], now))
        self._refuse(peer, f"as rank {rank}, {why}")

    def _answer(self, answers: list[Answer]) -> None:
        for caller, body in answers:
            assert isinstance(caller, _Peer), "requests come from peers alone"
            if caller in self._peers and caller.ours is not None:
                self._send(caller, caller.ours.header(body), body)

    def _send(self, peer: _Peer, *parts: bytes) -> None:
        """Queue parts and send what the connection takes. Nothing is copied: all ranks may get the same long body."""
        waits = bool(peer.outgoing)
        peer.outgoing.extend(map(memoryview, parts))
        if not waits and not self._drain(peer):
            self._expect_room(peer, True)

    def _flush(self, peer: _Peer) -> None:
        if self._drain(peer):
            self._expect_room(peer, False)

    def _drain(self, peer: _Peer) -> bool:
        """Send what the connection takes; returns whether that was all."""
        try:
            while peer.outgoing:
                sent = peer.sock.sendmsg(list(islice(peer.outgoing, _MOST_PARTS)))
                while peer.outgoing and sent >= len(peer.outgoing[0]):
                    sent -= len(peer.outgoing.popleft())
                if sent:
                    peer.outgoing[0] = peer.outgoing[0][sent:]
        except BlockingIOError:
            return False
        except OSError:
            peer.outgoing.clear()  # the next read sees that the connection has ended
        return True

    def _expect_room(self, peer: _Peer, expect: bool) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if expect else 0)
        self._selector.modify(peer.sock, wanted, peer)

    def _refuse(self, peer: _Peer, why: str) -> None:
        who = f"refit rank {peer.rank}" if peer.rank >= 0 else "a stranger"
        self._log_refusal(f"{who} at {peer.where} was refused: {why}")
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        self._strangers.pop(peer, None)
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._state.forget(peer)
        if peer.rank >= 0 and peer.role is Role.MEMBER:
            del self._members[peer.rank]
            self._answer(self._state.lost(peer.rank))

    def _log_refusal(self, what: str) -> None:
        self._refused += 1
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_EVERY
            logger.warning("rendezvous: %s (%d since the start)", what, self._refused)


def open_rendezvous(
    host: str, train_ranks: int, gen_ranks: int, *, epoch: int = 0, port: int = 0
) -> RendezvousServer:
    """Start the rendezvous of an epoch on this host, with a new token. Trainer rank 0 calls it.

    Args:
        host: address of this host as the other ranks reach it; nothing listens on other interfaces.
        train_ranks: number of trainer ranks.
        gen_ranks: number of generation ranks over all replicas.
        epoch: number of the membership.
        port: TCP port; 0 takes any free one.

    Raises:
        RefitError: the port is still taken after some seconds, or the address is not this host's.
    """
    listener = listen(host, port)
    token = secrets.token_hex(32)
    taken = listener.getsockname()[1]
    return RendezvousServer(listener, Rendezvous(host, taken, train_ranks, gen_ranks, epoch, token))


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket for a :class:`RendezvousServer` that is made later, once the ranks are counted. They may connect at once.

    A port that is taken is waited for: the rendezvous of the last epoch gives it back a moment after it was closed.

    Raises:
        RefitError: the port is still taken after some seconds, or the address is not this host's.
    """
    deadline = time.monotonic() + _PORT_S
    while True:
        try:
            listener = _listen_now(host, port)
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_PORT_AGAIN_S)
                continue
            raise RefitError(
                f"port {port} on {host} can't be opened for the refit's rendezvous: {error}. {_remedy(error)}",
                stage="rendezvous",
            ) from error
        listener.setblocking(False)
        address = listener.getsockname()[0]
        if is_loopback(address) and not is_loopback(host):
            logger.warning(
                "the name %s is %s on this host, so that the refit's rendezvous listens where ranks of other hosts can't reach "
                "it. If there are some, open it at an address of this host that they reach, or correct /etc/hosts",
                host,
                address,
            )
        return listener


def _remedy(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "This host can't resolve the name: give an address, by which the other ranks reach this host."
    if error.errno == errno.EADDRINUSE:
        return "Another process holds it; set policy.refit.port to a free port, or to 0 for any."
    return "Give an address of this host, by which the other ranks reach it, and a port that it may open (policy.refit.port)."


def _listen_now(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = unshared(socket.socket(family, kind, protocol))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _allow_files(wanted: int) -> None:
    """Raise this process's soft limit of open files to what a large world needs, if the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
