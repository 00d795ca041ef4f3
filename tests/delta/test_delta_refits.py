"""Sparse refits end with the same bytes as dense ones, refit by refit; threads over gloo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError, VerificationError
from rlrefit.integration.session import RefitSession
from tests.refit.synthetic import held_by, move, run_world

from .scene import CONFIG, SPECS, Destination, Source, layout, refit, refits, source, world


def run(body: Any, config: RefitConfig = CONFIG, **kwargs: Any) -> list[Any]:
    results = run_world(*world(**kwargs), body, config)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize(
    ("engine", "base"), [("nccl_xfer", "gpu"), ("nccl_xfer", "optimizer"), ("colocated_ipc", "gpu")]
)
def test_what_differs_lands_bit_for_bit_in_each_refit_after_the_first(engine: str, base: str) -> None:
    results = run_world(*world(), refits(1, 2, 3, 4), replace(CONFIG, delta_base=base), engine)
    for rank, of_rank in enumerate(results):
        assert [wrong for _, wrong in of_rank] == [[]] * 4
        records = [record for record, _ in of_rank]
        assert records[0].changed_share is None
        for record in records[1:]:
            assert 0.005 < record.changed_share < 0.02
            assert record.bytes_wire < 0.1 * records[0].bytes_wire + 500, rank
            assert record.bytes_bulk == records[0].bytes_bulk


def test_nothing_travels_of_what_is_equal() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit(session, endpoint, 1)
        return session.refit(2), [] if session.world.is_source else endpoint.wrong(1)

    for record, wrong in run(body):
        assert (record.changed_share, wrong) == (0.0, [])
        assert record.bytes_wire == record.bytes_misc


@pytest.mark.parametrize(
    ("share", "base"),
    [(0.001, "gpu"), (0.05, "gpu"), (0.3, "gpu"), (1.0, "gpu"), (0.3, "optimizer"), (1.0, "optimizer")],
)
def test_any_share_of_change_lands_and_never_takes_much_more_than_all_bytes(
    share: float, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "share", share)
    monkeypatch.setattr(Destination, "share", share)
    for of_rank in run(refits(1, 2, 3), replace(CONFIG, delta_base=base)):
        dense, *sparse = [record for record, _ in of_rank]
        assert [wrong for _, wrong in of_rank] == [[]] * 3
        assert all(record.bytes_wire <= 1.02 * dense.bytes_wire for record in sparse)


def test_weights_that_moved_on_a_trainer_are_compared_where_they_lie_now() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit(session, endpoint, 1)
        if session.world.is_source:
            move(endpoint)
        return refit(session, endpoint, 2)

    for record, wrong in run(body):
        assert wrong == []
        assert record.changed_share is not None


def test_an_engine_whose_weights_moved_gets_all_of_them_and_the_next_refit_is_sparse() -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        first = refit(session, endpoint, 1)
        if session.world.rank == 3:
            endpoint.poison()
            move(endpoint)
        return [first, refit(session, endpoint, 2), refit(session, endpoint, 3)]

    for of_rank in run(body):
        assert [wrong for _, wrong in of_rank] == [[]] * 3
        assert [record.changed_share is None for record, _ in of_rank] == [True, True, False]


@pytest.mark.parametrize("verify", ["sampled", "full"])
def test_an_engine_whose_weights_were_written_by_others_is_caught_before_it_commits(verify: str) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refits(1, 2)(rank, session, endpoint)
        if session.world.rank == 4:
            endpoint.poison()
        try:
            refit(session, endpoint, 3)
        except RefitError as error:
            return error, session.state.dirty
        return None

    results = run(body, replace(CONFIG, verify=verify))
    assert isinstance(results[4][0], VerificationError)
    assert results[4][0].blamed in (0, 1)
    for error, dirty in results[2:]:
        assert isinstance(error, VerificationError | PeerLost)
        assert dirty


def test_a_new_epoch_begins_dense() -> None:
    sources, destinations = world()
    first = run_world(sources, destinations, refits(1, 2), CONFIG)
    second = run_world(sources, destinations, refits(3, 4), CONFIG)
    for of_rank in (*first, *second):
        assert [record.changed_share is None for record, _ in of_rank] == [True, False]
        assert [wrong for _, wrong in of_rank] == [[], []]


@pytest.mark.parametrize("base", ["gpu", "optimizer"])
def test_auto_goes_back_to_dense_refits_where_sparse_ones_are_slower_and_tries_again_later(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlrefit.integration.delta.choice import Choice

    def took(self: Choice, seconds: float) -> None:
        self._sparse_s, self._dense_s = (2.0, self._dense_s) if self._kind.sparse else (self._sparse_s, 1.0)

    monkeypatch.setattr(Choice, "took", took)
    for of_rank in run(refits(*range(1, 14)), replace(CONFIG, delta="auto", delta_base=base)):
        assert [wrong for _, wrong in of_rank] == [[]] * 13
        sparse = [record.changed_share is not None for record, _ in of_rank]
        # The second dense one is the measure. After the first slow one refits are dense for 8 steps, and one leaves a base.
        assert sparse == [False, False, True, *[False] * 9, True]


def test_the_bases_memory_is_counted() -> None:
    for of_rank in run(refits(1, 2), replace(CONFIG, delta="off")):
        assert all(record.changed_share is None for record, _ in of_rank)
    dense = run(refits(1, 2), replace(CONFIG, delta="off"))
    sparse = run(refits(1, 2))
    for rank in (0, 1):
        more = sparse[rank][1][0].peak_extra_bytes - dense[rank][1][0].peak_extra_bytes
        assert more >= sum(storage.nbytes for key, storage in held_by(world()[0][rank]).items()) * 0.4


def test_another_transport_than_shard_to_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="delta"):
        RefitConfig(delta="auto", transport="golden")
    with pytest.raises(ValueError, match="delta_base"):
        RefitConfig(delta_base="disk")


def test_an_engine_whose_weights_lie_elsewhere_once_a_trainer_was_followed_gets_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fragments(self: Any, specs: Any) -> Any:
        # As engines do that stage what they take: memory of its own each time it is asked.
        if self.finished:
            move(self)
            self.poison()
        return original(self, specs)

    original = Destination.fragments
    monkeypatch.setattr(Destination, "fragments", fragments)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit(session, endpoint, 1)
        if rank == 0:
            move(endpoint)
        return refit(session, endpoint, 2)

    for record, wrong in run(body):
        assert (wrong, record.changed_share) == ([], None)


def test_replicas_that_pass_on_to_each_other_share_a_base() -> None:
    sources = [source(0, 1)]
    replicas = [Destination(SPECS, layout(0, 1)) for _ in range(2)]
    one = run_world(sources, replicas[:1], refits(1, 2, 3), CONFIG)
    both = run_world(sources, replicas, refits(1, 2, 3), CONFIG)
    assert [wrong for of_rank in both for _, wrong in of_rank] == [[]] * 9
    assert all(of_rank[-1][0].changed_share is not None for of_rank in both)
    assert both[0][-1][0].peak_extra_bytes < 1.5 * one[0][-1][0].peak_extra_bytes
