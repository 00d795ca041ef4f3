"""Engines whose weights sleep between refits: what is lost comes whole, and what was kept is built on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlrefit.integration.session import RefitSession
from rlrefit.integration.transport.p2p import P2PTransport
from tests.refit.synthetic import held_by, move, run_world

from .scene import CONFIG, Destination, refit, world

Sleep = Callable[[Any], None]


@pytest.fixture(autouse=True)
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Destination, "gives_memory_back", True)


@pytest.fixture
def bound_anew(monkeypatch: pytest.MonkeyPatch) -> set[P2PTransport]:
    """As a transport that writes from outside: it lets go of memory that sleeps, and asks to be bound again each time.

    Returns:
        Those of all ranks that have not let go.
    """
    bound: set[P2PTransport] = set()
    bind, run = P2PTransport.bind, P2PTransport.run

    def binds(self: P2PTransport, fragments: Any) -> None:
        bound.add(self)
        bind(self, fragments)

    def runs(self: P2PTransport, *args: Any) -> Any:
        result = run(self, *args)
        self.release()
        return result

    monkeypatch.setattr(P2PTransport, "bind", binds)
    monkeypatch.setattr(P2PTransport, "run", runs)
    monkeypatch.setattr(P2PTransport, "release", lambda self: bound.discard(self))
    monkeypatch.setattr(P2PTransport, "moved", lambda self: self not in bound)
    return bound


def keeps(endpoint: Any) -> None:
    """The same bytes in the same places, in memory that was given back meanwhile."""
    for storage in held_by(endpoint).values():
        kept = storage.clone()
        storage.unsqueeze(-1).view(torch.uint8).fill_(0x7F)
        storage.copy_(kept)


def discards(endpoint: Any) -> None:
    endpoint.poison()


def loses_a_byte(endpoint: Any) -> None:
    storage = held_by(endpoint)[next(key for key in held_by(endpoint) if key[0] == "large")]
    storage.view(torch.uint8)[-1, -1] ^= 1


def after(
    sleeps: list[Sleep], config: Any = CONFIG, others_hold: Callable[[], bool] = lambda: False
) -> list[list[Any]]:
    """By rank the records of refits, each but the first after a sleep of one engine rank in which the others keep their bytes."""

    def body(rank: int, session: RefitSession, endpoint: Any) -> list[Any]:
        found = []
        for version, sleep in enumerate([None, *sleeps]):
            if sleep is not None and not session.world.is_source:
                assert not others_hold()
                (sleep if rank == 3 else keeps)(endpoint)
            record, wrong = refit(session, endpoint, version)
            assert wrong == []
            found.append(record)
        return found

    results = run_world(*world(), body, config)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("lost", [discards, loses_a_byte, move])
def test_refits_are_sparse_after_sleeps_that_kept_all_bytes_and_dense_after_others(lost: Sleep) -> None:
    _expect_dense_after(lost)


def test_the_same_holds_where_memory_is_let_go_after_each_refit(bound_anew: set[P2PTransport]) -> None:
    _expect_dense_after(loses_a_byte, lambda: bool(bound_anew))


def _expect_dense_after(lost: Sleep, others_hold: Callable[[], bool] = lambda: False) -> None:
    for records in after([keeps, keeps, lost, keeps, keeps], others_hold=others_hold):
        assert [record.changed_share is None for record in records] == [
            True,
            False,
            False,
            True,
            False,
            False,
        ]


def test_an_engine_that_loses_its_weights_in_each_sleep_takes_no_bases_for_a_while_under_auto() -> None:
    _expect_one_base()


def test_nor_where_memory_is_let_go_after_each_refit(bound_anew: set[P2PTransport]) -> None:
    _expect_one_base()


def _expect_one_base() -> None:
    *_, records = after([discards] * 4, replace(CONFIG, delta="auto"))
    assert all(record.changed_share is None for record in records)
    # All bytes are compared where a base is left.
    bases = [number for number, record in enumerate(records) if record.bytes_verified >= record.bytes_bulk]
    assert bases == [1]


def test_a_sleeping_engine_holds_no_memory_for_blocks_between_refits(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        for version in (1, 2):
            refit(session, endpoint, version)
        return session.engine.held_bytes

    def held() -> list[Any]:
        sources, destinations = world()
        for source in sources:
            source.refused = {}  # whose buckets such an engine does not hold either
        return run_world(sources, destinations, body, CONFIG)

    asleep = held()
    monkeypatch.setattr(Destination, "gives_memory_back", False)
    awake = held()
    for rank in (2, 3, 4):
        assert asleep[rank] < awake[rank]
