"""Sparse refits between two GPUs, and on one: what differs lands bit for bit, over each wire."""

from __future__ import annotations

import traceback
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlrefit.integration.control import Rendezvous, open_rendezvous

from .needs import needs
from .spawned import spawned

pytestmark = [*needs(gpus=2), pytest.mark.timeout(150)]

# (engine, transport, where the base is kept, the engine's GPU)
CASES = {
    "p2p": ("nccl_xfer", "p2p", "gpu", 1),
    "ipc": ("nccl_xfer", "ipc", "gpu", 1),
    "base in host memory": ("nccl_xfer", "p2p", "host", 1),
    "one GPU": ("colocated_ipc", "auto", "gpu", 0),
    "recorded steps, p2p": ("nccl_xfer", "p2p", "optimizer", 1),
    "recorded steps, ipc": ("nccl_xfer", "ipc", "optimizer", 1),
    "recorded steps, one GPU": ("colocated_ipc", "auto", "optimizer", 0),
}
SHARES = (0.001, 0.02, 0.5)


# Codes and scales in the place of most weights; engines that give their memory back between refits.
FP8_CASES = {"FP8, p2p": CASES["p2p"], "FP8, base in host memory": CASES["base in host memory"]}
SLEEPING_CASES = {
    "asleep, ipc": CASES["ipc"],
    "asleep, one GPU": CASES["one GPU"],
    "asleep, recorded steps": CASES["recorded steps, ipc"],
}
LOST = 3


def rank_main(rank: int, rendezvous: Rendezvous, case: str, results: Any) -> None:
    """Report what is wrong, the share that changed and the bytes that travelled of each refit."""
    from rlrefit.integration.session import RefitSession
    from rlrefit.integration.weights.manifest import TensorSpec
    from tests.delta import fp8_scene, scene

    engine, transport, base, gpu = (CASES | FP8_CASES | SLEEPING_CASES)[case]
    try:
        device = f"cuda:{gpu if rank else 0}"
        torch.cuda.set_device(device)
        # Whole tiles, cut ones, and several sections of a bucket.
        scene.SPECS[4] = TensorSpec("large", (2100, 3000), torch.bfloat16)
        layout = scene.whole(scene.SPECS)
        endpoint: Any
        if case in FP8_CASES:
            [endpoint] = fp8_scene.engines("tp1", device=device) if rank else fp8_scene.sources(1, device)
        elif rank:
            endpoint = scene.Destination(scene.SPECS, layout, device)
        else:
            endpoint = scene.Source(scene.SPECS, layout, {"router": "MoE router"}, device)
        memory = _memory_that_sleeps(endpoint) if rank and case in SLEEPING_CASES else None
        config = fp8_scene.CONFIG if case in FP8_CASES else scene.CONFIG
        config = replace(config, transport=transport, delta_base=base, timeout_s=60.0)
        session = RefitSession.open(rendezvous, rank, lambda: endpoint, config, engine=engine)
        found: list[Any] = []
        for version, share in enumerate((*SHARES, *SHARES), 1):
            if case not in FP8_CASES:
                scene.Source.share = scene.Destination.share = share
            if memory is not None:
                _sleep(endpoint, memory, keep=version != LOST)
            found.append(scene.refit(session, endpoint, version))
        session.close()
        results.put((rank, [(wrong, r.changed_share, r.bytes_wire, r.bytes_bulk) for r, wrong in found]))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


def _memory_that_sleeps(endpoint: Any) -> Any:
    """Put the weights of an engine rank there."""
    from rlrefit.recipes.bench.sleeping import SleepingMemory

    wanted = endpoint._wanted
    device = next(iter(wanted.values())).device
    memory = SleepingMemory([storage.numel() * storage.element_size() for storage in wanted.values()], device)
    for index, (key, storage) in enumerate(list(wanted.items())):
        wanted[key] = memory.tensor(index, storage.shape, storage.dtype)
    endpoint.gives_memory_back = True
    return memory


def _sleep(endpoint: Any, memory: Any, keep: bool) -> None:
    """Other memory at the same addresses, with the same bytes or with others."""
    kept = {key: storage.cpu() for key, storage in endpoint._wanted.items()}
    torch.cuda.synchronize()
    memory.sleep()
    memory.wake()
    endpoint.poison()
    if keep:
        for key, storage in endpoint._wanted.items():
            storage.copy_(kept[key])


def refits_of(case: str) -> list[list[Any]]:
    """Of the trainer and of the engine, what :func:`rank_main` reports of six refits."""
    server = open_rendezvous("127.0.0.1", 1, 1)
    ranks = [(r, server.rendezvous, case) for r in range(2)]
    with closing(server), spawned(rank_main, ranks) as results:
        told = dict(results.get(timeout=120) for _ in ranks)
    for rank, found in told.items():
        assert not isinstance(found, str), f"rank {rank}: {found}"
        assert [wrong for wrong, *_ in found] == [[]] * 6
    return [told[0], told[1]]


@pytest.mark.parametrize("case", [*CASES, *FP8_CASES])
def test_what_differs_lands_bit_for_bit(case: str) -> None:
    for found in refits_of(case):
        assert found[0][1] is None
        for _, share, wire, dense in found[1:]:
            assert share is not None
            assert wire <= 1.02 * dense + 1000


@pytest.mark.parametrize("case", SLEEPING_CASES)
def test_refits_are_sparse_after_sleeps_that_kept_all_bytes_and_dense_after_another(case: str) -> None:
    for found in refits_of(case):
        dense = [version for version, (_, share, *_) in enumerate(found, 1) if share is None]
        assert dense == [1, LOST]
