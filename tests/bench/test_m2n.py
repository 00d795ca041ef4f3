"""What is handed to ``nccl.m2n``, with a stand-in for the library: it runs on GPUs alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import RefitError
from rlrefit.integration.layout import Fragment, box_of
from rlrefit.integration.transport.m2n import M2nReshard, mesh_transfer
from rlrefit.integration.transport.whole_tensors import whole_tensors
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import SyntheticDestination, SyntheticSource, run_world

EXPERTS, ROWS, COLUMNS = 4, 6, 8
SPECS = [
    TensorSpec(f"l.mlp.experts.{e}.gate_proj.weight", (ROWS, COLUMNS), torch.float32) for e in range(EXPERTS)
]
HELD = {rank: {s.name: [box_of(s.shape)] for s in SPECS[2 * rank : 2 * rank + 2]} for rank in range(2)}
WANTED = {2 + rank: {s.name: [((3 * rank, 3 * rank + 3), (0, COLUMNS))] for s in SPECS} for rank in range(2)}


@pytest.fixture
def library(monkeypatch):
    """Stand-ins for ``nccl.m2n`` and ``nccl.core``; what was called is in ``calls``."""
    calls: list[tuple[object, object]] = []

    def reshard(comm, source, destination, stream):
        calls.append((source, destination))
        if destination.buffer is not None:
            destination.buffer.copy_(torch.arange(destination.buffer.numel()).view(destination.local_shape))

    handle = SimpleNamespace(reshard=reshard, destroy=lambda: None)
    communicator = SimpleNamespace(init=lambda size, rank, unique: SimpleNamespace(destroy=lambda: None))
    m2n = SimpleNamespace(
        Handle=SimpleNamespace(create=lambda: handle),
        Mesh=lambda dims, start_rank: (tuple(dims), start_rank),
        Replicate=lambda: "R",
        Shard=lambda dim: f"S{dim}",
        DistTensor=lambda buffer, **described: SimpleNamespace(buffer=buffer, **described),
    )
    core = SimpleNamespace(
        Communicator=communicator,
        get_unique_id=lambda: b"id",
        UniqueId=SimpleNamespace(from_bytes=lambda raw: raw),
    )
    monkeypatch.setitem(sys.modules, "nccl", SimpleNamespace(m2n=m2n, core=core, __path__=[]))
    monkeypatch.setitem(sys.modules, "nccl.m2n", m2n)
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return SimpleNamespace(calls=calls, communicator=communicator)


def moved(rank, fragments):
    (tensor,) = whole_tensors(SPECS, HELD, WANTED)
    M2nReshard([mesh_transfer(tensor)], fragments, rank, 4, lambda raw: raw or b"id").run()


def test_a_trainer_hands_over_its_experts_stacked_with_both_meshes(library):
    experts = {s.name: torch.randn(ROWS, COLUMNS) for s in SPECS[2:]}
    moved(1, {n: [Fragment(n, (ROWS, COLUMNS), box_of((ROWS, COLUMNS)), t)] for n, t in experts.items()})
    ((source, destination),) = library.calls
    assert torch.equal(source.buffer, torch.stack(list(experts.values())))
    assert (source.mesh, source.placements, source.local_shape) == (
        ((1, 2), 0),
        ["R", "S0"],
        (2, ROWS, COLUMNS),
    )
    assert destination.buffer is None
    assert (destination.mesh, destination.placements) == (((1, 2), 2), ["R", "S1"])
    assert destination.local_shape == (EXPERTS, 3, COLUMNS)


def test_an_engine_receives_beside_its_fused_parameter_and_copies_in(library):
    w13 = torch.full((EXPERTS, ROWS, COLUMNS), -1.0)
    moved(
        3,
        {
            s.name: [Fragment(s.name, (ROWS, COLUMNS), ((3, 6), (0, COLUMNS)), w13[e, :3])]
            for e, s in enumerate(SPECS)
        },
    )
    ((source, destination),) = library.calls
    assert source.buffer is None
    assert destination.buffer.is_contiguous()
    assert torch.equal(w13[:, :3].reshape(-1), torch.arange(EXPERTS * 3 * COLUMNS, dtype=torch.float32))
    assert (w13[:, 3:] == -1).all()


def test_a_communicator_that_does_not_come_up_is_an_error_with_the_remedy(library):
    def refuse(size, rank, unique):
        raise RuntimeError("unhandled system error")

    library.communicator.init = refuse
    with pytest.raises(RefitError, match=r"unhandled system error.*transport p2p"):
        moved(0, {})


def test_no_session_opens_under_m2n_which_carries_no_refits():
    """Not over another transport either: who asks for NVIDIA's would take what serves for it."""
    box = {"w": [((0, 8), (0, 4))]}
    specs = [TensorSpec("w", (8, 4), torch.float32)]
    config = RefitConfig.unchecked(bucket_mb=1, timeout_s=20.0, transport="m2n")
    (problem,) = config.violations()
    assert problem.startswith("policy.refit.transport: m2n")
    results = run_world(
        [SyntheticSource(specs, box)], [SyntheticDestination(specs, box)], lambda *_: "a session", config
    )
    assert all(type(error) is RefitError and error.stage == "settings" for error in results)
    assert all(problem in str(error) for error in results)
