"""What ranks do on their hosts: refits of plain tensors, with the test as the launcher that hands the rendezvous on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.integration.records.record import RefitRecord
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import (
    SPECS,
    SyntheticDestination,
    SyntheticSource,
    layout_of,
    refit_changed,
    whole,
)

from .crew import Talk

TRAINERS = ENGINES = 2
# 8 MiB from each trainer to each engine, more than connections take in by themselves.
LARGE = TensorSpec("large", (1 << 12, 1 << 11), torch.bfloat16)


@dataclass(frozen=True)
class Way:
    """A refit engine and a transport."""

    engine: str
    transport: str


@dataclass(frozen=True)
class Refitted:
    """What two refits by a way left: the last record, why that transport served, and weights that are wrong."""

    record: RefitRecord
    reason: str
    wrong: list[str]


@dataclass(frozen=True)
class Ended:
    """An error, and the seconds until then; ``dirty`` if it left an engine so."""

    error: RefitError
    seconds: float
    dirty: bool = False


def refit_twice(
    rank: int, talk: Talk, host: str, ways: list[Way], timeout_s: float
) -> list[Refitted | Ended]:
    """Two refits of changed weights by each way, an epoch for each; engines begin each with NaN."""
    return [_by(way, epoch, rank, talk, host, timeout_s) for epoch, way in enumerate(ways)]


def refit_across_a_fault(rank: int, talk: Talk, host: str, timeout_s: float) -> Refitted:
    """A refit; one during which rank 0 says that it is about to send, and waits to be told; and one in another epoch."""
    way, state = Way("nccl_xfer", "p2p"), ServingState()
    endpoint = _endpoint(rank, LARGE)
    session = _open(way, 0, rank, talk, host, endpoint, state, timeout_s)
    refit_changed(session, endpoint, 1)
    if rank == 0:
        send = session.engine.send_weights

        def wait_in_the_middle(*args: Any) -> Any:
            talk.say("in the middle")
            talk.hear()
            return send(*args)

        session.engine.send_weights = wait_in_the_middle  # type: ignore[method-assign]
    else:
        talk.say("ready")
    start = time.monotonic()
    try:
        refit_changed(session, endpoint, 2)
        raise AssertionError("nothing went wrong")
    except RefitError as error:
        ended = Ended(error, time.monotonic() - start, state.dirty)
    session.close()
    talk.say(ended)
    talk.hear()
    session = _open(way, 1, rank, talk, host, endpoint, state, timeout_s)
    record, wrong = refit_changed(session, endpoint, 3)
    assert not state.dirty
    session.close()
    return Refitted(record, "", wrong)


def _by(way: Way, epoch: int, rank: int, talk: Talk, host: str, timeout_s: float) -> Refitted | Ended:
    endpoint, start = _endpoint(rank), time.monotonic()
    try:
        session = _open(way, epoch, rank, talk, host, endpoint, ServingState(), timeout_s)
        wrong: list[str] = []
        for version in (1, 2):
            record, faults = refit_changed(session, endpoint, version)
            wrong += faults
        session.close()
        return Refitted(record, session.engine.transport_reason, wrong)
    except RefitError as error:
        return Ended(error, time.monotonic() - start)


def _open(
    way: Way,
    epoch: int,
    rank: int,
    talk: Talk,
    host: str,
    endpoint: Any,
    state: ServingState,
    timeout_s: float,
) -> RefitSession:
    if rank == 0:
        talk.say(open_rendezvous(host, TRAINERS, ENGINES, epoch=epoch).rendezvous.to_json())
    rendezvous = Rendezvous.from_json(talk.hear())
    config = RefitConfig(bucket_mb=1, timeout_s=timeout_s, verify="full", transport=way.transport)
    return RefitSession.open(rendezvous, rank, lambda: endpoint, config, engine=way.engine, state=state)


def _endpoint(rank: int, *more: TensorSpec) -> Any:
    """Of a world of two trainers and two engines, in which two weights are cut and the router takes the misc path."""
    specs = [*SPECS, *more]
    if rank < TRAINERS:
        return SyntheticSource(specs, layout_of(rank, TRAINERS) | whole(more), {"router": "MoE router"})
    return SyntheticDestination(specs, layout_of(rank - TRAINERS, ENGINES) | whole(more))
