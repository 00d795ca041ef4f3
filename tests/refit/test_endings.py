"""What a rank is left with when a refit ends early: whether it may serve, what is closed, and which error is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlrefit.integration import transport
from rlrefit.integration.broadcast import packed
from rlrefit.integration.comm.group import Group
from rlrefit.integration.comm.torch_group import TorchGroup
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.engine import bulk, shared_scales
from rlrefit.integration.errors import EngineDirty, PeerLost, RefitError, RefitMismatch, end_all
from rlrefit.integration.session import RefitSession, ServingState

from .synthetic import ended, move, refit_changed, run_world, world

ENGINE = 2  # the first engine rank of `world`
Ending = Callable[[RefitSession], Any]


def interrupted(session: RefitSession) -> Any:
    raise KeyboardInterrupt


def cut_off(session: RefitSession) -> Any:
    raise ConnectionResetError("the connection is gone")


def at_meeting(session: RefitSession, topic: str, ending: Ending) -> None:
    """Have this rank end in a meeting: after it has said that it is there, in the place of the answer."""
    channel, connection = session._channel, session._channel._connection
    barrier, receive = channel.barrier, connection._receive_frame

    def answered() -> Any:
        connection._receive_frame = receive  # type: ignore[method-assign]
        receive()
        return ending(session)

    def meet(name: str, *args: Any, **kwargs: Any) -> bool:
        if name.startswith(topic):
            connection._receive_frame = answered  # type: ignore[method-assign]
        return barrier(name, *args, **kwargs)

    channel.barrier = meet  # type: ignore[method-assign]


@pytest.mark.parametrize(("ending", "kind"), [(interrupted, KeyboardInterrupt), (cut_off, PeerLost)])
@pytest.mark.parametrize("topic", ["begin/", "follow/", "commit/"])
def test_an_engine_that_does_not_hear_whether_senders_were_let_write_or_committed_is_dirty(
    topic: str, ending: Ending, kind: type[BaseException]
) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit_changed(session, endpoint, 1)
        move(endpoint)
        if rank == ENGINE:
            at_meeting(session, topic, ending)
        return ended(session, 2), session.state

    error, state = run_world(*world(1), body)[ENGINE]
    assert isinstance(error, kind)
    assert (state.version, state.dirty_since) == (1, 2)
    with pytest.raises(EngineDirty):
        state.require_clean()


def refuse_to_follow(session: RefitSession) -> None:
    def refuse() -> None:
        raise RefitError("it can't")

    session.engine.rebind = refuse  # type: ignore[method-assign]


def ask_for_another_version(session: RefitSession) -> None:
    refit = session.refit
    session.refit = lambda version: refit(version + 1)  # type: ignore[method-assign]


@pytest.mark.parametrize("earlier", [None, 7], ids=["clean before", "dirty before"])
@pytest.mark.parametrize("ends", [0, ENGINE], ids=["trainer", "engine"])
@pytest.mark.parametrize(
    "how",
    [
        lambda session: session._channel.abort("no refit today"),
        lambda session: setattr(session.engine, "stale", lambda: interrupted(session)),
        ask_for_another_version,
        refuse_to_follow,
    ],
    ids=["aborted", "interrupted before it comes", "another version", "can't follow"],
)
def test_an_engine_is_what_it_was_if_no_rank_was_let_write(
    how: Callable[[RefitSession], object], ends: int, earlier: int | None
) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit_changed(session, endpoint, 1)
        move(endpoint)
        session.state.take_back(earlier)
        session._channel.barrier("prepared")
        if rank == ends:
            how(session)
        error, state = ended(session, 2), session.state
        return error, state.version, state.dirty_since, endpoint.wrong(1) if rank == ENGINE else []

    results = run_world(*world(1), body)
    kinds = RefitMismatch if how is ask_for_another_version else RefitError | KeyboardInterrupt
    assert all(isinstance(error, kinds) for error, *_ in results)
    assert results[ENGINE][1:] == (1, earlier, [])


def test_nobody_writes_before_an_engine_is_dirty() -> None:
    written: list[bool] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        send = session.engine.send_weights

        def sending(version: int, clock: Any) -> Any:
            written.append(states[ENGINE].dirty and states[ENGINE + 1].dirty)
            everyone.wait(20)
            return send(version, clock)

        if session.world.is_source:
            session.engine.send_weights = sending  # type: ignore[method-assign]
        else:
            receive = session.engine.receive_weights
            session.engine.receive_weights = lambda *args: (everyone.wait(20), receive(*args))[1]  # type: ignore[method-assign]
        first = refit_changed(session, endpoint, 1)[1]
        move(endpoint)
        return first + refit_changed(session, endpoint, 2)[1]

    everyone = threading.Barrier(4)
    states = {rank: ServingState() for rank in (ENGINE, ENGINE + 1)}
    results = run_world(*world(2), body, states=states)
    assert results[ENGINE:] == [[], []]
    assert written == [True] * 4


@pytest.mark.parametrize("next_version", [1, 2])
def test_a_rank_that_did_not_hear_of_a_commit_refuses_and_the_next_epoch_heals_it(next_version: int) -> None:
    sources, destinations = world(2)
    states = {ENGINE: ServingState(), ENGINE + 1: ServingState()}

    def first(rank: int, session: RefitSession, endpoint: Any) -> Any:
        if rank == ENGINE:
            at_meeting(session, "commit/", interrupted)
        if session.world.is_source:
            endpoint.set_version(1)
        return ended(session, 1)

    results = run_world(sources, destinations, first, states=states)
    assert isinstance(results[ENGINE], KeyboardInterrupt)
    assert [results[rank] for rank in (0, 1, ENGINE + 1)] == [None] * 3
    # It holds all of it, and can't know that.
    assert (states[ENGINE].version, states[ENGINE].dirty_since) == (-1, 1)
    assert (states[ENGINE + 1].version, states[ENGINE + 1].dirty_since) == (1, None)

    def second(rank: int, session: RefitSession, endpoint: Any) -> Any:
        return refit_changed(session, endpoint, next_version)[1]

    assert run_world(sources, destinations, second, states=states)[ENGINE:] == [[], []]
    for state in states.values():
        state.require_clean()
        assert state.version == next_version


class Broken(Exception):
    """Of what fails as it is closed."""


def break_closing_of_groups(monkeypatch: pytest.MonkeyPatch, close: Callable[..., None]) -> list[Group]:
    """Let ``close`` of groups raise once it has done its work, and return the ones that were closed."""
    closed: list[Group] = []

    def failing_close(group: Group, *, failed: bool = False) -> None:
        close(group, failed=failed)
        closed.append(group)
        raise Broken("group")

    monkeypatch.setattr(TorchGroup, "close", failing_close)
    return closed


def breaking(steps: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        steps.append(name)
        call(*args, **kwargs)
        raise Broken(name)

    return step


def recorded_groups(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[TorchGroup]:
    """The groups that a module opens from here on."""
    opened: list[TorchGroup] = []
    make = module.open_group

    def recorded(*args: Any) -> TorchGroup:
        opened.append(make(*args))
        return opened[-1]

    monkeypatch.setattr(module, "open_group", recorded)
    return opened


def test_after_a_failure_every_step_is_taken_and_the_cause_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sources, destinations = world(1)
    close, closed = TorchGroup.close, list[list[Group]]()

    def fail(version: int) -> None:
        raise ValueError("post-load failed")

    destinations[0].finish = fail  # type: ignore[method-assign]
    destinations[0].abandon = breaking(steps, "abandon", destinations[0].abandon)  # type: ignore[method-assign]

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        if rank == ENGINE:
            finalize = session.engine.finalize
            session.engine.finalize = breaking(steps, "finalize", finalize)  # type: ignore[method-assign]
        session._channel.barrier("prepared")
        closed.append(break_closing_of_groups(monkeypatch, close))
        error = ended(session, 1)
        session.engine.finalize = finalize if rank == ENGINE else session.engine.finalize  # type: ignore[method-assign]
        return error, session.engine._bulk, session.engine._misc  # type: ignore[attr-defined]

    results = run_world(sources, destinations, body)
    error, *left = results[ENGINE]
    assert isinstance(error, ValueError)
    assert {type(note) for note in error.__notes__} == {str}
    assert sorted(steps) == ["abandon", "finalize"]
    assert left == [None, None]
    # The bulk path's and the misc path's, where there is one: on trainer rank 0 and the engine.
    assert sum(map(len, closed)) == 5
    assert all(isinstance(result[0], PeerLost) for result in results[:2])
    assert destinations[0].abandoned


def test_a_session_that_can_not_open_closes_all_and_raises_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, destinations = world(1)
    break_closing_of_groups(monkeypatch, TorchGroup.close)
    monkeypatch.setattr(type(destinations[0]), "kept_bytes", property(lambda self: 1 / 0), raising=True)
    results = run_world(sources, destinations, lambda *_: None)
    assert isinstance(results[ENGINE], ZeroDivisionError)
    assert all(isinstance(error, PeerLost) for error in results[:2])


@pytest.mark.parametrize(
    ("module", "taker", "engine", "fields"),
    [
        (transport, "P2PTransport", "nccl_xfer", {"transport": "p2p"}),
        (transport, "GoldenTransport", "nccl_xfer", {"transport": "golden"}),
        (bulk, "DeltaPath", "nccl_xfer", {"transport": "p2p", "delta": "always"}),
        (packed, "Buckets", "packed_broadcast", {}),
    ],
)
def test_what_can_not_take_its_group_over_leaves_none_open_on_any_rank(
    module: Any, taker: str, engine: str, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = recorded_groups(monkeypatch, module)
    # One buffer too many, say.
    monkeypatch.setattr(module, taker, breaking([], taker, lambda *args, **kwargs: None))
    config = RefitConfig(bucket_mb=1, timeout_s=20.0, **fields)  # type: ignore[arg-type]
    results = run_world(*world(1), lambda *_: None, config, engine)
    assert any(isinstance(error, Broken) for error in results)
    assert all(isinstance(error, Broken | PeerLost) for error in results)
    assert opened
    assert [group for group in opened if group._backends] == []


def test_scales_that_can_not_take_their_group_over_leave_it_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = recorded_groups(monkeypatch, shared_scales)
    make = shared_scales.SharedScales.open
    monkeypatch.setattr(shared_scales, "SharedScales", breaking([], "scales", lambda *args: None))

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        slots = shared_scales.CutSlots(4, {}, {})
        return make(session._channel, session.engine.planned.group, slots, endpoint.device)

    trainers = run_world(*world(1), body)[:2]
    assert [type(error) for error in trainers] == [Broken, Broken]
    assert len(opened) == 2
    assert [group._backends for group in opened] == [[], []]


def test_closing_raises_what_failed_once_the_epoch_has_been_left() -> None:
    left: list[int] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        session.refit(1)
        leave = session._channel.close
        session._channel.close = lambda: (left.append(rank), leave())[1]  # type: ignore[method-assign]
        session.engine.finalize = breaking([], "finalize", session.engine.finalize)  # type: ignore[method-assign]
        session._channel.barrier("done")
        with pytest.raises(Broken):
            session.close()
        session.close()
        return True

    assert run_world(*world(1), body) == [True] * 3
    assert sorted(left) == [0, 1, 2]


def test_an_epoch_that_has_ended_is_not_healthy_even_if_it_can_not_be_closed() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        finalize = session.engine.finalize
        session.engine.finalize = breaking([], "finalize", finalize)  # type: ignore[method-assign]
        if rank == 0:
            session._channel.abort("enough")
        there.wait(20)
        healthy = session.healthy(), session.healthy()
        session.engine.finalize = finalize  # type: ignore[method-assign]
        return healthy

    there = threading.Barrier(3)
    assert run_world(*world(1), body) == [(False, False)] * 3


def test_an_interrupt_as_a_rank_asks_whether_it_can_go_on_ends_the_epoch_on_all_ranks() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit_changed(session, endpoint, 1)
        if rank == ENGINE:
            look = session._channel.check_abort
            session._channel.check_abort = lambda stage: (look(stage), interrupted(session))[0]  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                session.healthy()
        return ended(session, 2), session.state.version, session.state.dirty

    results = run_world(*world(1), body)
    assert all(isinstance(error, PeerLost) for error, *_ in results[:2])
    error, *left = results[ENGINE]
    assert isinstance(error, RefitError)
    assert left == [1, False]


def test_all_steps_are_taken_and_the_first_error_or_an_interrupt_is_raised_with_the_others_noted() -> None:
    taken: list[str] = []

    def step(error: BaseException) -> Callable[[], None]:
        def take() -> None:
            taken.append(repr(error))
            raise error

        return take

    first, second, cause, interrupt = ValueError(), OSError(), RefitMismatch("why"), KeyboardInterrupt()
    with pytest.raises(ValueError) as raised:
        end_all([lambda: taken.append("a"), step(first), step(second), lambda: taken.append("d")])
    assert taken == ["a", repr(first), repr(second), "d"]
    assert len(raised.value.__notes__) == 1
    end_all([step(first), step(second)], cause)
    assert len(cause.__notes__) == 2
    with pytest.raises(KeyboardInterrupt) as stopped:
        end_all([step(first), step(second), step(interrupt), lambda: taken.append("f")], RefitMismatch("why"))
    assert len(stopped.value.__notes__) == 3
    assert taken[-1] == "f"
