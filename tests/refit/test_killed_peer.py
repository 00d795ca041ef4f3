"""A rank that is killed in the middle of a refit: all others end with an error, at once, and the engine is dirty."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from tests.spawn import processes

from .synthetic import ended

# What is only noticed by its limit takes as long; the others end at once, and have time to show it on a busy machine.
FROZEN_S, KILLED_S = 3.0, 10.0
# Opening has the limit, too, and GPUs compile kernels in it.
ON_GPU_S = 20.0


def limit_of(how: int, on_gpu: bool) -> float:
    """``timeout_s`` of a test."""
    if on_gpu:
        return ON_GPU_S
    return KILLED_S if how == signal.SIGKILL else FROZEN_S


def rank_main(
    rank: int,
    killed: int,
    moment: str,
    on_gpu: bool,
    how: int,
    engine: str,
    meeting: Any,
    ready: Any,
    results: Any,
) -> None:
    import torch

    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.control import open_rendezvous
    from rlrefit.integration.errors import RefitError
    from rlrefit.integration.session import RefitSession
    from rlrefit.integration.weights.manifest import TensorSpec

    from .synthetic import SyntheticDestination, SyntheticSource

    torch.set_num_threads(1)
    # Where there are fewer GPUs, several ranks share one.
    device = f"cuda:{rank % torch.cuda.device_count()}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    spec = TensorSpec("w", (1 << 16, 8), torch.bfloat16)
    box = {"w": [((0, 1 << 16), (0, 8))]}
    endpoint: Any = (
        SyntheticSource([spec], box, device=device)
        if rank == 0
        else SyntheticDestination([spec], box, device)
    )
    if rank == 0:
        server = open_rendezvous("127.0.0.1", 1, 2)
        for _ in range(2):
            meeting.put(server.rendezvous)
    rendezvous = server.rendezvous if rank == 0 else meeting.get(timeout=60)
    config = RefitConfig(bucket_mb=1, timeout_s=limit_of(how, on_gpu))
    ready.wait(60)  # the processes start at very different speeds
    session = RefitSession.open(rendezvous, rank, lambda: endpoint, config, engine=engine)
    session.refit(1)
    if rank == killed:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), how)

        if moment == "handshake":
            endpoint.storage_key = die
        elif moment == "transfer":
            transfer = "send_weights" if rank == 0 else "receive_weights"
            setattr(session.engine, transfer, die)
        else:
            endpoint.finish = die
    start = time.monotonic()
    try:
        session.refit(2)
        results.put((rank, "committed", 0.0, session.state.dirty, -1, ""))
    except RefitError as error:
        seconds = time.monotonic() - start
        told = f"{type(error).__name__}: {error}"
        again = str(ended(session, 3))
        results.put((rank, told, seconds, session.state.dirty, error.blamed, again))
    # The rendezvous ends with trainer rank 0's process, and on a busy machine others may take long to ask it.
    signal.pause()


def kill_a_rank(
    moment: str, on_gpu: bool, killed: int = 2, how: int = signal.SIGKILL, engine: str = "nccl_xfer"
) -> None:
    """Kill or stop a rank in its second refit, and check how the others end. Trainer rank 0 holds the rendezvous."""
    # CUDA starts in processes that nothing has touched.
    context: Any = multiprocessing.get_context("spawn") if on_gpu else processes()
    meeting, results = context.Queue(), context.Queue()
    ready = context.Barrier(3)
    ranks = [
        context.Process(
            target=rank_main, args=(r, killed, moment, on_gpu, how, engine, meeting, ready, results)
        )
        for r in range(3)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = {row[0]: row[1:] for row in (results.get(timeout=90) for _ in range(2))}
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert set(found) == {0, 1, 2} - {killed}
    noticed = how == signal.SIGKILL and not on_gpu  # by the end of its connection, and not in time
    for message, seconds, _, blamed, again in found.values():
        assert blamed == killed, message
        assert message.startswith("PeerLost" if noticed else ("PeerLost", "RefitTimeout"))
        assert message in again, "whoever refits once more is told the cause, not what it did to a wire"
        assert seconds < (1 if noticed else 3) * limit_of(how, on_gpu)
    if killed != 0:  # or its last answers may not have left, and the engines never begun
        written = moment != "handshake"
        assert found[1][2] is written, "an engine is dirty if and only if it was being written"


@pytest.mark.parametrize(
    ("moment", "killed"), [("handshake", 2), ("transfer", 2), ("post-load", 2), ("transfer", 0)]
)
def test_the_death_of_a_rank_ends_the_refit_on_all_others_at_once(moment: str, killed: int) -> None:
    kill_a_rank(moment, on_gpu=False, killed=killed)


@pytest.mark.parametrize(("moment", "killed"), [("transfer", 2), ("post-load", 2), ("transfer", 0)])
def test_a_rank_that_freezes_is_named_by_all_others_in_time(moment: str, killed: int) -> None:
    kill_a_rank(moment, on_gpu=False, killed=killed, how=signal.SIGSTOP)
