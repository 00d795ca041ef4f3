"""A trainer rank on a GPU that refuses before a refit over one-sided transports: the engine serves what it had, and refits again."""

from __future__ import annotations

from typing import Any

import pytest

from .needs import needs
from .spawned import spawned

pytestmark = needs()

TRAINERS, ENGINE = 2, 2


def run(rank: int, device: str, transport: str, meetings: Any, results: Any) -> None:
    """A rank of two epochs. ``meetings`` has a queue for each rank."""
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.control import Rendezvous, open_rendezvous
    from rlrefit.integration.errors import RefitError
    from rlrefit.integration.session import RefitSession, ServingState
    from tests.refit.synthetic import SPECS, SyntheticDestination, SyntheticSource, layout_of, refit_changed

    endpoint: Any
    if rank < TRAINERS:
        endpoint = SyntheticSource(SPECS, layout_of(rank, TRAINERS), {"router": "MoE router"}, device)
    else:
        endpoint = SyntheticDestination(SPECS, layout_of(0, 1), device)
    state = ServingState()

    def opened(epoch: int) -> tuple[RefitSession, Any]:
        server = open_rendezvous("127.0.0.1", TRAINERS, 1, epoch=epoch) if rank == 0 else None
        if server is not None:
            for other in meetings:
                other.put(server.rendezvous.to_json())
        rendezvous = Rendezvous.from_json(meetings[rank].get(timeout=60))
        config = RefitConfig(bucket_mb=1, timeout_s=60.0, verify="full", transport=transport)
        return RefitSession.open(rendezvous, rank, lambda: endpoint, config, state=state), server

    told: dict[str, Any] = {}
    session, server = opened(0)
    record, told["first"] = refit_changed(session, endpoint, 1)
    told["transport"] = record.transport
    if rank == 1:

        def refuse() -> None:
            del endpoint.prepare
            raise RefitError("no weights today", stage="export")

        endpoint.prepare = refuse
    if rank < TRAINERS:
        endpoint.set_version(2)
    try:
        session.refit(2)
        told["error"] = None
    except RefitError as error:
        told["error"] = type(error).__name__, error.blamed
    told["clean"] = not state.dirty, state.version
    told["held"] = [] if rank < TRAINERS else endpoint.wrong(1)
    session.close()
    following, next_server = opened(1)
    told["next"] = [refit_changed(following, endpoint, version)[1] for version in (2, 3)]
    told["served"] = state.version
    following.close()
    results.put((rank, told))
    for one in (server, next_server):
        if one is not None:
            one.close()


@pytest.mark.parametrize("transport", ["ipc", "pull"])
def test_an_engine_is_what_it_was_after_a_trainer_rank_refused_and_the_next_epoch_refits(
    transport: str,
) -> None:
    assert_engine_goes_on("cuda", transport)


def assert_engine_goes_on(device: str, transport: str) -> None:
    """Run the ranks, on one device, and judge what they tell."""
    import multiprocessing

    spawn = multiprocessing.get_context("spawn")
    meetings = [spawn.Queue() for _ in range(TRAINERS + 1)]
    with spawned(run, [(rank, device, transport, meetings) for rank in range(TRAINERS + 1)]) as results:
        told = dict(results.get(timeout=240) for _ in range(TRAINERS + 1))
    assert [told[rank]["error"] for rank in (0, ENGINE)] == [("PeerLost", 1)] * 2
    assert told[1]["error"] == ("RefitError", -1)
    engine = told[ENGINE]
    assert (engine["transport"], engine["first"], engine["held"]) == (transport, [], [])
    assert engine["clean"] == (True, 1)
    assert (engine["next"], engine["served"]) == ([[], []], 3)
