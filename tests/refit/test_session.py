"""Whole refits between synthetic ranks: right bytes, right versions, and errors instead of silence or hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrefit.integration import session as session_module
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control.channel import Channel
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
from rlrefit.integration.records.clock import StageClock
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.manifest import TensorSpec

from .synthetic import Layout, SyntheticDestination, SyntheticSource, refit_changed, run_world

BF16, FP32 = torch.bfloat16, torch.float32


def rows(total: int, parts: int, index: int, columns: int) -> list[Any]:
    size = total // parts
    return [((index * size, (index + 1) * size), (0, columns))]


def columns(total: int, parts: int, index: int, rows: int) -> list[Any]:
    size = total // parts
    return [((0, rows), (index * size, (index + 1) * size))]


SPECS = [
    TensorSpec("column", (24, 10), BF16),
    TensorSpec("row", (7, 12), BF16),
    TensorSpec("norm", (5,), FP32),
    TensorSpec("odd", (13, 3), torch.float16),
    TensorSpec("router", (4, 6), BF16),
]


def trainer_layout(rank: int) -> Layout:
    return {
        "column": rows(24, 2, rank, 10),
        "row": columns(12, 2, rank, 7),
        "norm": [((0, 5),)],
        "odd": [((0, 13), (0, 3))],
    }


def engine_layout(rank: int, size: int) -> Layout:
    return {
        "column": rows(24, size, rank, 10),
        "row": columns(12, size, rank, 7),
        "norm": [((0, 5),)],
        "odd": [((0, 13), (0, 3))],
        "router": [((0, 4), (0, 6))],
    }


def world(engines: int = 3) -> tuple[list[SyntheticSource], list[SyntheticDestination]]:
    refused = {"router": "MoE router"}
    return (
        [SyntheticSource(SPECS, trainer_layout(rank), refused) for rank in range(2)],
        [SyntheticDestination(SPECS, engine_layout(rank, engines)) for rank in range(engines)],
    )


def refit_versions(*versions: int) -> Callable[[int, RefitSession, Any], list[Any]]:
    def body(rank: int, session: RefitSession, endpoint: Any) -> list[Any]:
        results = []
        for version in versions:
            record, wrong = refit_changed(session, endpoint, version)
            results.append((record, wrong, session.state.version))
        return results

    return body


@pytest.mark.parametrize(
    ("engine", "transport"), [("nccl_xfer", "p2p"), ("nccl_xfer", "golden"), ("packed_broadcast", "auto")]
)
def test_three_changed_refits_land_bit_for_bit_and_commit(engine: str, transport: str) -> None:
    sources, destinations = world()
    config = RefitConfig(transport=transport, bucket_mb=1, timeout_s=20.0, verify="full")
    results = run_world(sources, destinations, refit_versions(1, 2, 3), config, engine)
    for result in results[2:]:
        assert [wrong for _, wrong, _ in result] == [[], [], []]
        assert [version for _, _, version in result] == [1, 2, 3]
    assert [d.finished for d in destinations] == [[1, 2, 3]] * 3
    record = results[2][0][0]
    assert record.bytes_kept == 8 * 10 * 2 + 7 * 4 * 2 + 5 * 4 + 13 * 3 * 2 + 4 * 6 * 2
    if engine == "nccl_xfer":
        assert record.bytes_bulk == record.bytes_kept - 4 * 6 * 2
        assert record.bytes_verified > 0


def test_replicated_weights_are_shared_out_between_the_trainer_ranks() -> None:
    specs = [TensorSpec(f"w{i}", (32, 8), BF16) for i in range(8)]
    whole: Layout = {s.name: [((0, 32), (0, 8))] for s in specs}
    sources = [SyntheticSource(specs, whole) for _ in range(2)]
    destinations = [SyntheticDestination(specs, whole)]
    results = run_world(sources, destinations, refit_versions(1))
    sent = [results[rank][0][0].bytes_bulk for rank in range(2)]
    assert sent[0] == sent[1] == 4 * 32 * 8 * 2


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
    # The largest of these weights is many buckets long at the smallest bucket that there is.
    results = run_world(sources, destinations, refit_versions(1, 2))
    assert [wrong for result in results[train:] for _, wrong, _ in result] == [[], []] * gen


def test_a_weight_that_is_larger_than_a_bucket_is_cut_and_lands() -> None:
    spec = TensorSpec("w", (3, 700_000), FP32)  # 8.4 MB through buckets of 1 MiB
    source = SyntheticSource([spec], {"w": [((0, 3), (0, 700_000))]})
    destinations = [SyntheticDestination([spec], {"w": columns(700_000, 2, i, 3)}) for i in range(2)]
    config = RefitConfig(bucket_mb=1, streams=1, timeout_s=20.0, verify="full", transport="p2p")
    results = run_world([source], destinations, refit_versions(1, 2), config)
    assert [wrong for result in results[1:] for _, wrong, _ in result] == [[], [], [], []]
    assert results[1][0][0].peak_extra_bytes <= 1 << 20


def test_storage_that_moved_between_two_refits_is_followed() -> None:
    sources, destinations = world(1)

    def body(rank: int, session: RefitSession, endpoint: Any) -> list[Any]:
        refit_versions(1)(rank, session, endpoint)
        if session.world.is_source:  # offloaded and brought back: the same values at another address
            endpoint._held = {key: storage.clone() for key, storage in endpoint._held.items()}
        return refit_versions(2)(rank, session, endpoint)

    results = run_world(sources, destinations, body)
    assert results[2][0][1] == []


def test_a_hole_in_the_shard_rules_is_an_error_by_name_before_anything_moves() -> None:
    spec = TensorSpec("layers.0.w", (8, 4), BF16)
    source = SyntheticSource([spec], {"layers.0.w": [((0, 5), (0, 4))]})
    destination = SyntheticDestination([spec], {"layers.0.w": [((0, 8), (0, 4))]})
    results = run_world([source], [destination], refit_versions(1))
    assert all(isinstance(r, PlanError) for r in results)
    assert "layers.0.w" in str(results[1])
    assert "((5, 8), (0, 4))" in str(results[1])


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ("renamed", "rwo"),
        ("missing", "row"),
        ("extra", "more"),
        ("reshaped", "row"),
        ("retyped", "row"),
        ("reordered", "order"),
    ],
)
def test_trainer_ranks_with_different_models_name_the_first_weight_that_differs(
    difference: str, named: str
) -> None:
    sources, destinations = world(1)
    row = next(s for s in SPECS if s.name == "row")
    others = {
        "renamed": [s._replace(name="rwo") if s is row else s for s in SPECS],
        "missing": [s for s in SPECS if s is not row],
        "extra": [*SPECS, TensorSpec("more", (3,), BF16)],
        "reshaped": [s._replace(shape=(12, 7)) if s is row else s for s in SPECS],
        "retyped": [s._replace(dtype=torch.float16) if s is row else s for s in SPECS],
        "reordered": SPECS[::-1],
    }[difference]
    sources[1] = SyntheticSource(others, {"column": trainer_layout(1)["column"]})
    results = run_world(sources, destinations, refit_versions(1))
    assert isinstance(results[1], RefitMismatch)
    assert named in str(results[1])
    assert all(isinstance(r, PeerLost) and named in str(r) for r in (results[0], results[2]))


@pytest.mark.parametrize(
    ("setting", "value"), [("bucket_mb", 2), ("verify", "off"), ("transport", "golden"), ("streams", 3)]
)
def test_a_rank_that_is_set_up_differently_is_named_on_all_ranks_before_anything_moves(
    setting: str, value: object
) -> None:
    sources, destinations = world(1)
    same = {"bucket_mb": 1, "verify": "full", "transport": "p2p", "timeout_s": 20.0}
    configs = [RefitConfig(**same), RefitConfig(**same), RefitConfig(**(same | {setting: value}))]  # type: ignore[arg-type]
    results = run_world(sources, destinations, refit_versions(1), configs)
    assert all(isinstance(r, RefitMismatch) and r.parameter == setting for r in results)
    assert all(f"generation rank 0 (refit rank 2): {value!r}" in str(r) for r in results)
    assert not destinations[0].finished


def test_ranks_may_wait_for_different_times() -> None:
    sources, destinations = world(1)
    configs = [RefitConfig(bucket_mb=1, timeout_s=seconds) for seconds in (5.0, 10.0, 20.0)]
    results = run_world(sources, destinations, refit_versions(1), configs)
    assert results[2][0][1] == []


def test_ranks_that_are_asked_for_different_versions_refuse_and_the_engine_stays_clean() -> None:
    sources, destinations = world(1)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        try:
            session.refit(7 if rank == 0 else 8)
        except RefitError as error:
            return error, session.state.dirty
        return None

    results = run_world(sources, destinations, body)
    assert all(isinstance(error, RefitMismatch) and "{'version': 7}" in str(error) for error, _ in results)
    assert not results[2][1]


def test_an_engine_that_was_written_in_part_refuses_to_generate() -> None:
    sources, destinations = world(1)

    def fail(version: int) -> None:
        raise ValueError("post-load failed")

    destinations[0].finish = fail  # type: ignore[method-assign]

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        with pytest.raises((RefitError, ValueError)) as caught:
            session.refit(1)
        if not session.world.is_source:
            with pytest.raises(EngineDirty, match="refit 1"):
                session.state.require_clean()
        return caught.value

    results = run_world(sources, destinations, body)
    assert destinations[0].abandoned
    assert isinstance(results[2], ValueError)
    assert all(isinstance(r, PeerLost) and "post-load failed" in str(r) for r in results[:2])


def test_storage_that_does_not_keep_what_was_sent_is_caught_by_the_checksums() -> None:
    specs = [TensorSpec("a", (8, 4), BF16), TensorSpec("b", (8, 4), BF16)]
    whole: Layout = {s.name: [((0, 8), (0, 4))] for s in specs}
    destination = SyntheticDestination(specs, whole)
    # Two weights in one storage: the second to land destroys the first.
    first, second = destination._wanted
    destination._wanted[second] = destination._wanted[first]
    results = run_world([SyntheticSource(specs, whole)], [destination], refit_versions(1))
    assert isinstance(results[1], VerificationError)
    assert isinstance(results[0], PeerLost)
    assert "VerificationError" in str(results[0])


def late(seconds: dict[int, float], never: int) -> Callable[[int, RefitSession, Any], RefitError | None]:
    """What ranks do that come this late to a refit, ``never`` not at all; the errors that the others get."""

    def body(rank: int, session: RefitSession, endpoint: Any) -> RefitError | None:
        time.sleep(seconds.get(rank, 0.0))
        if rank == never:
            return None
        try:
            session.refit(1)
        except RefitError as error:
            return error
        return None

    return body


def test_a_rank_that_never_comes_ends_in_a_timeout_that_names_it() -> None:
    sources, destinations = world(2)
    config = RefitConfig(timeout_s=1.0, bucket_mb=1)
    start = time.monotonic()
    results = run_world(sources, destinations, late({3: 2.0}, never=3), config)
    assert time.monotonic() - start < 5
    assert all(isinstance(r, RefitTimeout) and "generation rank 1" in str(r) for r in results[:3])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["settle", "begin"])
def test_an_interrupt_ends_the_refit_on_all_ranks_at_once_and_closes_as_after_a_failure(
    interrupt: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, destinations = world(1)
    endings: list[tuple[int, bool]] = []

    def stop(*_: object) -> None:
        raise interrupt("the driver asks for it")

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        finalize = session.engine.finalize

        def recorded(*, failed: bool = False) -> None:
            endings.append((rank, failed))
            finalize(failed=failed)

        session.engine.finalize = recorded  # type: ignore[method-assign]
        refit_versions(1)(rank, session, endpoint)
        if rank == 1 and where == "settle":
            endpoint.settle = stop
        if rank == 1 and where == "begin":
            # As a signal does: after the request has gone out, before its answer is read.
            monkeypatch.setattr(session._channel._connection, "_receive_frame", stop_once(session))
        start = time.monotonic()
        try:
            session.refit(2)
        except BaseException as error:
            session.close()
            return error, time.monotonic() - start
        return None

    def stop_once(session: RefitSession) -> Callable[[], bytes]:
        connection = session._channel._connection
        receive = connection._receive_frame

        def stopped() -> bytes:
            connection._receive_frame = receive  # type: ignore[method-assign]
            return stop()  # type: ignore[return-value]

        return stopped

    results = run_world(sources, destinations, body)
    assert isinstance(results[1][0], interrupt)
    for rank in (0, 2):
        error, seconds = results[rank]
        assert isinstance(error, PeerLost)
        # A rank that exchanges at that moment may see the end of its pair before it hears the reason.
        reason = f"trainer rank 1 (refit rank 1) gave up: {interrupt.__name__}"
        assert reason in str(error) or "broke" in str(error)
        assert seconds < 5
    assert {rank for rank, failed in endings if failed} == {0, 1, 2}
    assert all(failed for _, failed in endings)


def test_an_interrupt_while_a_session_opens_reaches_all_ranks() -> None:
    sources, _ = world(1)

    class Interrupted(SyntheticDestination):
        def fragments(self, specs: Any) -> Any:
            raise KeyboardInterrupt

    start = time.monotonic()
    results = run_world(sources, [Interrupted(SPECS, engine_layout(0, 1))], refit_versions(1))
    assert time.monotonic() - start < 10
    assert isinstance(results[2], KeyboardInterrupt)
    assert all(isinstance(r, PeerLost) and "KeyboardInterrupt" in str(r) for r in results[:2])


def test_a_loader_that_does_not_take_all_weights_is_an_error_and_commits_nothing() -> None:
    sources, destinations = world(1)
    destinations[0].load_weights = lambda weights: next(iter(weights))  # type: ignore[method-assign]
    config = RefitConfig(bucket_mb=1, timeout_s=20.0)
    results = run_world(sources, destinations, refit_versions(1), config, "packed_broadcast")
    assert isinstance(results[2], RefitMismatch)
    assert "4 weights left" in str(results[2])
    assert all(isinstance(r, PeerLost) for r in results[:2])


def test_sampled_checks_come_to_every_message_whatever_the_versions_are() -> None:
    spec = TensorSpec("w", (2, 750_000), FP32)  # 12 rounds of 0.5 MiB
    whole = [((0, 2), (0, 750_000))]
    config = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="sampled", transport="p2p")
    results = run_world(
        [SyntheticSource([spec], {"w": whole})],
        [SyntheticDestination([spec], {"w": whole})],
        refit_versions(*range(0, 24, 2)),
        config,
    )
    records = [record for record, _, _ in results[1]]
    assert all(record.bytes_verified > 0 for record in records)
    assert sum(record.bytes_verified for record in records) == 2 * 750_000 * 4


def test_sampled_checks_of_the_conventional_path_on_cpus_take_a_part_of_the_weights_at_a_time() -> None:
    specs = [TensorSpec(f"w{i}", (1536, 1024), FP32) for i in range(3)]
    whole: Layout = {spec.name: [((0, 1536), (0, 1024))] for spec in specs}
    results = run_world(
        [SyntheticSource(specs, whole)],
        [SyntheticDestination(specs, whole)],
        refit_versions(1, 2, 3),
        RefitConfig(timeout_s=20.0, verify="sampled"),
        "packed_broadcast",
    )
    assert [(record.bytes_verified, wrong) for record, wrong, _ in results[1]] == [(specs[0].nbytes, [])] * 3


def test_a_late_rank_does_not_make_the_others_blame_trainer_rank_0_for_a_missing_one() -> None:
    sources, destinations = world(3)
    config = RefitConfig(timeout_s=1.5, bucket_mb=1)
    results = run_world(sources, destinations, late({1: 1.0, 4: 3.0}, never=4), config)
    assert all("generation rank 2" in str(r) for r in results[:4])


def test_an_engine_that_can_not_be_prepared_is_heard_of_by_all_ranks_at_once() -> None:
    sources, _ = world(1)

    class Refusing(SyntheticDestination):
        def fragments(self, specs: Any) -> Any:
            raise RefitError("the engine moves experts while it serves", stage="trace")

    start = time.monotonic()
    results = run_world(sources, [Refusing(SPECS, engine_layout(0, 1))], refit_versions(1))
    assert time.monotonic() - start < 10
    assert all("moves experts" in str(r) for r in results)


def test_after_a_failure_the_session_refuses_another_refit_and_a_new_epoch_heals_the_engine() -> None:
    sources, destinations = world(1)
    state = ServingState()

    def fail(version: int) -> None:
        raise ValueError("post-load failed")

    destinations[0].finish = fail  # type: ignore[method-assign]

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        for _ in range(2):
            try:
                session.refit(1)
            except (RefitError, ValueError) as error:
                last = error
        return last, session.state.dirty

    results = run_world(sources, destinations, body, states={2: state})
    assert all("ended with an error" in str(error) and "new epoch" in str(error) for error, _ in results)
    assert results[2][1]
    del destinations[0].finish
    results = run_world(sources, destinations, refit_versions(2), states={2: state})
    assert results[2][0][1:] == ([], 2)
    state.require_clean()


def test_a_closed_session_refuses_and_closes_twice_without_harm() -> None:
    sources, destinations = world(1)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        session.refit(1)
        session.close()
        with pytest.raises(RefitError, match="is closed"):
            session.refit(2)
        return True

    assert run_world(sources, destinations, body) == [True] * 3


class LooksLate(RefitEngine):
    """Trainers look for their weights once they have sent them, as those do that write from memory which is surely there.

    Attributes:
        found: what each look of a trainer found, in turn.
    """

    found: ClassVar[list[bool]] = []

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
                endpoint._held = {key: storage.clone() for key, storage in endpoint._held.items()}
            seen.append((refit_changed(session, endpoint, version)[1], session.state.version))
        return seen

    ends = run_world(*world(2), body)
    assert ends[2:] == [[([], 1), ([], 2), ([], 3)]] * (len(ends) - 2)
    # Two trainers, and one refit twice.
    assert sorted(LooksLate.found) == [False] * 7 + [True]


def test_weights_that_move_in_every_refit_end_it_and_nothing_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RefitEngine", LooksLate)
    monkeypatch.setattr(LooksLate, "_have_moved", lambda engine: True)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        with pytest.raises(RefitError):
            session.refit(1)
        return session.state.dirty, session.state.version

    assert run_world(*world(2), body)[2:] == [(True, -1)] * 2


@pytest.mark.parametrize("moved", [0, 2])
def test_storage_that_moves_on_one_rank_is_followed_on_all_before_the_engine_is_dirty(moved: int) -> None:
    sources, destinations = world(1)
    seen: list[tuple[int, bool]] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        rebind = session.engine.rebind
        session.engine.rebind = lambda: (seen.append((rank, session.state.dirty)), rebind())  # type: ignore[method-assign]
        refit_versions(1)(rank, session, endpoint)
        if rank == moved:
            held = "_held" if rank == 0 else "_wanted"
            setattr(endpoint, held, {key: value.clone() for key, value in getattr(endpoint, held).items()})
        return refit_versions(2, 3)(rank, session, endpoint)

    results = run_world(sources, destinations, body)
    assert [wrong for _, wrong, _ in results[2]] == [[], []]
    assert sorted(seen) == [(0, False), (1, False), (2, False)]
    # The time that it takes has a name of its own.
    assert ["bind" in record.seconds for record, _, _ in results[2]] == [True, False]


def test_a_stranger_who_knocks_during_refits_changes_nothing() -> None:
    sources, destinations = world(1)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        meeting = session._channel._rendezvous
        results = []
        for version in range(1, 6):
            if rank == 0:
                with pytest.raises(RefitError, match="another token"):
                    Channel(dataclasses.replace(meeting, token="0" * 64), session.world, 2.0)
                with socket.create_connection((meeting.host, meeting.port)) as stranger:
                    stranger.sendall(b"\xff" * 100_000)
            results += refit_versions(version)(rank, session, endpoint)
        return results

    results = run_world(sources, destinations, body)
    assert [(wrong, version) for _, wrong, version in results[2]] == [
        ([], version) for version in range(1, 6)
    ]


def test_a_record_says_where_the_time_went_and_a_timeline_only_if_it_is_asked_for() -> None:
    sources, destinations = world(1)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        return session.refit(1), session.refit(2, timeline=True)

    for plain, timed in run_world(sources, destinations, body):
        assert plain.timeline == ()
        assert {"handshake", "commit"} <= set(plain.seconds)
        assert 0 < plain.host_seconds < plain.seconds_total
        stages = [interval.stage for interval in timed.timeline]
        assert (stages[0], stages[-1]) == ("handshake", "commit")
        assert all(0 <= i.start <= i.end <= timed.seconds_total for i in timed.timeline)


def test_a_record_counts_the_time_that_it_takes_to_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, destinations = world(1)
    read = StageClock.seconds.fget
    assert read is not None

    def slowly(clock: StageClock) -> dict[str, float]:
        start = time.thread_time()
        while time.thread_time() - start < 0.1:
            pass
        return read(clock)

    monkeypatch.setattr(StageClock, "seconds", property(slowly))
    for [(record, _, _)] in run_world(sources, destinations, refit_versions(1)):
        assert record.host_seconds > 0.1
        assert record.seconds_total > 0.1


@pytest.mark.parametrize(("seen", "expected"), [(0, 1300), (200, 1300), (700, 1700)])
def test_peak_memory_adds_what_a_refit_takes_to_what_is_held(
    seen: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, destinations = world(1)
    # The allocator's peak counts what is taken in the refit, and not what was held before.
    monkeypatch.setattr(session_module, "_memory_mark", lambda device: 5000)
    monkeypatch.setattr(session_module, "_memory_peak", lambda device: 5000 + seen)
    monkeypatch.setattr(RefitEngine, "held_bytes", 1000)
    monkeypatch.setattr(RefitEngine, "staging_bytes", 1300)
    for [(record, _, _)] in run_world(sources, destinations, refit_versions(1)):
        assert record.peak_extra_bytes == expected


def test_a_wrong_configuration_is_told_whole_before_anything_is_opened() -> None:
    specs = [TensorSpec("w", (4, 8), BF16)]
    whole: Layout = {"w": [((0, 4), (0, 8))]}
    config = RefitConfig.unchecked(transport="pigeon", streams=99, timeout_s=float("inf"))
    results = run_world(
        [SyntheticSource(specs, whole)], [SyntheticDestination(specs, whole)], refit_versions(1), config
    )
    for error in results:
        assert isinstance(error, RefitError)
        assert all(key in str(error) for key in ("transport", "streams", "timeout_s"))
