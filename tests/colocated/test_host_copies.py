"""Modules that leave their device and come back into the same storages; here the device is the CPU too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlrefit.integration.errors import RefitError
from rlrefit.workers.trainers.colocated import TorchRank
from rlrefit.workers.trainers.host_copies import HostCopies
from tests.spawn import run_ranks

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Parameters of which one is a view of another's storage, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(6, 4))
        self.part = nn.Parameter(self.whole.data[2:4].t())
        self.register_buffer("table", torch.arange(5.0))


def test_tensors_show_their_copies_while_away_and_come_back_into_the_storages_that_others_view() -> None:
    model, copies = Tied(), HostCopies(CPU)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bound = [tensor.detach() for tensor in model.state_dict().values()]
    for turn in range(3):
        copies.free([model])
        assert [view.untyped_storage().nbytes() for view in bound] == [0, 0, 0]
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), turn
        copies.restore()
        assert all(torch.equal(view, before[n]) for view, n in zip(bound, before, strict=True)), turn
        with torch.no_grad():
            model.whole += 1
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert torch.equal(bound[1], model.whole[2:4].t())


def test_a_tensor_that_got_another_storage_leaves_with_that_one() -> None:
    model, copies = Tied(), HostCopies(CPU)
    copies.free([model])
    copies.restore()
    model.table.data = torch.full((5,), 7.0)
    home = model.table.data
    copies.free([model])
    assert home.untyped_storage().nbytes() == 0
    copies.restore()
    assert torch.equal(home, torch.full((5,), 7.0))
    assert len(copies._copies) == 2


@pytest.mark.parametrize(
    "assigned",
    [torch.full((6, 4), 7.0), torch.full((24,), 7.0), None],
    ids=["other memory", "another shape", "a part of the copy"],
)
def test_what_is_assigned_to_a_tensor_while_it_is_away_is_told_and_what_is_written_in_place_stays(
    assigned: torch.Tensor | None,
) -> None:
    model, copies = Tied(), HostCopies(CPU)
    bound = model.whole.data
    for turn in range(2):
        before = model.whole.detach().clone()
        copies.free([model])
        model.whole.data = model.whole.data[:3] if assigned is None else assigned
        with pytest.raises(
            RefitError, match=r"1 tensors .* holds what it held before.*again.*parameter 0\.whole"
        ):
            copies.restore()
        # All has come back, so that the caller can load once more.
        copies.restore()
        assert torch.equal(model.whole, before), turn
        assert model.whole.data_ptr() == bound.data_ptr()
        copies.free([model])
        model.load_state_dict({"whole": torch.full((6, 4), 8.0 + turn)}, strict=False)
        copies.restore()
        assert torch.equal(bound, torch.full((6, 4), 8.0 + turn))
        assert torch.equal(model.part, bound[2:4].t())


def refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RefitError as error:
        return str(error)
    return "accepted"


def under_tensor_parallelism_alone() -> list[str]:
    """What is said of a module with DTensors that FSDP2 knows nothing of."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    uses = (HostCopies(CPU).free, lambda modules: TorchRank(modules, adam(model), CPU))
    told = [refusal_of(lambda use=use: use([model])) for use in uses]
    model(torch.ones(1, 4))  # nothing has moved
    return told


def still_gathered(reshard_after_forward: bool) -> list[int]:
    """Bytes that FSDP2 has gathered after a pass without gradients, and after the offload."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=reshard_after_forward)
        with torch.no_grad():
            model(torch.ones(1, 4))
        return model

    models = [made() for _ in range(3)]
    parts = [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]

    def gathered() -> int:
        plain = [p for part in parts for p in part.parameters() if not isinstance(p, DTensor)]
        return sum(p.untyped_storage().nbytes() for p in plain)

    trained, reference, offloaded = models
    rank = TorchRank([trained], adam(trained), CPU, frozen=[reference], offloaded=[offloaded])
    before = gathered()
    rank.offload()
    return [before, gathered()]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def train_in_turns(rank: int) -> dict[str, Any]:
    """A model under FSDP2 that leaves between its steps beside one that stays; and a refit while it is away."""
    from torch.distributed.fsdp import fully_shard

    from rlrefit.workers.trainers.fsdp.source import FSDPSource

    def model() -> nn.Module:
        torch.manual_seed(3)
        made = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
        made[0] = fully_shard(made[0])
        return fully_shard(made)

    leaves, stays, copies = model(), model(), HostCopies(CPU)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (leaves, stays)]
    told, partly = "", []
    source = FSDPSource(leaves)
    for turn in range(3):
        for each, optimizer in zip((leaves, stays), optimizers, strict=True):
            each(torch.ones(2, 8) * (rank + turn)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        views = [fragment.view for fragment in source.fragments()[0]]
        copies.free([leaves])
        away = {view.untyped_storage().nbytes() for view in views}
        told = refusal_of(source.prepare)
        for one in views:  # all but it have come back
            back = [view.untyped_storage() for view in views if view is not one]
            for storage in back:
                storage.resize_(4)
            partly.append(refusal_of(source.prepare).partition(":")[0])
            for storage in back:
                storage.resize_(0)
        copies.restore()
        source.prepare()
    refused = under_tensor_parallelism_alone()
    gathered = [still_gathered(reshard_after_forward) for reshard_after_forward in (True, False)]
    same = [
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(leaves.parameters(), stays.parameters(), strict=True)
    ]
    return {
        "away": away,
        "same": same,
        "told": told,
        "partly": partly,
        "refused": refused,
        "gathered": gathered,
    }


@pytest.mark.timeout(120)
def test_shards_of_fsdp_come_back_bit_for_bit_and_a_refit_refuses_to_read_them_while_away() -> None:
    for found in run_ranks(train_in_turns, 2):
        assert found["away"] == {0}
        assert found["same"] == [True] * 4
        assert "the trainer's shards are away" in str(found["told"])
        assert "Bring the trainer back" in str(found["told"])
        copies, rank = found["refused"]
        assert copies == rank
        assert "0.weight is a DTensor (2 are) in a module that is not under FSDP2" in copies
        (_, resharded), (kept, left) = found["gathered"]
        assert (resharded, left) == (0, 0)
        assert kept > 0
        assert found["partly"] == ["the trainer's shards are away, 1 of 4"] * 12
