"""What an engine's worker tells of its last refit, and of one that failed since."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import open_rendezvous
from rlrefit.integration.errors import EngineDirty, PeerLost, RefitError
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.common.destination_mixin import DestinationRefitMixin
from rlrefit.workers.engines.common.guard import WeightsGuard
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, ended, whole

SPECS = [TensorSpec("w", (8, 4), torch.float32)]
CONFIG = {"bucket_mb": 1, "timeout_s": 20.0, "transport": "p2p"}


class Engine(DestinationRefitMixin):
    def __init__(self) -> None:
        self.destination = SyntheticDestination(SPECS, whole(SPECS))
        self.guard: WeightsGuard = WeightsGuard(self.refit_state)

    def _make_refit_destination(self) -> Any:
        return self.destination


class Trainer:
    """Of one rank; its refits run beside the engine's."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.source = SyntheticSource(SPECS, whole(SPECS))
        self.pool = pool
        self.session: RefitSession | None = None

    def refuse_next(self) -> None:
        def refuse() -> None:
            del self.source.prepare
            raise RefitError("no weights today", stage="export", parameter="w")

        self.source.prepare = refuse  # type: ignore[method-assign]

    @contextmanager
    def refits(self, version: int) -> Iterator[None]:
        assert self.session is not None
        self.source.set_version(version)
        sending = self.pool.submit(ended, self.session, version)
        yield
        sending.result()


@contextmanager
def met(trainer: Trainer, engine: Engine) -> Iterator[None]:
    server = open_rendezvous("127.0.0.1", 1, 1)
    joining = trainer.pool.submit(
        RefitSession.open, server.rendezvous, 0, lambda: trainer.source, RefitConfig(**CONFIG)
    )
    engine.join_refit(server.rendezvous.to_json(), 1, CONFIG)
    trainer.session = joining.result()
    yield
    trainer.session.close()
    engine.close_refit()
    server.close()


@pytest.fixture
def sides() -> Iterator[tuple[Trainer, Engine]]:
    with ThreadPoolExecutor(1) as pool:
        yield Trainer(pool), Engine()


def test_an_attempt_that_failed_is_told_beside_the_last_record_until_a_refit_commits(
    sides: tuple[Trainer, Engine],
) -> None:
    trainer, engine = sides
    assert engine.refit_record() == {}
    with met(trainer, engine):
        with trainer.refits(1):
            first = engine.refit(1)
        assert engine.refit_record() == first
        trainer.refuse_next()
        with trainer.refits(2), pytest.raises(PeerLost) as failed:
            engine.refit(2)
    told = engine.refit_record()
    attempt = told.pop("failed_attempt")
    assert told == first
    error = failed.value
    assert attempt == {
        "version": 2,
        "type": "PeerLost",
        "text": str(error),
        "stage": error.stage,
        "rank": 1,
        "parameter": "",
        "blamed": 0,
    }
    assert (engine.refit_state.version, engine.destination.wrong(1)) == (1, [])
    with met(trainer, engine), trainer.refits(2):
        second = engine.refit(2)
    assert engine.refit_record() == second
    assert engine.destination.wrong(2) == []


def test_an_attempt_that_failed_before_any_success_is_told_without_a_record(
    sides: tuple[Trainer, Engine],
) -> None:
    _, engine = sides
    with pytest.raises(RefitError):
        engine.refit(4)
    attempt = engine.refit_record().pop("failed_attempt")
    assert (attempt["version"], attempt["type"], attempt["stage"]) == (4, "RefitError", "handshake")


def test_weights_that_a_sleep_discarded_are_not_served_after_a_refusal_and_are_after_the_next_refit(
    sides: tuple[Trainer, Engine],
) -> None:
    trainer, engine = sides
    with met(trainer, engine):
        with trainer.refits(1):
            engine.refit(1)
        engine.guard.slept(["weights"])
        engine.guard.discarded("a level 2 sleep discarded the weights")
        engine.destination.poison()
        engine.guard.woke(["weights"])
        trainer.refuse_next()
        with trainer.refits(2), pytest.raises(PeerLost):
            engine.refit(2)
    assert not engine.refit_state.dirty  # nobody wrote; what they are is another matter
    with pytest.raises(EngineDirty):
        engine.guard.require_whole()
    with met(trainer, engine), trainer.refits(2):
        engine.refit(2)
    engine.guard.require_servable()
    assert engine.destination.wrong(2) == []
