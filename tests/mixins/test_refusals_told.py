"""A process that refuses before it has met the others: all of them hear of it at once, and by whom and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import RendezvousServer, open_rendezvous
from rlrefit.integration.control import channel as channel_module
from rlrefit.integration.control.channel import refusals_told
from rlrefit.integration.errors import PeerLost, RefitError
from rlrefit.integration.weights.endpoints import WeightDestination, WeightSource
from rlrefit.workers.engines.common.destination_mixin import DestinationRefitMixin
from rlrefit.workers.engines.common.guard import WeightsGuard
from rlrefit.workers.trainers.source_mixin import SourceRefitMixin
from tests.refit.meeting import join
from tests.refit.synthetic import pair
from tests.refit.test_odd_views import PLAIN

LIMIT_S = 30.0
AT_ONCE_S = 5.0


class Trainer(SourceRefitMixin):
    def __init__(self, **fields: Any) -> None:
        self.refit_config = RefitConfig.unchecked(bucket_mb=1, timeout_s=LIMIT_S, **fields)

    def _make_refit_source(self) -> WeightSource:
        return pair([PLAIN])[0][0]


class Engine(DestinationRefitMixin):
    def _make_refit_destination(self) -> WeightDestination:
        return pair([PLAIN])[1][0]

    def join(self, rendezvous: Any, rank: Any, **fields: Any) -> Any:
        config = {"bucket_mb": 1, "timeout_s": LIMIT_S, **fields}
        way = config.pop("engine", "nccl_xfer")
        return self.join_refit(rendezvous, rank, config, way)


def dirty() -> Engine:
    engine = Engine()
    engine.refit_state.mark_dirty(3)
    return engine


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = open_rendezvous("127.0.0.1", 1, 2)
    yield server
    server.close()


Joining = Callable[[Any], Any]


def met(server: RendezvousServer, first: bool, refuses: Joining, *others: Joining) -> list[Any]:
    """The error of each, the first of which refuses; before or after the others have come."""

    def joined(joins: Joining, wait_s: float) -> Any:
        time.sleep(wait_s)
        start = time.monotonic()
        try:
            joins(server.rendezvous.to_json())
        except Exception as error:
            return error, time.monotonic() - start
        return None, time.monotonic() - start

    waits = (0.0, *[0.4] * len(others)) if first else (0.4, *[0.0] * len(others))
    with ThreadPoolExecutor(1 + len(others)) as pool:
        results = list(pool.map(joined, (refuses, *others), waits))
    assert max(seconds for _, seconds in results) < AT_ONCE_S
    return [error for error, _ in results]


@pytest.mark.parametrize("first", [True, False], ids=["before the others", "as they wait"])
@pytest.mark.parametrize(
    ("refuses", "stage"),
    [
        (lambda meeting: Engine().join(meeting, 2, timeout=3), "settings"),
        (lambda meeting: Engine().join(meeting, 2, bucket_mb=0), None),
        (lambda meeting: dirty().join(meeting, 2, lora="adapter"), "settings"),
        (lambda meeting: Engine().join(meeting, 2, engine="nccl_xfre"), "settings"),
    ],
    ids=["unknown field", "value out of range", "adapter to dirty weights", "unknown engine"],
)
def test_an_engine_that_refuses_its_settings_ends_the_meeting_on_all_ranks_at_once(
    server: RendezvousServer, refuses: Joining, stage: str | None, first: bool
) -> None:
    refused, *heard = met(
        server,
        first,
        refuses,
        lambda meeting: Trainer().join_refit(meeting, 0),
        lambda meeting: Engine().join(meeting, 1),
    )
    assert isinstance(refused, (RefitError, ValueError))
    assert getattr(refused, "stage", None) == stage
    for error in heard:
        assert (type(error), error.blamed) == (PeerLost, 2)
        assert str(refused).split(";")[0] in str(error)


@pytest.mark.parametrize("first", [True, False], ids=["before the others", "as they wait"])
def test_a_trainer_whose_settings_are_wrong_ends_the_meeting_on_all_ranks_at_once(
    server: RendezvousServer, first: bool
) -> None:
    refused, *heard = met(
        server,
        first,
        lambda meeting: Trainer(transport="carrier pigeon").join_refit(meeting, 0),
        lambda meeting: Engine().join(meeting, 1),
        lambda meeting: Engine().join(meeting, 2),
    )
    assert (type(refused), refused.stage, refused.rank) == (RefitError, "settings", 0)
    assert [(type(error), error.blamed) for error in heard] == [(PeerLost, 0)] * 2


@pytest.mark.parametrize(
    ("rank", "first"), [(3, True), (3, False), (-1, False), ("2", True), (True, False), (1 << 40, False)]
)
def test_a_process_whose_number_is_no_rank_ends_the_meeting_on_all_ranks_at_once(
    server: RendezvousServer, rank: Any, first: bool
) -> None:
    refused, *heard = met(
        server,
        first,
        lambda meeting: Engine().join(meeting, rank),
        lambda meeting: Trainer().join_refit(meeting, 0),
        lambda meeting: Engine().join(meeting, 1),
    )
    assert (type(refused), refused.stage) == (RefitError, "rendezvous")
    assert [(type(error), error.blamed) for error in heard] == [(PeerLost, -1)] * 2
    assert all("127.0.0.1" in str(error) for error in heard)


def test_two_processes_of_one_rank_end_the_meeting_on_all_ranks_while_a_place_is_empty(
    server: RendezvousServer,
) -> None:
    refused, *heard = met(
        server,
        False,
        lambda meeting: Engine().join(meeting, 1),
        lambda meeting: Trainer().join_refit(meeting, 0),
        lambda meeting: Engine().join(meeting, 1),
    )
    assert (type(refused), refused.stage) == (RefitError, "rendezvous")
    assert [(type(error), error.blamed) for error in heard] == [(PeerLost, 1)] * 2


@pytest.mark.parametrize("rank", [1, 7])
def test_a_process_that_comes_once_all_are_there_is_refused_and_they_go_on(
    server: RendezvousServer, rank: int
) -> None:
    channels = [join(server, own) for own in range(3)]
    with pytest.raises(RefitError):
        Engine().join(server.rendezvous.to_json(), rank)
    for channel in channels:
        channel.check_abort("transfer")
    for channel in channels:
        channel.close()


def test_a_trainer_that_refits_the_epoch_which_it_opened_and_has_not_joined_ends_it_on_all_ranks() -> None:
    trainer = Trainer()
    meeting = trainer.open_refit_rendezvous("127.0.0.1", 1, 1)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Engine().join, meeting, 1)
        time.sleep(0.3)
        start = time.monotonic()
        with pytest.raises(RefitError, match="join_refit"):
            trainer.refit(1)
        heard = joining.exception(AT_ONCE_S)
        assert time.monotonic() - start < AT_ONCE_S
    assert isinstance(heard, PeerLost)
    assert heard.blamed == 0
    trainer.close_refit()


def test_an_engine_that_is_asleep_at_a_refit_tells_all_ranks_why_and_stays_what_it_was() -> None:
    trainer, engine = Trainer(), Engine()
    meeting = trainer.open_refit_rendezvous("127.0.0.1", 1, 1)
    engine.guard = WeightsGuard(engine.refit_state)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(trainer.join_refit, meeting, 0)
        engine.join(meeting, 1)
        joining.result(LIMIT_S)
        for version in (1, 2):
            sent = pool.submit(trainer.refit, version)
            engine.refit(version)
            sent.result(LIMIT_S)
        engine.guard._asleep = frozenset(("weights",))
        sent = pool.submit(trainer.refit, 3)
        with pytest.raises(RefitError, match="asleep"):
            engine.refit(3)
        heard = sent.exception(AT_ONCE_S)
    assert isinstance(heard, PeerLost)
    assert (heard.blamed, "asleep" in str(heard)) == (1, True)
    assert (engine.refit_state.version, engine.refit_state.dirty) == (2, False)
    engine.close_refit()
    trainer.close_refit()


def test_what_can_not_be_told_is_no_error_of_its_own(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_FAREWELL_S", 0.2)
    meeting = server.rendezvous
    server.close()
    time.sleep(0.2)
    with pytest.raises(KeyError, match="own"), refusals_told(meeting, 1):
        raise KeyError("own")
