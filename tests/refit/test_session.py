"""Whole refits between synthetic ranks: right bytes, right versions, and errors instead of silence or hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrefit.integration import session as session_module
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.engine.refit import Moved, RefitEngine
from rlrefit.integration.errors import (
    EngineDirty,
    PeerLost,
    PlanError,
    RefitError,
    RefitMismatch,
    RefitTimeout,
    VerificationError,
)
from rlrefit.integration.layout import Fragment
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.manifest import TensorSpec

from .synthetic import (
    BF16,
    SPECS,
    SyntheticDestination,
    SyntheticSource,
    ended,
    held_by,
    layout_of,
    move,
    pair,
    refit_changed,
    refit_versions,
    run_world,
    world,
)


@pytest.mark.parametrize(
    ("engine", "transport"), [("nccl_xfer", "p2p"), ("nccl_xfer", "golden"), ("packed_broadcast", "auto")]
)
def test_three_changed_refits_land_bit_for_bit_and_commit(engine: str, transport: str) -> None:
    sources, destinations = world()
    config = RefitConfig(transport=transport, bucket_mb=1, timeout_s=20.0, verify="full")
    results = run_world(sources, destinations, refit_versions(1, 2, 3), config, engine)
    for result in results[2:]:
        assert [(wrong, version) for _, wrong, version in result] == [([], 1), ([], 2), ([], 3)]
    assert [d.finished for d in destinations] == [[1, 2, 3]] * 3
    record = results[2][0][0]
    assert record.bytes_kept == 8 * 10 * 2 + 7 * 4 * 2 + 5 * 4 + 13 * 3 * 2 + 4 * 6 * 2
    if engine == "nccl_xfer":
        assert record.bytes_bulk == record.bytes_kept - 4 * 6 * 2
        assert record.bytes_verified > 0


@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_parameters_that_are_trained_take_no_refit_into_their_graph_on_either_side(transport: str) -> None:
    sources, destinations = world(2)
    for endpoint in (*sources, *destinations):
        held = held_by(endpoint)
        held.update({key: torch.nn.Parameter(storage.clone()) for key, storage in held.items()})
    kept: list[Any] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> list[str]:
        if session.world.is_source:
            for version in (1, 2):
                with torch.no_grad():
                    endpoint.set_version(version)
                session.refit(version)
            kept.extend(o for o in gc.get_objects() if type(o) is torch.Tensor and o.grad_fn is not None)
            return []
        for version in (1, 2):
            session.refit(version)
        return endpoint.wrong(2)

    assert run_world(sources, destinations, body, RefitConfig(transport=transport, bucket_mb=1)) == [[]] * 4
    assert kept == []


class CopyingSource(SyntheticSource):
    """A trainer rank that sends copies of its weights, made as they are asked for and written before each refit."""

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, refused = super().fragments()
        self._copies = [(torch.empty_like(one.view), one.view) for one in held]
        return [
            dataclasses.replace(one, view=copy) for one, (copy, _) in zip(held, self._copies, strict=True)
        ], refused

    def prepare(self) -> None:
        super().prepare()
        for copy, view in self._copies:
            copy.copy_(view)


@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_what_is_opened_or_followed_in_inference_mode_refits_outside_of_it(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> list[list[str]]:
        wrong = [refit_changed(session, endpoint, 1)[1]]
        move(endpoint)
        with torch.inference_mode():
            wrong.append(refit_changed(session, endpoint, 2)[1])
        return [*wrong, refit_changed(session, endpoint, 3)[1]]

    monkeypatch.setattr(RefitSession, "open", torch.inference_mode()(RefitSession.open))
    sources, engines = world(2)
    for source in sources:
        source.__class__ = CopyingSource
    assert run_world(sources, engines, body, RefitConfig(transport=transport, bucket_mb=1)) == [[[]] * 3] * 4


@pytest.mark.parametrize("version", [np.int64(3), torch.tensor(3)])
def test_a_version_of_another_kind_of_integer_is_pythons_in_state_and_records(version: Any) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        record = session.refit(version)
        return json.loads(json.dumps(record.to_json()))["version"], session.state.version

    results = run_world(*world(1), body)
    assert [told for told, _ in results] == [3] * 3
    assert [type(served) for _, served in results] == [int] * 3
    assert results[-1][1] == 3


@pytest.mark.parametrize("version", [1.0, -1, "7", None, True])
def test_a_version_that_is_no_whole_number_is_refused_with_nothing_written(version: Any) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        return ended(session, version), session.state.dirty, session.state.version

    for error, dirty, served in run_world(*world(1), body):
        assert isinstance(error, RefitError)
        assert error.stage == "handshake"
        assert (dirty, served) == (False, -1)


@given(
    train=st.sampled_from([1, 2, 3]),
    gen=st.sampled_from([1, 2, 4]),
    shape=st.tuples(st.integers(1, 13), st.integers(1, 300), st.integers(1, 40)),
    data=st.data(),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_two_shardings_meet_bit_for_bit(
    train: int, gen: int, shape: tuple[int, int, int], data: st.DataObject
) -> None:
    spec = TensorSpec("w", shape, BF16)

    def cut(parts: int, dim: int) -> list[list[Any]]:
        size = -(-shape[dim] // parts)  # as torch.chunk cuts: the last parts may be short or empty
        edges = [(min(i * size, shape[dim]), min((i + 1) * size, shape[dim])) for i in range(parts)]
        return [
            [tuple(edge if d == dim else (0, n) for d, n in enumerate(shape))] if edge[0] < edge[1] else []
            for edge in edges
        ]

    held, wanted = cut(train, data.draw(st.integers(0, 2))), cut(gen, data.draw(st.integers(0, 2)))
    sources = [SyntheticSource([spec], {"w": boxes}) for boxes in held]
    destinations = [SyntheticDestination([spec], {"w": boxes}) for boxes in wanted]
    results = run_world(sources, destinations, refit_versions(1, 2))
    assert [wrong for result in results[train:] for _, wrong, _ in result] == [[], []] * gen


def test_a_hole_in_the_shard_rules_is_an_error_by_name_before_anything_moves() -> None:
    sources, destinations = pair([TensorSpec("layers.0.w", (8, 4), BF16)])
    sources[0] = SyntheticSource(sources[0].specs(), {"layers.0.w": [((0, 5), (0, 4))]})
    for error in run_world(sources, destinations, refit_versions(1)):
        assert isinstance(error, PlanError)
        assert error.parameter == "layers.0.w"
        assert "((5, 8), (0, 4))" in str(error)


COLUMN, ROW, *OTHERS = SPECS


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ([COLUMN, ROW._replace(name="rwo"), *OTHERS], "rwo"),
        ([COLUMN, *OTHERS], "row"),
        ([*SPECS, TensorSpec("more", (3,), BF16)], "more"),
        ([COLUMN, ROW._replace(shape=(12, 7)), *OTHERS], "row"),
        ([COLUMN, ROW._replace(dtype=torch.float16), *OTHERS], "row"),
        (SPECS[::-1], "order"),
    ],
    ids=["renamed", "missing", "extra", "reshaped", "retyped", "reordered"],
)
def test_trainer_ranks_with_different_models_name_the_first_weight_that_differs(
    specs: list[TensorSpec], named: str
) -> None:
    sources, destinations = world(1)
    sources[1] = SyntheticSource(specs, {"column": layout_of(1, 2)["column"]})
    results = run_world(sources, destinations, refit_versions(1))
    assert [type(result) for result in results] == [PeerLost, RefitMismatch, PeerLost]
    assert all(named in str(result) for result in results)


@pytest.mark.parametrize(
    ("setting", "value"), [("bucket_mb", 2), ("verify", "off"), ("transport", "golden"), ("streams", 3)]
)
def test_a_rank_that_is_set_up_differently_is_named_on_all_ranks_before_anything_moves(
    setting: str, value: object
) -> None:
    sources, destinations = world(1)
    same: dict[str, Any] = {"bucket_mb": 1, "verify": "full", "transport": "p2p", "timeout_s": 20.0}
    configs = [RefitConfig(**same), RefitConfig(**same), RefitConfig(**(same | {setting: value}))]
    results = run_world(sources, destinations, refit_versions(1), configs)
    assert all(isinstance(r, RefitMismatch) and r.parameter == setting for r in results)
    assert all(f"refit rank 2): {value!r}" in str(r) for r in results)
    assert not destinations[0].finished


def test_ranks_may_wait_for_different_times() -> None:
    configs = [RefitConfig(bucket_mb=1, timeout_s=seconds) for seconds in (5.0, 10.0, 20.0)]
    results = run_world(*world(1), refit_versions(1), configs)
    assert results[2][0][1] == []


def test_storage_that_does_not_keep_what_was_sent_is_caught_by_the_checksums() -> None:
    sources, destinations = pair([TensorSpec("a", (8, 4), BF16), TensorSpec("b", (8, 4), BF16)])
    # Two weights that share rows of one storage behind their first ones: the second to land destroys a part of the first.
    first, second = destinations[0]._wanted
    shared = torch.zeros(9, 7, dtype=BF16)[:, :4]
    destinations[0]._wanted |= {first: shared[:8], second: shared[1:]}
    results = run_world(sources, destinations, refit_versions(1))
    assert [type(result) for result in results] == [PeerLost, VerificationError]


@pytest.mark.parametrize("another_s", [0.0, 1.0], ids=["one rank", "one rank, and another is late"])
def test_a_rank_that_never_comes_ends_in_a_timeout_that_names_it(another_s: float) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        session._channel.barrier("opened")
        session._channel.timeout_s = 1.5 + another_s  # not of the opening, which may be slow
        if rank == 1:
            time.sleep(another_s)
        error = ended(session, 1) if rank != 4 else None
        over.wait(20)
        return error

    over = threading.Barrier(5)
    results = run_world(*world(3), body, RefitConfig(timeout_s=20.0, bucket_mb=1))[:4]
    assert all(isinstance(r, RefitTimeout | PeerLost) and r.blamed == 4 for r in results)
    # One that comes a moment after the time is up is told of it.
    assert any(isinstance(r, RefitTimeout) for r in results)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["prepare", "begin"])
def test_an_interrupt_ends_the_refit_on_all_ranks_at_once_and_closes_as_after_a_failure(
    interrupt: type[BaseException], where: str
) -> None:
    endings: list[tuple[int, bool]] = []

    def stop(*_: object) -> Any:
        raise interrupt("the driver asks for it")

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        finalize, connection = session.engine.finalize, session._channel._connection
        receive = connection._receive_frame

        def recorded(*, failed: bool = False) -> None:
            endings.append((rank, failed))
            finalize(failed=failed)

        def stop_once() -> bytes:
            connection._receive_frame = receive  # type: ignore[method-assign]
            stop()
            return b""

        session.engine.finalize = recorded  # type: ignore[method-assign]
        refit_changed(session, endpoint, 1)
        if rank == 1 and where == "prepare":
            endpoint.prepare = stop
        if rank == 1 and where == "begin":
            # As a signal does: after the request has gone out, before its answer is read.
            connection._receive_frame = stop_once  # type: ignore[method-assign]
        start = time.monotonic()
        error = ended(session, 2)
        session.close()
        return error, time.monotonic() - start

    results = run_world(*world(1), body)
    assert isinstance(results.pop(1)[0], interrupt)
    for error, seconds in results:
        assert isinstance(error, PeerLost)
        # A rank that exchanges at that moment may see the end of its pair before it hears the reason.
        assert (error.blamed == 1 and interrupt.__name__ in str(error)) or "broke" in str(error)
        assert seconds < 15
    assert {rank for rank, _ in endings} == {0, 1, 2}
    assert all(failed for _, failed in endings)


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), RefitError("it moves experts", stage="trace")])
def test_a_rank_that_can_not_be_prepared_or_is_interrupted_as_it_opens_is_heard_of_at_once(
    raised: BaseException,
) -> None:
    class Refusing(SyntheticDestination):
        def fragments(self, specs: Any) -> Any:
            raise raised

    start = time.monotonic()
    results = run_world(world(1)[0], [Refusing(SPECS, layout_of(0, 1))], refit_versions(1))
    assert time.monotonic() - start < 15
    assert results[2] is raised or "moves experts" in str(results[2])
    assert all(str(raised) in str(r) for r in results[:2])
    if isinstance(raised, KeyboardInterrupt):
        assert all(isinstance(r, PeerLost) and "KeyboardInterrupt" in str(r) for r in results[:2])


def test_a_loader_that_does_not_take_all_weights_is_an_error_and_commits_nothing() -> None:
    sources, destinations = world(1)
    destinations[0].load_weights = lambda weights: next(iter(weights))  # type: ignore[method-assign]
    config = RefitConfig(bucket_mb=1, timeout_s=20.0)
    results = run_world(sources, destinations, refit_versions(1), config, "packed_broadcast")
    assert [type(result) for result in results] == [PeerLost, PeerLost, RefitMismatch]
    assert "4 weights left" in str(results[2])
    assert not destinations[0].finished


def test_after_a_failure_an_engine_refuses_to_generate_until_a_new_epoch_heals_it() -> None:
    sources, destinations = world(1)
    state = ServingState()

    def fail(version: int) -> None:
        raise ValueError("post-load failed")

    destinations[0].finish = fail  # type: ignore[method-assign]
    results = run_world(
        sources,
        destinations,
        lambda rank, session, _: [ended(session, 1) for _ in range(2)],
        states={2: state},
    )
    assert isinstance(results[2][0], ValueError)
    assert all(isinstance(r[0], PeerLost) and "post-load failed" in str(r[0]) for r in results[:2])
    assert all(isinstance(again, RefitError) and "new epoch" in str(again) for _, again in results)
    assert destinations[0].abandoned
    assert (state.dirty, state.version) == (True, -1)
    with pytest.raises(EngineDirty):
        state.require_clean()
    del destinations[0].finish
    results = run_world(sources, destinations, refit_versions(2), states={2: state})
    assert results[2][0][1:] == ([], 2)
    state.require_clean()


@pytest.mark.parametrize("engine", ["nccl_xfer", "packed_broadcast", "colocated_ipc"])
def test_a_session_that_is_closed_within_its_refit_ends_it_with_a_refit_error(engine: str) -> None:
    sessions: dict[int, RefitSession] = {}

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        sessions[rank] = session
        session._channel.barrier("all are here")
        if rank == 2:
            # As the handler of a signal does on trainer rank 0, which waits meanwhile.
            endpoint.load_weights = lambda weights: sessions[0].close()
        return ended(session, 1)

    began = time.monotonic()
    results = run_world(*world(1), body, RefitConfig(bucket_mb=1, timeout_s=60.0), engine)
    assert all(isinstance(result, RefitError) for result in results), results
    # And not once the others have waited for the rank that closes it.
    assert time.monotonic() - began < 30.0


def test_a_closed_session_refuses_and_closes_twice_without_harm() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        session.refit(1)
        session.close()
        with pytest.raises(RefitError, match="is closed"):
            session.refit(2)
        return True

    assert run_world(*world(1), body) == [True] * 3


class LooksLate(RefitEngine):
    """Trainers look for their weights once they have sent them, as those do that write from memory which is surely there."""

    found: ClassVar[list[bool]] = []  # by each look of a trainer, in turn

    def stale(self) -> bool:
        return not self.world.is_source and super().stale()

    def send_weights(self, version: int, clock: StageClock) -> Moved:
        sent = super().send_weights(version, clock)
        self.found.append(self._have_moved())
        return dataclasses.replace(sent, void=self.found[-1])


def test_weights_that_a_trainer_finds_elsewhere_after_it_sent_them_are_moved_once_more_before_anything_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "RefitEngine", LooksLate)
    monkeypatch.setattr(LooksLate, "found", [])

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        seen = []
        for version in (1, 2, 3):
            if rank == 0 and version == 2:
                move(endpoint)
            seen.append((refit_changed(session, endpoint, version)[1], session.state.version))
        return seen

    assert run_world(*world(2), body)[2:] == [[([], 1), ([], 2), ([], 3)]] * 2
    # Two trainers, and one refit twice.
    assert sorted(LooksLate.found) == [False] * 7 + [True]


def test_weights_that_move_in_every_refit_end_it_and_nothing_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RefitEngine", LooksLate)
    monkeypatch.setattr(LooksLate, "_have_moved", lambda engine: True)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        assert isinstance(ended(session, 1), RefitError)
        return session.state.dirty, session.state.version

    assert run_world(*world(2), body)[2:] == [(True, -1)] * 2


@pytest.mark.parametrize("moved", [0, 2])
def test_storage_that_moves_on_one_rank_is_followed_on_all_before_the_engine_is_dirty(moved: int) -> None:
    seen: list[tuple[int, bool]] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        rebind = session.engine.rebind
        session.engine.rebind = lambda: (seen.append((rank, session.state.dirty)), rebind())[1]  # type: ignore[method-assign]
        refit_changed(session, endpoint, 1)
        if rank == moved:
            move(endpoint)
        return refit_versions(2, 3)(rank, session, endpoint)

    results = run_world(*world(1), body)
    assert [wrong for _, wrong, _ in results[2]] == [[], []]
    assert sorted(seen) == [(0, False), (1, False), (2, False)]
    # The time that it takes has a name of its own.
    assert ["bind" in record.seconds for record, _, _ in results[2]] == [True, False]


def test_a_record_says_where_the_time_went_and_a_timeline_only_if_it_is_asked_for() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        return session.refit(1), session.refit(2, timeline=True)

    for plain, timed in run_world(*world(1), body):
        assert plain.timeline == ()
        assert {"handshake", "commit"} <= set(plain.seconds)
        assert 0 < plain.host_seconds < plain.seconds_total
        stages = [interval.stage for interval in timed.timeline]
        assert (stages[0], stages[-1]) == ("handshake", "commit")
        assert all(0 <= i.start <= i.end <= timed.seconds_total for i in timed.timeline)


def test_a_record_counts_the_time_that_it_takes_to_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[[StageClock], dict[str, float]] = StageClock.seconds.fget  # type: ignore[assignment]

    def slowly(clock: StageClock) -> dict[str, float]:
        start = time.thread_time()
        while time.thread_time() - start < 0.1:
            pass
        return read(clock)

    monkeypatch.setattr(StageClock, "seconds", property(slowly))
    for [(record, _, _)] in run_world(*world(1), refit_versions(1)):
        assert record.host_seconds > 0.1
        assert record.seconds_total > 0.1


@pytest.mark.parametrize(("seen", "expected"), [(0, 1300), (200, 1300), (700, 1700)])
def test_peak_memory_adds_what_a_refit_takes_to_what_is_held(
    seen: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The allocator's peak counts what is taken in the refit, and not what was held before.
    monkeypatch.setattr(session_module, "_memory_mark", lambda device: 5000)
    monkeypatch.setattr(session_module, "_memory_peak", lambda device: 5000 + seen)
    monkeypatch.setattr(RefitEngine, "held_bytes", 1000)
    monkeypatch.setattr(RefitEngine, "staging_bytes", 1300)
    for [(record, _, _)] in run_world(*world(1), refit_versions(1)):
        assert record.peak_extra_bytes == expected


def test_a_wrong_configuration_is_told_whole_before_anything_is_opened() -> None:
    config = RefitConfig.unchecked(transport="pigeon", streams=99, timeout_s=float("inf"), lora="both")
    for error in run_world(*world(1), refit_versions(1), config):
        assert isinstance(error, RefitError)
        assert all(key in str(error) for key in ("transport", "streams", "timeout_s", "lora"))
