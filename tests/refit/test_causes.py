"""Why an epoch ended: the rank that was the first to fail is named to all, however the others noticed it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlrefit.integration.comm.torch_group import TorchGroup
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.control.channel import Channel
from rlrefit.integration.control.epoch_state import PATIENCE_S, EpochState
from rlrefit.integration.control.frames import Op, Status, pack_int, unpack_body, unpack_int
from rlrefit.integration.control.world import RefitWorld
from rlrefit.integration.errors import PeerLost, RefitError, RefitTimeout
from rlrefit.integration.session import RefitSession
from tests.spawn import processes

from .meeting import join, on_all_ranks
from .synthetic import ended, refit_changed, run_world, world

SIZE = 4
PATIENCE = pack_int(1000)


class Epoch:
    """A state whose callers are the ranks; ``heard`` is what each was answered last."""

    def __init__(self) -> None:
        self.state = EpochState(RefitWorld(0, 2, 2))
        self.heard: dict[Any, tuple[Status, list[bytes]]] = {}

    def ask(self, rank: int, op: Op, fields: list[bytes], now: float) -> None:
        self._take(self.state.request(rank, rank, op, fields, now))

    def meet(self, rank: int, now: float, seconds: float = 100.0, topic: bytes = b"commit") -> None:
        self.ask(rank, Op.MEET, [topic, pack_int(int(seconds * 1e3)), b"\1", b"\0", b"", b"null"], now)

    def notice(self, rank: int, now: float) -> None:
        """The rank's wire breaks, and it asks why."""
        self.ask(rank, Op.ABORT, [b"PeerLost: the wire broke", PATIENCE], now)
        del self.heard[rank]
        self.ask(rank, Op.CAUSE, [PATIENCE], now)

    def lose(self, rank: int) -> None:
        self._take(self.state.lost(rank))

    def pass_time(self, now: float) -> None:
        self._take(self.state.expire(now))

    def blamed(self, *ranks: int) -> set[int]:
        return {unpack_int(self.heard[rank][1][0]) for rank in ranks}

    def _take(self, answers: list[Any]) -> None:
        for caller, body in answers:
            code, fields = unpack_body(body)
            self.heard[caller] = Status(code), fields


@pytest.mark.parametrize("cause", ["dies", "fails", "leaves"])
@pytest.mark.parametrize("order", [*itertools.permutations([0, 1, 2])])
def test_a_cause_that_comes_after_what_others_noticed_of_it_is_what_all_are_told(
    cause: str, order: tuple[int, ...]
) -> None:
    epoch = Epoch()
    first, second, third = order
    epoch.notice(first, 10.0)
    epoch.meet(second, 10.1)
    if cause == "dies":
        epoch.lose(3)
    elif cause == "fails":
        epoch.ask(3, Op.ABORT, [b"ValueError: the loader failed"], 10.2)
    else:
        epoch.ask(3, Op.LEAVE, [], 10.2)
    epoch.notice(third, 10.3)
    epoch.pass_time(10.1 + PATIENCE_S)
    assert {epoch.heard[rank][0] for rank in order} == {Status.ABORTED}
    assert epoch.blamed(*order) == {3}


@pytest.mark.parametrize("order", [(3, 0), (0, 3)])
def test_a_rank_that_has_closed_its_session_is_not_waited_for(order: tuple[int, int]) -> None:
    epoch = Epoch()
    for rank in order:
        if rank == 3:
            epoch.ask(3, Op.LEAVE, [], 10.0)
        else:
            epoch.meet(rank, 10.0)
    assert epoch.blamed(0) == {3}


def test_a_rank_that_says_nothing_is_to_blame_and_not_the_neighbours_that_noticed_each_other() -> None:
    epoch = Epoch()
    epoch.meet(2, 5.0)  # has all that it wants, and waits for the others
    epoch.notice(0, 40.0)  # of the frozen one
    epoch.notice(1, 40.1)  # of rank 0, which has closed its wires
    epoch.pass_time(40.9)
    assert 2 not in epoch.heard
    epoch.pass_time(41.0)
    assert epoch.blamed(0, 1, 2) == {3}


def test_a_meeting_that_runs_out_names_who_is_silent_and_not_who_waits_for_it_on_the_wire() -> None:
    epoch = Epoch()
    for rank in (0, 2):
        epoch.meet(rank, 5.0, seconds=30.0)
    epoch.pass_time(35.0)
    epoch.notice(1, 35.1)  # its own wait ends a little later
    epoch.pass_time(36.0)
    assert [epoch.heard[rank] for rank in (0, 2)] == [
        (Status.TIMEOUT, [pack_int(3), b"generation rank 1 (refit rank 3)"])
    ] * 2
    assert epoch.blamed(1) == {3}


def test_trainer_rank_0_hears_the_cause_last_since_the_rendezvous_may_end_with_it() -> None:
    epoch = Epoch()
    epoch.notice(0, 10.0)
    epoch.lose(3)
    epoch.notice(1, 10.2)
    assert epoch.blamed(1) == {3}
    assert 0 not in epoch.heard
    epoch.notice(2, 10.3)
    assert epoch.blamed(0, 2) == {3}


def test_trainer_rank_0_does_not_wait_for_long_for_those_who_have_not_noticed_yet() -> None:
    epoch = Epoch()
    epoch.notice(0, 10.0)
    epoch.lose(3)
    epoch.pass_time(10.9)
    assert 0 not in epoch.heard
    epoch.pass_time(11.0)
    assert epoch.blamed(0) == {3}


def test_a_wire_that_breaks_between_the_living_is_told_by_who_noticed_it_first() -> None:
    epoch = Epoch()
    epoch.meet(0, 9.9)
    epoch.meet(3, 9.9)
    epoch.notice(2, 10.0)
    epoch.notice(1, 10.1)
    epoch.pass_time(11.0)
    assert epoch.blamed(*range(SIZE)) == {2}


def test_a_cause_replaces_a_guess_but_what_becomes_of_those_who_know_does_not() -> None:
    epoch = Epoch()
    for rank in (0, 1, 2):
        epoch.notice(rank, 10.0)
    epoch.pass_time(11.0)
    assert epoch.blamed(0, 1, 2) == {3}
    epoch.lose(1)  # it raises what it was told, and its process ends
    epoch.ask(2, Op.ABORT, [b"RefitError: a consequence"], 12.0)
    epoch.ask(0, Op.LOOK, [], 12.0)
    assert epoch.blamed(0) == {3}
    guess = epoch.heard[0][1][1]
    epoch.lose(3)
    epoch.ask(0, Op.LOOK, [], 13.0)
    assert epoch.blamed(0) == {3}
    assert epoch.heard[0][1][1] != guess


@pytest.mark.parametrize("failing", [1, 3])
def test_an_exception_of_one_rank_is_what_all_the_others_blame_whatever_they_were_doing(failing: int) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("out of memory")

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit_changed(session, endpoint, 1)
        if rank == failing:
            # In the middle of the exchanges that the others wait for.
            setattr(session.engine, "send_weights" if session.world.is_source else "receive_weights", fail)
        return ended(session, 2)

    results = run_world(*world(2), body, RefitConfig(bucket_mb=1, timeout_s=20.0))
    assert isinstance(results.pop(failing), ValueError)
    for error in results:
        assert isinstance(error, PeerLost)
        assert error.blamed == failing
        assert "out of memory" in str(error)


def test_a_group_in_the_making_hears_of_a_rank_that_gives_up() -> None:
    server = open_rendezvous("127.0.0.1", 1, 2)

    def body(rank: int, channel: Channel) -> Any:
        if rank == 2:
            time.sleep(0.5)
            channel.abort("ValueError: no room for a bucket")
            return None
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            TorchGroup.open(channel.store, "g", rank, 3, torch.device("cpu"), 20.0, channel.check_abort)
        return channel.cause_of(caught.value).blamed, time.monotonic() - start  # type: ignore[attr-defined]

    results = on_all_ranks(server, body, timeout_s=20.0)[:2]
    server.close()
    assert [blamed for blamed, _ in results] == [2, 2]
    assert all(seconds < 15 for _, seconds in results)


def _freeze_while_it_connects(meeting: dict[str, Any]) -> None:
    channel = Channel(Rendezvous.from_json(meeting), RefitWorld(2, 1, 2), 3.0)
    store = channel.store
    tell = store.set

    def told(key: str, value: bytes) -> None:
        tell(key, value)
        os.kill(os.getpid(), signal.SIGSTOP)  # its address is known, and the kernel takes connections for it

    store.set = told  # type: ignore[method-assign,assignment]
    TorchGroup.open(store, "g", 2, 3, torch.device("cpu"), 3.0, channel.check_abort)


def test_a_rank_that_freezes_while_gloo_connects_is_named_within_the_limit() -> None:
    limit = 3.0
    server = open_rendezvous("127.0.0.1", 1, 2)
    frozen = processes().Process(target=_freeze_while_it_connects, args=(server.rendezvous.to_json(),))
    frozen.start()

    def open_together(rank: int, channel: Channel) -> None:
        # One of two ranks may believe that it is connected.
        TorchGroup.open(channel.store, "g", rank, 3, torch.device("cpu"), limit, channel.check_abort)
        channel.barrier("ready")

    def run(rank: int) -> Any:
        channel = join(server, rank, limit)
        start = time.monotonic()
        with channel.within(start), pytest.raises((PeerLost, RefitTimeout)) as caught:
            open_together(rank, channel)
        channel.give_up(caught.value)
        cause = channel.cause_of(caught.value)
        seconds = time.monotonic() - start
        channel.close()
        return cause, seconds

    try:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(run, range(2)))
    finally:
        frozen.kill()
        frozen.join()
        server.close()
    for cause, seconds in results:
        assert cause.blamed == 2  # type: ignore[attr-defined]
        assert seconds < limit + PATIENCE_S + 10.0


def test_opening_has_one_limit_for_all_of_its_waits() -> None:
    """Each rank is late for another meeting, none by more than half of the limit."""
    limit = 2.0
    server = open_rendezvous("127.0.0.1", 2, 2)

    def late_in_turn(rank: int, channel: Channel) -> None:
        for index in range(SIZE):
            if index == rank:
                time.sleep(0.5 * limit)
            channel.barrier(f"b/{index}")

    def body(rank: int, channel: Channel) -> Any:
        start = time.monotonic()
        with channel.within(start), pytest.raises(RefitError) as caught:
            late_in_turn(rank, channel)
        return caught.value, time.monotonic() - start

    results = on_all_ranks(server, body, timeout_s=limit)
    server.close()
    assert all(isinstance(error, (RefitTimeout, PeerLost)) for error, _ in results)
    assert all(seconds < SIZE * 0.5 * limit for _, seconds in results)


def test_a_rank_whose_own_work_took_all_of_the_limit_blames_nobody_else() -> None:
    server = open_rendezvous("127.0.0.1", 1, 1)
    channel = join(server, 0, timeout_s=0.2)
    with pytest.raises(RefitTimeout) as caught, channel.within(time.monotonic() - 1.0):
        channel.vote("late", None)
    assert caught.value.blamed == -1
    channel.close()
    server.close()


def test_a_store_that_is_closed_ends_the_waits_of_other_threads() -> None:
    server = open_rendezvous("127.0.0.1", 1, 1)
    channel = join(server, 0, timeout_s=30.0)
    store = channel.store
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(PeerLost):
            store.get("never")
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    store.close()
    assert ended.wait(20)
    thread.join()
    channel.close()
    server.close()


def test_a_rank_that_is_interrupted_while_it_reads_an_answer_tells_all_of_it_at_once() -> None:
    def meet_twice(channel: Channel) -> None:
        # It gives up before the last rank has come to the first, or after.
        for topic in ("begin", "commit"):
            channel.barrier(topic)

    def body(rank: int, channel: Channel) -> Any:
        start = time.monotonic()
        if rank == 1:
            connection = channel._connection

            def interrupted(nbytes: int) -> bytes:
                connection._incoming += b"the answer that is not read to its end"
                raise KeyboardInterrupt

            connection._receive = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt) as caught:
                channel.barrier("begin")
            channel.give_up(caught.value)
            return 1, time.monotonic() - start
        with pytest.raises(PeerLost) as lost:
            meet_twice(channel)
        return lost.value.blamed, time.monotonic() - start

    server = open_rendezvous("127.0.0.1", 1, 2)
    try:
        found = on_all_ranks(server, body, timeout_s=20.0)
    finally:
        server.close()
    assert [blamed for blamed, _ in found] == [1] * len(found)
    assert all(seconds < 15 for _, seconds in found)
