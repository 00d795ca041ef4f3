"""Strangers, impostors, frozen hosts and malformed bytes at a live rendezvous: refused, and harmless."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import json
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlrefit.integration.control import Rendezvous, RendezvousServer, client, frames, listen, open_rendezvous
from rlrefit.integration.control import server as server_module
from rlrefit.integration.control.channel import Channel
from rlrefit.integration.control.epoch_state import EpochState
from rlrefit.integration.control.frames import Op, Role
from rlrefit.integration.control.world import RefitWorld
from rlrefit.integration.errors import PeerLost, RefitError, RefitMismatch, RefitTimeout
from tests.faults.network import Network
from tests.faults.trials import Kind
from tests.spawn import free_port, processes

from .meeting import join, on_all_ranks

WORLD = RefitWorld(0, 1, 1)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = open_rendezvous("127.0.0.1", 1, 1)
    yield server
    server.close()


@pytest.fixture
def first(server: RendezvousServer) -> Iterator[Channel]:
    """Rank 0, which has joined."""
    channel = join(server, 0)
    yield channel
    channel.close()


def knock(meeting: Rendezvous) -> tuple[socket.socket, bytes]:
    """Connect without the token; the socket, and the nonce that the server greeted with."""
    sock = knock_only(meeting)
    greeting = b""
    while len(greeting) < frames.GREETING_BYTES:
        greeting += sock.recv(frames.GREETING_BYTES)
    return sock, frames.unpack_greeting(greeting)[1]


def closed_by_the_server(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_token_is_random_stays_out_of_texts_and_travels_only_as_plain_data(
    server: RendezvousServer,
) -> None:
    meeting = server.rendezvous
    other = open_rendezvous("127.0.0.1", 1, 1)
    other.close()
    assert meeting.token != other.rendezvous.token
    assert meeting.token not in f"{meeting} {meeting!r}"
    assert Rendezvous.from_json(meeting.to_json()) == meeting


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"port": "80"}, "port"),
        ({"port": 0}, "port"),
        ({"train_ranks": True}, "train_ranks"),
        ({"gen_ranks": 0}, "gen_ranks"),
        ({"token": None}, "token"),
        ({"hots": "x"}, "hots"),
    ],
)
def test_a_rendezvous_that_was_changed_on_its_way_is_refused_by_field(
    server: RendezvousServer, change: dict[str, object], named: str
) -> None:
    with pytest.raises(RefitError, match=named):
        Rendezvous.from_json(server.rendezvous.to_json() | change)
    without = server.rendezvous.to_json()
    del without["epoch"]
    with pytest.raises(RefitError, match="epoch"):
        Rendezvous.from_json(without)


@pytest.mark.parametrize("handed", ["nothing", "its text", "its keys"])
def test_a_rank_that_was_given_no_rendezvous_is_told_so_without_the_token(
    server: RendezvousServer, handed: str
) -> None:
    opened = server.rendezvous.to_json()
    given = {"nothing": None, "its text": json.dumps(opened), "its keys": [*opened.values()]}[handed]
    with pytest.raises(RefitError) as refused:
        Rendezvous.from_json(given)
    assert (refused.value.stage, opened["token"] in str(refused.value)) == ("rendezvous", False)


@pytest.mark.parametrize(
    ("token", "said"), [("", "no token"), ("f" * 63, "no token"), ("0" * 64, "another token")]
)
def test_without_the_token_nobody_joins(server: RendezvousServer, token: str, said: str) -> None:
    with pytest.raises(RefitError, match=said):
        Channel(dataclasses.replace(server.rendezvous, token=token), WORLD, 2.0)
    assert all(on_all_ranks(server, lambda _, channel: not channel.barrier("b")))


def test_a_wait_of_months_does_not_end_the_server(server: RendezvousServer) -> None:
    rank = Channel(server.rendezvous, WORLD, 1e7)
    waiting = threading.Thread(target=lambda: rank.barrier("late"), daemon=True)
    waiting.start()
    time.sleep(0.3)
    assert server._thread.is_alive()
    other = Channel(server.rendezvous, RefitWorld(1, 1, 1), 5.0)
    other.barrier("late")
    waiting.join(20.0)
    assert not waiting.is_alive()
    rank.close()
    other.close()


def test_it_listens_on_its_own_interface_only(server: RendezvousServer) -> None:
    # All of 127/8 is this host, so that a listener on 0.0.0.0 would answer here as well.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.rendezvous.port), 2.0)


def test_an_address_of_another_host_can_not_be_opened() -> None:
    with pytest.raises(RefitError, match=r"192\.0\.2\.1"):
        open_rendezvous("192.0.2.1", 1, 1)


def test_a_process_that_can_be_no_rank_is_told_so_and_ends_the_epoch_only_while_a_place_is_empty(
    server: RendezvousServer, first: Channel
) -> None:
    second = join(server, 1)
    with pytest.raises(RefitError, match="joined already"):
        join(server, 0)
    with pytest.raises(RefitError, match="rank 7"):
        Channel(server.rendezvous, RefitWorld(7, 4, 4), 2.0)
    first.check_abort("still there")
    second.close()
    with pytest.raises(RefitError, match="joined already"):
        join(server, 0)
    with pytest.raises(PeerLost, match="joined already"):
        first.check_abort("transfer")


def test_a_rank_of_another_protocol_version_and_all_others_hear_of_both_versions(
    server: RendezvousServer, first: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PROTOCOL_VERSION", frames.PROTOCOL_VERSION + 1)
    with pytest.raises(RefitMismatch) as refused:
        join(server, 1)
    with pytest.raises(PeerLost) as told:
        first.barrier("ready")
    for error in (refused.value, told.value):
        assert error.blamed == 1
        assert f"version {frames.PROTOCOL_VERSION}" in str(error)
        assert f"version {frames.PROTOCOL_VERSION + 1}" in str(error)


def test_a_recorded_opening_does_not_admit_a_stranger(server: RendezvousServer) -> None:
    sock, nonce = knock(server.rendezvous)
    recorded = frames.pack_hello(server.rendezvous.key, nonce, b"c" * 16, 0, Role.MEMBER)
    sock.sendall(recorded)
    assert len(sock.recv(100)) > 0
    replay, _ = knock(server.rendezvous)
    replay.sendall(recorded)
    assert closed_by_the_server(replay)
    sock.close()
    replay.close()


@pytest.mark.parametrize("kind", ["unsigned", "too large", "unknown request"])
def test_a_member_that_sends_what_no_member_would_is_cut_off_and_the_others_are_told(
    server: RendezvousServer, first: Channel, kind: str
) -> None:
    bad, good = first, join(server, 1)
    raw = bad._connection._sock
    if kind == "unsigned":
        body = frames.pack_body(Op.ABORT, [b"forged"])
        raw.sendall(len(body).to_bytes(4, "little") + b"\0" * 16 + body)
    elif kind == "too large":
        raw.sendall((frames.MAX_MESSAGE + 1).to_bytes(4, "little") + b"\0" * 16)
    else:
        raw.sendall(bad._connection._ours.frame(frames.pack_body(200, [b"?"])))
    for channel in (good, bad):
        with pytest.raises(PeerLost) as lost:
            channel.barrier("b")
        assert lost.value.blamed == 0
    good.close()


def test_an_answer_that_was_changed_on_the_way_ends_the_connection_and_is_not_read(first: Channel) -> None:
    # What comes from the server now looks changed.
    first._connection._theirs = frames.Signer(b"another key", b"to client", b"s" * 16, b"c" * 16)
    with pytest.raises(PeerLost, match="signature"):
        first.check_abort("transfer")


def test_garbage_of_any_kind_leaves_a_running_epoch_alone(
    server: RendezvousServer, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(7)
    done = threading.Event()
    sent: list[bytes] = []

    def stranger() -> None:
        while not done.is_set():
            sock, nonce = knock(server.rendezvous)
            hello = frames.pack_hello(b"x" * 32, nonce, b"c" * 16, 0, Role.MEMBER)
            kinds = [rng.randbytes(rng.randrange(1, 4000)), hello, hello[: rng.randrange(frames.HELLO_BYTES)]]
            kinds += [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\xff" * (1 << 20)]
            sent.append(kinds[len(sent) % 5])
            with contextlib.suppress(OSError):  # the server may refuse it before it has sent all
                sock.sendall(sent[-1])
            sock.close()

    thread = threading.Thread(target=stranger)

    def body(rank: int, channel: Channel) -> bool:
        if rank == 0:
            thread.start()
        for index in range(200):
            # Some come between the votes, however the threads run.
            while rank == 0 and len(sent) < index // 18 and thread.is_alive():
                time.sleep(0.001)
            assert channel.vote(f"v/{index}", [rank, index]) == [[0, index], [1, index]]
        return True

    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        results = on_all_ranks(server, body)
    done.set()
    thread.join()
    assert results == [True, True]
    assert len(sent) >= 10
    refusals = [record for record in caplog.records if "was refused" in record.getMessage()]
    most = 3 + (time.monotonic() - start) / server_module._LOG_EVERY
    assert 1 <= len(refusals) <= most, "strangers must not be able to fill the log"
    assert server.rendezvous.token not in caplog.text


@given(garbage=st.binary(min_size=frames.HELLO_BYTES, max_size=300) | st.none())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(garbage=None)
def test_any_opening_but_a_members_is_closed_without_an_answer_and_ends_nothing(
    server: RendezvousServer, first: Channel, garbage: bytes | None
) -> None:
    sock, nonce = knock(server.rendezvous)
    # A stranger may be of another protocol version, too.
    other = frames.pack_hello(b"x" * 32, nonce, b"c" * 16, 1, Role.MEMBER, frames.PROTOCOL_VERSION + 1)
    sock.sendall(other if garbage is None else garbage)
    assert closed_by_the_server(sock)
    first.check_abort("still there")
    sock.close()


def test_silent_strangers_are_dropped_in_time_and_never_too_many_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_OPENING_S", 0.3)
    monkeypatch.setattr(server_module, "_MAX_STRANGERS", 8)
    server = open_rendezvous("127.0.0.1", 1, 1)
    silent = [knock(server.rendezvous)[0] for _ in range(20)]
    assert all(on_all_ranks(server, lambda _, channel: not channel.barrier("b")))
    for sock in silent:
        sock.settimeout(20.0)
        assert closed_by_the_server(sock)
        sock.close()
    server.close()


@pytest.mark.parametrize(
    "greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n" * 3, frames.pack_greeting(b"n" * 16) + b"p" * 32]
)
def test_what_listens_there_without_the_token_is_recognized_as_no_rendezvous(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        meeting = Rendezvous("127.0.0.1", impostor.getsockname()[1], 1, 1, 0, "a" * 64)
        held = []

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(impostor.accept()[0])
                    held[-1].sendall(greeting)

        thread = threading.Thread(target=answer)
        thread.start()
        start = time.monotonic()
        # An empty greeting is a host that is frozen: the connection stands and nothing comes.
        with pytest.raises(RefitError) as caught:
            Channel(meeting, WORLD, 20.0 if greeting else 1.0)
        assert isinstance(caught.value, RefitTimeout) is (not greeting)
        assert time.monotonic() - start < 10.0
        impostor.shutdown(socket.SHUT_RDWR)
        thread.join()
        for sock in held:
            sock.close()


@pytest.mark.parametrize("joined", [False, True])
def test_an_answer_that_trickles_in_has_one_limit_for_all_of_it(
    server: RendezvousServer, joined: bool
) -> None:
    limit = 2.0
    network = Network(server.rendezvous, 0.4)
    start = time.monotonic()
    if joined:
        channel = Channel(network.rendezvous, WORLD, limit)
        network.go_bad(Kind.DRIPPED, 0.0)
        with pytest.raises(PeerLost) as caught:
            channel.check_abort("transfer")
        channel.close()
    else:
        network.go_bad(Kind.DRIPPED, 0.0)
        with pytest.raises(RefitTimeout) as caught:  # type: ignore[assignment]
            Channel(network.rendezvous, WORLD, limit)
    assert time.monotonic() - start < 10 * limit  # each byte alone would have as long
    assert caught.value.blamed == 0
    network.close()


def knock_only(meeting: Rendezvous) -> socket.socket:
    return socket.create_connection((meeting.host, meeting.port), 5.0)


def takes_connections(meeting: Rendezvous) -> bool:
    try:
        knock_only(meeting).close()
    # The kernel resets a connection that is half made as the listener closes.
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    return True


class Exhausted:
    """A listener whose process has no descriptor left, for as long as ``out`` is set."""

    def __init__(self, listener: socket.socket):
        self.listener, self.fileno, self.close = listener, listener.fileno, listener.close
        self.out, self.asked = threading.Event(), 0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.out.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listener.accept()


def test_a_server_without_descriptors_serves_who_is_there_at_rest_and_drops_nobody() -> None:
    listener = Exhausted(listen("127.0.0.1"))
    port = listener.listener.getsockname()[1]
    server = RendezvousServer(listener, Rendezvous("127.0.0.1", port, 1, 1, 0, "a" * 64))  # type: ignore[arg-type]
    member = join(server, 0)
    opening, nonce = knock(server.rendezvous)  # a rank that has not proved the token yet
    listener.out.set()
    listener.asked = 0
    late = knock_only(server.rendezvous)
    clock = time.pthread_getcpuclockid(server._thread.ident or 0)
    cpu, start = time.clock_gettime(clock), time.monotonic()
    for _ in range(5):
        member.check_abort("transfer")
        time.sleep(0.2)
    assert time.clock_gettime(clock) - cpu < 0.3
    assert 1 <= listener.asked <= 3 + (time.monotonic() - start) / server_module._ACCEPT_AGAIN_S
    opening.sendall(frames.pack_hello(server.rendezvous.key, nonce, b"c" * 16, 1, Role.MEMBER))
    opening.settimeout(5.0)
    assert len(opening.recv(frames.PROOF_BYTES)) == frames.PROOF_BYTES, "who was opening is admitted"
    opening.close()
    listener.out.clear()
    late.settimeout(5.0)
    assert late.recv(len(frames.MAGIC)) == frames.MAGIC, "and who came meanwhile is heard once there is room"
    late.close()
    member.close()
    server.close()


def test_a_rank_that_counts_the_ranks_otherwise_is_refused_by_both_numbers_and_all_are_told(
    server: RendezvousServer, first: Channel
) -> None:
    other = dataclasses.replace(server.rendezvous, gen_ranks=3)
    with pytest.raises(RefitMismatch, match=r"3 generation .* 1 generation") as caught:
        Channel(other, RefitWorld(1, 1, 3), 2.0)
    with pytest.raises(PeerLost) as heard:
        first.barrier("b")
    assert caught.value.blamed == heard.value.blamed == 1


def test_nobody_at_the_address_is_a_timeout_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(RefitTimeout, match=f"127.0.0.1:{port}"):
        Channel(Rendezvous("127.0.0.1", port, 1, 1, 0, "a" * 64), WORLD, 0.5)


def test_closing_admits_nobody_any_more_and_serves_those_who_are_there_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_LINGER_S", 60.0)
    server = open_rendezvous("127.0.0.1", 1, 1)
    channels = [join(server, rank) for rank in range(2)]
    start = time.monotonic()
    server.close()
    while takes_connections(server.rendezvous):  # until its thread comes to it
        assert time.monotonic() - start < 20
        time.sleep(0.01)
    waiting = threading.Thread(target=lambda: channels[0].barrier("last"))
    waiting.start()
    channels[1].barrier("last")
    waiting.join()
    for channel in channels:
        channel.close()
    server._thread.join(20.0)
    assert not server._thread.is_alive(), "with its last rank the thread ends"


def test_a_port_that_is_given_serves_epoch_after_epoch_of_one_process() -> None:
    port, members = free_port(), []
    for epoch in range(10):
        server = open_rendezvous("127.0.0.1", 1, 1, epoch=epoch, port=port)
        assert server.rendezvous.port == port
        members.append(join(server, 0))  # whose connection is still there as the next one listens
        server.close()
    for member in members:
        member.close()


def test_a_port_that_another_holds_is_refused_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_PORT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        start = time.monotonic()
        with pytest.raises(RefitError, match=r"policy\.refit\.port") as refused:
            open_rendezvous("127.0.0.1", 1, 1, port=other.getsockname()[1])
        assert 0.3 <= time.monotonic() - start < 10
    assert refused.value.stage == "rendezvous"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1)])
def test_a_meeting_that_is_complete_releases_the_rank_beside_the_server_last(order: tuple[int, ...]) -> None:
    # The interpreter is theirs together: rank 0 would compute while the server has answers left to send.
    state = EpochState(RefitWorld(0, 2, 2))
    answers = []
    for rank in order:
        fields = [b"begin/0", frames.pack_int(1000), b"\1", b"\0", b"", b"7"]
        answers = state.request(f"connection {rank}", rank, Op.MEET, fields, 0.0)
    callers = [caller for caller, _ in answers]
    assert sorted(map(str, callers)) == [f"connection {rank}" for rank in range(4)]
    assert callers[-1] == "connection 0"


def test_the_server_is_in_haste_only_while_the_rank_beside_it_waits_at_a_meeting() -> None:
    # At any other time it would take the interpreter from the training beside it.
    state = EpochState(RefitWorld(0, 1, 2))
    haste = []
    for number in range(2):
        for rank in (1, 0, 2):
            fields = [b"begin/%d" % number, frames.pack_int(1000), b"\1", b"\0", b"", b"7"]
            state.request(f"connection {rank}", rank, Op.MEET, fields, 0.0)
            haste.append(state.host_meets)
    assert haste == [False, True, False] * 2


def _open_and_exit(pipe: Connection) -> None:
    server = open_rendezvous("127.0.0.1", 1, 1)
    pipe.send(server.rendezvous.to_json())
    pipe.recv()


def test_a_process_that_exits_without_closing_it_ends_the_others_waits_at_once() -> None:
    context = processes()
    pipe, theirs = context.Pipe()
    process = context.Process(target=_open_and_exit, args=(theirs,))
    process.start()
    channel = Channel(Rendezvous.from_json(pipe.recv()), WORLD, 30.0)
    threading.Timer(0.2, pipe.send, ["exit"]).start()
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rendezvous on trainer rank 0"):
        channel.barrier("b")
    assert time.monotonic() - start < 20
    channel.close()
    process.join(10)
    assert process.exitcode == 0


def _open_and_fork(pipe: Connection) -> None:
    server = open_rendezvous("127.0.0.1", 1, 2)
    member = join(server, 1)
    if (short := os.fork()) == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(short, 0)
    if os.fork() == 0:
        with contextlib.suppress(EOFError):
            pipe.recv()
        os._exit(0)
    pipe.send(server.rendezvous.to_json())
    member.barrier("never")


def test_processes_that_a_rank_forked_end_nothing_of_it_and_hold_nothing_after_it() -> None:
    context = processes()
    pipe, theirs = context.Pipe()
    process = context.Process(target=_open_and_fork, args=(theirs,))
    process.start()
    theirs.close()
    meeting = Rendezvous.from_json(pipe.recv())
    channel = Channel(meeting, RefitWorld(0, 1, 2), 60.0)  # one child has ended
    threading.Timer(0.2, process.kill).start()
    start = time.monotonic()
    with pytest.raises(PeerLost):
        channel.barrier("b")
    open_rendezvous("127.0.0.1", 1, 1, port=meeting.port).close()
    assert time.monotonic() - start < 20
    channel.close()
    process.join(10)
    pipe.close()  # and so the other child ends


@pytest.fixture
def interrupted(server: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """Rank 0, whose requests a frozen server leaves unanswered, and whose waits a signal interrupts again and again."""
    channel = join(server, 0, 1.0)
    monkeypatch.setattr(server._state, "request", lambda *_: [])
    earlier = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    yield channel
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, earlier)
    channel.close()


def test_signals_do_not_lengthen_a_wait(interrupted: Channel) -> None:
    start = time.monotonic()
    with pytest.raises(PeerLost, match="did not answer"):
        interrupted.check_abort("transfer")
    assert time.monotonic() - start < 10


def test_a_signals_handler_may_leave_in_the_middle_of_a_wait_and_ask_for_nothing(
    interrupted: Channel,
) -> None:
    refused = []

    def leave(*_: object) -> None:
        try:
            interrupted.check_abort("transfer")
        except PeerLost as error:
            refused.append(error)
        interrupted.close()

    signal.signal(signal.SIGALRM, leave)
    with pytest.raises(PeerLost, match="closed"):
        interrupted.barrier("b")
    assert "may be its answer" in str(refused[0])
