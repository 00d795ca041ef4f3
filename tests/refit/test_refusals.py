"""A trainer rank that can't send its weights: nobody writes, no engine is dirty, and the next epoch refits."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError
from rlrefit.integration.session import RefitSession, ServingState

from .synthetic import SyntheticSource, ended, move, refit_changed, run_world, world

ENGINES = (2, 3)


def refusing(source: Any, refuses: Any) -> None:
    """Have the source refuse its next preparation."""

    def prepare() -> None:
        del source.prepare
        raise refuses

    source.prepare = prepare


@pytest.mark.parametrize("moved", [False, True], ids=["in place", "moved"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "together"])
@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("nccl_xfer", {"transport": "p2p"}),
        ("nccl_xfer", {"transport": "golden"}),
        ("nccl_xfer", {"transport": "p2p", "delta": "always"}),
        ("colocated_ipc", {"transport": "p2p"}),
        ("packed_broadcast", {}),
    ],
    ids=["p2p", "golden", "delta", "colocated buckets", "broadcast"],
)
def test_engines_serve_on_what_they_have_after_a_trainer_rank_refused_and_the_next_epoch_refits(
    engine: str, fields: dict[str, Any], alone: bool, moved: bool
) -> None:
    sources, destinations = world(2)
    for source in sources:
        source.prepares_alone = alone
    states = {rank: ServingState() for rank in ENGINES}
    config = RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", **fields)

    def refused(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit_changed(session, endpoint, 1)
        if rank == 1:
            refusing(endpoint, RefitError("no weights today", stage="export"))
        if session.world.is_source:
            endpoint.set_version(2)
            if moved:
                move(endpoint)
        start = time.monotonic()
        error = ended(session, 2)
        return error, time.monotonic() - start

    results = run_world(sources, destinations, refused, config, engine, states)
    own, *others = [results[rank][0] for rank in (1, 0, *ENGINES)]
    assert (type(own), own.stage) == (RefitError, "export")
    assert [(type(error), error.blamed) for error in others] == [(PeerLost, 1)] * 3
    assert all(seconds < 5 for _, seconds in results)
    for rank, destination in zip(ENGINES, destinations, strict=True):
        states[rank].require_clean()
        assert (states[rank].version, destination.wrong(1), destination.finished) == (1, [], [1])

    def again(rank: int, session: RefitSession, endpoint: Any) -> Any:
        return [refit_changed(session, endpoint, version)[1] for version in (2, 3)]

    assert run_world(sources, destinations, again, config, engine, states)[2:] == [[[], []]] * 2
    assert [state.version for state in states.values()] == [3, 3]


def test_an_engine_that_was_dirty_before_a_trainer_rank_refused_stays_so() -> None:
    sources, destinations = world(2)
    states = {rank: ServingState() for rank in ENGINES}

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        if rank == ENGINES[0]:
            session.state.mark_dirty(7)
        if rank == 0:
            refusing(endpoint, ValueError("no weights"))
        return ended(session, 8)

    results = run_world(sources, destinations, body, states=states)
    assert isinstance(results[0], ValueError)
    assert [(type(error), error.blamed) for error in results[1:]] == [(PeerLost, 0)] * 3
    assert [states[rank].dirty_since for rank in ENGINES] == [7, None]


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "together"])
def test_all_trainer_ranks_are_prepared_before_any_rank_writes(alone: bool) -> None:
    sources, destinations = world(1)
    prepared: list[int] = []
    seen: list[int] = []

    class Slow(SyntheticSource):
        prepares_alone = alone

        def prepare(self) -> None:
            time.sleep(0.1)
            prepared.append(self.version)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        if session.world.is_source:
            send = session.engine.send_weights
            session.engine.send_weights = lambda *args: (seen.append(len(prepared)), send(*args))[1]  # type: ignore[method-assign]
        return [refit_changed(session, endpoint, version)[1] for version in (1, 2)]

    sources[1].__class__ = Slow
    sources[1].prepares_alone = alone
    assert run_world(sources, destinations, body)[2] == [[], []]
    assert prepared == [1, 2]
    assert sorted(seen) == [1, 1, 2, 2]


def test_an_engine_that_fails_lets_trainer_ranks_draw_their_exports_to_the_end() -> None:
    sources, destinations = world(1)
    drawn: dict[int, list[str]] = {0: [], 1: []}
    together = threading.Barrier(2)

    def fail(weights: Any) -> None:
        next(iter(weights))
        raise ValueError("the loader does not like it")

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        if session.world.is_source:
            export = endpoint.export

            def exported(names: Any) -> Any:
                for name, weight in export(names):
                    together.wait(20)  # as a collective of both
                    drawn[rank].append(name)
                    yield name, weight

            endpoint.export = exported
        else:
            endpoint.load_weights = fail
        return ended(session, 1)

    results = run_world(sources, destinations, body, engine="packed_broadcast")
    assert [(type(error), error.blamed) for error in results[:2]] == [(PeerLost, 2)] * 2
    assert isinstance(results[2], ValueError)
    names = [spec.name for spec in sources[0].specs()]
    assert drawn == {0: names, 1: names}
