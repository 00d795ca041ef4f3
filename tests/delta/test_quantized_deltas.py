"""Sparse refits of codes and scales end with the bytes of dense ones, where the engine leaves those as they were written."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import PeerLost, RefitError, VerificationError
from rlrefit.integration.session import RefitSession
from tests.refit.synthetic import held_by, move, run_world

from .fp8_scene import BULK, CONFIG, Destination, Promising, engines, sources
from .scene import refit, refits


def run(endpoints: list[Any], body: Any) -> list[Any]:
    results = run_world(sources(), endpoints, body, CONFIG)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def kinds(of_rank: list[Any]) -> list[bool]:
    """Which of its refits were sparse."""
    return [record.changed_share is not None for record, _ in of_rank]


@pytest.mark.parametrize("layout", ["tp1", "tp2", "ep2"])
def test_codes_and_scales_that_differ_land_bit_for_bit_in_each_refit_after_the_first(layout: str) -> None:
    results = run(engines(layout), refits(1, 2, 3, 4))
    for of_rank in results:
        assert [wrong for _, wrong in of_rank] == [[]] * 4
        assert kinds(of_rank) == [False, True, True, True]
        dense, *sparse = [record for record, _ in of_rank]
        assert dense.bytes_bulk <= 2 * BULK
        assert all(0 < record.changed_share < 0.05 for record in sparse)
        assert all(record.bytes_wire < 0.3 * dense.bytes_wire for record in sparse)


def test_weights_that_moved_on_a_trainer_are_quantized_and_compared_where_they_lie_now() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        first = refit(session, endpoint, 1)
        if rank == 0:
            move(endpoint)
        return [first, refit(session, endpoint, 2), refit(session, endpoint, 3)]

    for of_rank in run(engines("tp2"), body):
        assert [wrong for _, wrong in of_rank] == [[]] * 3
        assert kinds(of_rank) == [False, True, True]


def test_a_weight_that_is_no_number_any_more_ends_a_sparse_refit_by_name_before_it_commits() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        done = refits(1, 2)(rank, session, endpoint)
        if session.world.is_source:
            endpoint.set_version(3)
            # In a block that both trainers hold in part.
            [(first, storage)] = [(b[0][0], s) for (n, b), s in held_by(endpoint).items() if n == "cut"]
            if first:
                storage[80 - first, 30] = float("nan")
        with pytest.raises(RefitError) as raised:
            session.refit(3)
        return done, raised.value, session.state

    results = run(engines("tp1"), body)
    for done, error, _ in results:
        assert (kinds(done), [wrong for _, wrong in done]) == ([False, True], [[], []])
        assert "parameter cut" in str(error)
    [state] = [state for _, _, state in results[2:]]
    assert (state.version, state.dirty) == (2, True)


def requantize(endpoint: Any) -> None:
    """As some engines do for their kernels: codes twice as large, and half the scale, of a block that has room for it."""
    for (name, _), storage in held_by(endpoint).items():
        if name == "column":
            storage[:128, :128] = (storage[:128, :128].float() * 0.5).to(torch.float8_e4m3fn)


class Requantizing:
    """An engine that looks at what a refit left, and then requantizes it."""

    seen: list[str]

    def finish(self: Any, version: int) -> None:
        self.seen = self.wrong(version)
        requantize(self)


def what_is_seen(rank: int, session: RefitSession, endpoint: Any) -> Any:
    """Of three refits the changed share and what was wrong before the engine requantized; and the bytes of the base."""
    found = []
    for version in (1, 2, 3):
        if session.world.is_source:
            endpoint.set_version(version)
        record = session.refit(version)
        found.append((record.changed_share, [] if session.world.is_source else endpoint.seen))
    return found, session.engine.base_bytes


def test_refits_are_dense_and_no_base_is_kept_where_an_engine_does_not_promise_to_leave_codes_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(Requantizing, Destination):
        pass

    assert run(engines("tp2", Silent), what_is_seen) == [([(None, [])] * 3, 0)] * 4
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING and "delta" in r.getMessage()]
    assert "column" in record.getMessage()


def test_an_engine_that_breaks_its_promise_is_given_all_weights_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Requantizing, Promising):
        pass

    assert [seen for seen, _ in run(engines("tp1", Broken), what_is_seen)] == [[(None, [])] * 3] * 3
    assert [r.levelname for r in caplog.records if "does not hold" in r.getMessage()] == ["WARNING"] * 2


def test_an_engine_that_breaks_its_promise_after_a_sparse_refit_is_caught_before_it_commits() -> None:
    class BrokenLater(Promising):
        def finish(self, version: int) -> None:
            if version == 2:
                requantize(self)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refits(1, 2)(rank, session, endpoint)
        with pytest.raises(RefitError) as raised:
            refit(session, endpoint, 3)
        return raised.value, session.state

    results = run(engines("tp1", BrokenLater), body)
    error, state = results[2]
    assert isinstance(error, VerificationError)
    assert (state.version, state.dirty) == (2, True)
    assert all(isinstance(error, PeerLost) for error, _ in results[:2])
