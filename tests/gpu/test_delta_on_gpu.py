"""Sparse refits between two GPUs, and on one: what differs lands bit for bit, over each wire."""

from __future__ import annotations

import multiprocessing
import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlrefit.integration.control import Rendezvous, open_rendezvous

from .needs import needs

pytestmark = [*needs(gpus=2), pytest.mark.timeout(150)]

# (engine, transport, where the base is kept, the engine's GPU)
CASES = {
    "p2p": ("nccl_xfer", "p2p", "gpu", 1),
    "ipc": ("nccl_xfer", "ipc", "gpu", 1),
    "base in host memory": ("nccl_xfer", "p2p", "host", 1),
    "one GPU": ("colocated_ipc", "auto", "gpu", 0),
}
SHARES = (0.001, 0.02, 0.5)


def rank_main(rank: int, rendezvous: Rendezvous, case: str, results: Any) -> None:
    """Report what is wrong, the share that changed and the bytes that travelled of each refit."""
    from rlrefit.integration.session import RefitSession
    from rlrefit.integration.weights.manifest import TensorSpec
    from tests.delta import scene

    engine, transport, base, gpu = CASES[case]
    try:
        device = f"cuda:{gpu if rank else 0}"
        torch.cuda.set_device(device)
        # Whole tiles, cut ones, and several sections of a bucket.
        scene.SPECS[4] = TensorSpec("large", (2100, 3000), torch.bfloat16)
        layout = scene.whole(scene.SPECS)
        endpoint: Any = (
            scene.Destination(scene.SPECS, layout, device)
            if rank
            else scene.Source(scene.SPECS, layout, {"router": "MoE router"}, device)
        )
        config = replace(scene.CONFIG, transport=transport, delta_base=base, timeout_s=60.0)
        session = RefitSession.open(rendezvous, rank, lambda: endpoint, config, engine=engine)
        found: list[Any] = []
        for version, share in enumerate((*SHARES, *SHARES), 1):
            scene.Source.share = scene.Destination.share = share
            found.append(scene.refit(session, endpoint, version))
        session.close()
        results.put((rank, [(wrong, r.changed_share, r.bytes_wire, r.bytes_bulk) for r, wrong in found]))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


@pytest.mark.parametrize("case", CASES)
def test_what_differs_lands_bit_for_bit(case: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    server = open_rendezvous("127.0.0.1", 1, 1)
    ranks = [spawn.Process(target=rank_main, args=(r, server.rendezvous, case, results)) for r in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for _ in ranks:
            rank, found = results.get(timeout=120)
            assert not isinstance(found, str), f"rank {rank}: {found}"
            assert [wrong for wrong, *_ in found] == [[]] * 6
            assert found[0][1] is None
            for _, share, wire, dense in found[1:]:
                assert share is not None
                assert wire <= 1.02 * dense + 1000
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
        server.close()
