"""A rank that is killed in the middle of a refit: all others end with an error, in time, and the engine is dirty."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

TIMEOUT_S = 6.0
KILLED = 2


def rank_main(rank: int, moment: str, on_gpu: bool, meeting: Any, results: Any) -> None:
    import torch

    from rlrefit.integration.channel import Rendezvous, open_store
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.errors import RefitError
    from rlrefit.integration.manifest import TensorSpec
    from rlrefit.integration.session import RefitSession

    from .synthetic import SyntheticDestination, SyntheticSource

    torch.set_num_threads(1)
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    spec = TensorSpec("w", (1 << 16, 8), torch.bfloat16)
    box = {"w": [((0, 1 << 16), (0, 8))]}
    endpoint: Any = (
        SyntheticSource([spec], box, device=device)
        if rank == 0
        else SyntheticDestination([spec], box, device)
    )
    store = open_store("127.0.0.1", 0, TIMEOUT_S) if rank == 0 else None
    if store is not None:
        for _ in range(2):
            meeting.put(store.port)
    port = store.port if store is not None else meeting.get(timeout=60)
    config = RefitConfig(bucket_mb=1, timeout_s=TIMEOUT_S)
    session = RefitSession.open(
        Rendezvous("127.0.0.1", port, 1, 2), rank, lambda: endpoint, config, store=store
    )
    session.refit(1)
    if rank == KILLED:
        if moment == "transfer":
            endpoint.storage_key = lambda: os.kill(os.getpid(), signal.SIGKILL)
        else:
            endpoint.finish = lambda version: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        session.refit(2)
        results.put((rank, "committed", 0.0, session.state.dirty))
    except RefitError as error:
        results.put((rank, f"{type(error).__name__}: {error}", time.monotonic() - start, session.state.dirty))


def kill_a_rank(moment: str, on_gpu: bool) -> None:
    """Kill generation rank 1 in its second refit, and check how the others end."""
    spawn = multiprocessing.get_context("spawn")
    meeting, results = spawn.Queue(), spawn.Queue()
    ranks = [spawn.Process(target=rank_main, args=(r, moment, on_gpu, meeting, results)) for r in range(3)]
    for rank in ranks:
        rank.start()
    try:
        ended = {row[0]: row[1:] for row in (results.get(timeout=90) for _ in range(2))}
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert set(ended) == {0, 1}
    for message, seconds, _ in ended.values():
        assert message.startswith(("PeerLost", "RefitTimeout"))
        assert seconds < 2 * TIMEOUT_S + 3
    assert ended[1][2], "the surviving engine was being written and must refuse to generate"


@pytest.mark.parametrize("moment", ["transfer", "post-load"])
def test_the_death_of_an_engine_rank_ends_the_refit_on_all_ranks_within_the_timeout(moment: str) -> None:
    kill_a_rank(moment, on_gpu=False)
