"""Real trainers and engines whose tensor-parallel ranks are on two hosts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests import gloo
from tests.refit.models import make_model
from tests.refit.worlds import GEN_RANKS, TRAIN_RANKS, Scenario, engine, epochs, trainer
from tests.spawn import free_port

from .crew import Talk, run_on
from .namespaces import Host

# As the pages tell those whose hosts' names lead nowhere: torch's own groups ask for it.
INTERFACE = {"GLOO_SOCKET_IFNAME": "eth0"}


def rank_of_a_side(
    rank: int, talk: Talk, address: str, ports: Sequence[int], scenarios: list[Scenario]
) -> Any:
    """Trainer ranks come first; each side is a gloo world with its rank 0 on the same host."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # As users have them; those of the tests' servers take no interface.
    distributed_c10d.ProcessGroupGloo = gloo.Gloo
    trains = rank < TRAIN_RANKS
    own, size = (rank, TRAIN_RANKS) if trains else (rank - TRAIN_RANKS, GEN_RANKS)
    os.environ.update(RANK=str(own), LOCAL_RANK="0", WORLD_SIZE=str(size), CUDA_VISIBLE_DEVICES="")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(ports[0 if trains else 1]))
    dist.init_process_group("gloo", rank=own, world_size=size, timeout=timedelta(seconds=200))
    return (trainer if trains else engine)(own, scenarios)


def tensor_parallel_over_both(folder: Path, hosts: Sequence[Host]) -> str:
    """Megatron at TP2 (and TP2 x EP2) into transformers at TP2, each with a rank on each host; three refits by each way.

    ``folder`` is one that all hosts see. Raises AssertionError where a weight is not, bit for bit, what transformers loads.
    """
    scenarios = []
    for kind, layout in {"qwen3": {}, "qwen3-moe": {"expert_parallel": 2}}.items():
        place = folder / kind
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        models = tuple(make_model(kind, place / str(seed), seed) for seed in range(3))
        ways = (
            ("nccl_xfer", "p2p"),
            ("nccl_xfer", "golden"),
            ("nccl_xfer", "auto"),
            ("packed_broadcast", "auto"),
        )
        met = epochs(place / "meeting", *ways, host=hosts[0].address)
        scenarios.append(Scenario({"tensor_parallel": 2, **layout}, 2, models, met))
    placed = [hosts[0], hosts[1], hosts[0], hosts[1]]
    ports = [free_port(), free_port()]
    seen = run_on(rank_of_a_side, placed, hosts[0].address, ports, scenarios, env=INTERFACE)
    reports = [epoch for rank in seen[TRAIN_RANKS:] for scenario in rank for epoch in scenario]
    assert all(epoch["wrong"] == [] and epoch["version"] == 2 for epoch in reports), reports
    transports = sorted({record["transport"] for epoch in reports for record in epoch["records"]})
    return f"{sum(len(epoch['records']) for epoch in reports)} refits of engine ranks by {', '.join(transports)}, all bit for bit"
