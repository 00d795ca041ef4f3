"""The same refits between GPUs, over NCCL: one process a GPU, trainers on the first half."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from rlrefit.integration.control import Rendezvous, open_rendezvous
from tests.refit.test_killed_peer import kill_a_rank

from .needs import needs
from .spawned import spawned

pytestmark = needs(gpus=2)

HIDDEN, INTERMEDIATE, EXPERTS = 512, 768, 8


def rank_main(
    rank: int, meeting: Rendezvous, engine: str, transport: str, keeps: bool, astray: bool, results: Any
) -> None:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.session import RefitSession
    from rlrefit.integration.weights.manifest import TensorSpec
    from tests.refit.synthetic import Layout, SyntheticDestination, SyntheticSource, refit_changed

    # Where there are fewer GPUs, several ranks share one.
    device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    size, sources = meeting.size, meeting.train_ranks
    specs = [
        *(TensorSpec(f"experts.{e}.gate", (INTERMEDIATE, HIDDEN), torch.bfloat16) for e in range(EXPERTS)),
        *(TensorSpec(f"experts.{e}.down", (HIDDEN, INTERMEDIATE), torch.bfloat16) for e in range(EXPERTS)),
        TensorSpec("norm", (HIDDEN,), torch.float32),
        TensorSpec("router", (EXPERTS, HIDDEN), torch.bfloat16),
    ]
    if rank < sources:  # expert parallelism
        per_rank = EXPERTS // sources
        mine = range(rank * per_rank, (rank + 1) * per_rank)
        layout: Layout = {f"experts.{e}.gate": [((0, INTERMEDIATE), (0, HIDDEN))] for e in mine}
        layout |= {f"experts.{e}.down": [((0, HIDDEN), (0, INTERMEDIATE))] for e in mine}
        layout["norm"] = [((0, HIDDEN),)]
        endpoint: Any = SyntheticSource(specs, layout, {"router": "MoE router"}, device)
    else:  # tensor parallelism: rows of gate, columns of down
        part = INTERMEDIATE // (size - sources)
        cut = ((rank - sources) * part, (rank - sources + 1) * part)
        layout = {f"experts.{e}.gate": [(cut, (0, HIDDEN))] for e in range(EXPERTS)}
        layout |= {f"experts.{e}.down": [((0, HIDDEN), cut)] for e in range(EXPERTS)}
        layout |= {"norm": [((0, HIDDEN),)], "router": [((0, EXPERTS), (0, HIDDEN))]}
        endpoint = SyntheticDestination(specs, layout, device)
        if keeps:
            load = endpoint.load_weights
            endpoint.load_weights = lambda weights: load(list(weights))
    if astray:  # as a thread of an engine's that has not been told which GPU is its own
        torch.cuda.set_device((rank + 1) % torch.cuda.device_count())
    config = RefitConfig(transport=transport, bucket_mb=4, timeout_s=60.0, verify="full")
    session = RefitSession.open(meeting, rank, lambda: endpoint, config, engine=engine)
    for version in (1, 2, 3):
        record, wrong = refit_changed(session, endpoint, version)
        results.put((rank, version, wrong, session.state.version, record.to_json()))
    session.close()


@pytest.mark.parametrize(
    ("engine", "transport"),
    [
        ("nccl_xfer", "p2p"),
        ("nccl_xfer", "golden"),
        ("nccl_xfer", "ipc"),
        ("nccl_xfer", "auto"),
        ("packed_broadcast", "auto"),
    ],
)
def test_three_changed_refits_over_nccl_land_bit_for_bit(engine: str, transport: str) -> None:
    size = min(4, torch.cuda.device_count()) // 2 * 2
    rows = refit_three_times(size, engine, transport)
    served = {"auto": "ipc" if engine == "nccl_xfer" else "broadcast"}.get(transport, transport)
    assert {row[4]["transport"] for row in rows} == {served}


def test_a_loader_may_keep_all_that_the_packed_broadcast_brings() -> None:
    refit_three_times(2, "packed_broadcast", "auto", keeps=True)


@pytest.mark.parametrize(
    ("engine", "transport"), [("nccl_xfer", "p2p"), ("nccl_xfer", "golden"), ("packed_broadcast", "auto")]
)
def test_refits_run_on_the_gpu_of_the_weights_whatever_gpu_the_calling_thread_is_set_to(
    engine: str, transport: str
) -> None:
    refit_three_times(2, engine, transport, astray=True)


def refit_three_times(
    size: int, engine: str, transport: str, *, keeps: bool = False, astray: bool = False
) -> list[Any]:
    """Three changed refits of ``size`` processes, checked; what each rank tells of each."""
    server = open_rendezvous("127.0.0.1", size // 2, size // 2)
    ranks = [(r, server.rendezvous, engine, transport, keeps, astray) for r in range(size)]
    with closing(server), spawned(rank_main, ranks) as results:
        rows = [results.get(timeout=200) for _ in range(3 * size)]
    engines = [row for row in rows if row[0] >= size // 2]
    assert [(rank, wrong) for rank, _, wrong, _, _ in engines if wrong] == []
    assert all(version == committed for _, version, _, committed, _ in engines)
    if engine != "packed_broadcast":
        assert all(row[4]["bytes_verified"] > 0 for row in engines)
    return rows


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs at least three CUDA devices")
@pytest.mark.parametrize("moment", ["transfer", "post-load"])
def test_the_death_of_an_engine_rank_ends_a_refit_over_nccl_within_the_timeout(moment: str) -> None:
    kill_a_rank(moment, on_gpu=True)
