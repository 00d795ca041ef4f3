"""Modules that leave their device and come back into the same storages; here the device is the CPU too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlrefit.integration.errors import RefitError
from rlrefit.workers.colocated.host_copies import HostCopies
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


def train_in_turns(rank: int) -> dict[str, object]:
    """A model under FSDP2 that leaves between its steps beside one that stays; and a refit while it is away."""
    from torch.distributed.fsdp import fully_shard

    from rlrefit.workers.fsdp.source import FSDPSource

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
        try:
            source.settle()
        except RefitError as error:
            told = str(error)
        for one in views:  # all but it have come back
            sizes = [view.untyped_storage() for view in views if view is not one]
            for storage in sizes:
                storage.resize_(4)
            try:
                source.settle()
                partly.append("accepted")
            except RefitError as error:
                partly.append(str(error).partition(":")[0])
            for storage in sizes:
                storage.resize_(0)
        copies.restore()
        source.settle()
    same = [
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(leaves.parameters(), stays.parameters(), strict=True)
    ]
    return {"away": away, "same": same, "told": told, "partly": partly}


@pytest.mark.timeout(120)
def test_shards_of_fsdp_come_back_bit_for_bit_and_a_refit_refuses_to_read_them_while_away() -> None:
    for found in run_ranks(train_in_turns, 2):
        assert found["away"] == {0}
        assert found["same"] == [True] * 4
        assert "the trainer's shards are away" in str(found["told"])
        assert "Bring the trainer back" in str(found["told"])
        assert found["partly"] == ["the trainer's shards are away, 1 of 4"] * 12
