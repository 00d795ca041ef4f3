"""Full tensors between ranks that are threads of the test's process, each with an event loop of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlrefit.integration.adapters.full_tensor_epoch import FullTensorEpoch, FullTensorSettings
from rlrefit.integration.errors import PeerLost, RefitError, RefitMismatch, RefitTimeout, VerificationError
from rlrefit.integration.rendezvous import Rendezvous, RendezvousServer, listen

Weights = list[tuple[str, torch.Tensor]]
TENSORS: Weights = [(f"layers.{i}.weight", torch.full((100, 3), float(i))) for i in range(9)]


def run_epoch(
    *bodies: Callable[[FullTensorEpoch], Any],
    verify: str = "sampled",
    timeout_s: float = 10.0,
    bucket: int = 4096,
) -> list[Any]:
    """One trainer rank and generation ranks: what each body returned, or the exception that ended it."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    rendezvous = Rendezvous("127.0.0.1", port, 1, len(bodies) - 1, 1, secrets.token_hex(32))

    def run(rank: int) -> Any:
        server = RendezvousServer(listener, rendezvous) if rank == 0 else None
        epoch = None
        try:
            settings = FullTensorSettings(bucket, verify, timeout_s)
            epoch = FullTensorEpoch(rendezvous, rank, settings, server)
            return asyncio.run(bodies[rank](epoch))
        except BaseException as error:
            return error
        finally:
            if epoch is not None:
                epoch.close()

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(run, range(len(bodies))))


def sending(weights: Weights, version: int = 1) -> Callable[[FullTensorEpoch], Any]:
    return lambda epoch: epoch.send(iter(weights), version)


def receiving(
    version: int = 1, loader: Callable[[str], None] = lambda name: None
) -> Callable[[FullTensorEpoch], Any]:
    async def receive(epoch: FullTensorEpoch) -> tuple[Weights, Any]:
        found: Weights = []
        records: list[Any] = []
        async for name, tensor in epoch.receive(version, records.append):
            loader(name)
            found.append((name, tensor))
        return found, records[0]

    return receive


def test_the_loader_may_keep_what_it_gets_and_every_byte_can_be_checked() -> None:
    sent, *received = run_epoch(sending(TENSORS), receiving(), receiving(), verify="full")
    for found, record in received:
        assert [name for name, _ in found] == [name for name, _ in TENSORS]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, TENSORS, strict=True))
        assert record.bytes_verified == record.bytes_misc == sent.bytes_misc == 9 * 1200


@pytest.mark.parametrize("weights", [[], [("none", torch.empty(0, 4))], [("one", torch.tensor(2.0))]])
def test_exports_of_next_to_nothing_arrive(weights: Weights) -> None:
    _, (found, record) = run_epoch(sending(weights), receiving(), verify="full")
    assert [(name, tensor.shape) for name, tensor in found] == [(name, t.shape) for name, t in weights]
    assert record.bytes_verified == record.bytes_misc == sum(tensor.nbytes for _, tensor in weights)


def test_bytes_that_change_on_the_wire_are_not_handed_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlrefit.integration.process_groups import Group

    true_broadcast = Group.broadcast

    def broadcast(self: Group, buffer: torch.Tensor, root: int, stage: str) -> None:
        true_broadcast(self, buffer, root, stage)
        if self.rank == 1 and buffer.numel() > 1000:
            buffer[700] ^= 1

    monkeypatch.setattr(Group, "broadcast", broadcast)
    sent, found = run_epoch(sending(TENSORS), receiving())
    assert isinstance(found, VerificationError)
    assert found.parameter == "layers.0.weight"
    assert isinstance(sent, RefitError)


def test_a_loader_that_fails_ends_the_update_with_its_reason_on_all_ranks() -> None:
    def loader(name: str) -> None:
        if name == "layers.4.weight":
            raise MemoryError("no room in the engine")

    sent, found, other = run_epoch(sending(TENSORS), receiving(loader=loader), receiving())
    assert isinstance(found, MemoryError)
    assert isinstance(sent, RefitError)
    assert isinstance(other, RefitError)


def test_ranks_that_are_asked_for_different_steps_refuse_before_anything_moves() -> None:
    drawn: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS:
            drawn.append(name)
            yield name, tensor

    sent, found = run_epoch(lambda epoch: epoch.send(weights(), 2), receiving(3))
    assert isinstance(sent, RefitMismatch)
    assert isinstance(found, RefitMismatch)
    # Other trainer ranks would wait in the export for one that leaves it.
    assert drawn == [name for name, _ in TENSORS]


def test_a_rank_that_never_comes_ends_the_update_within_the_timeout() -> None:
    async def idle(epoch: FullTensorEpoch) -> None:
        await asyncio.sleep(2.0)

    sent, found, _ = run_epoch(sending(TENSORS), receiving(), idle, timeout_s=1.0)
    assert isinstance(sent, RefitTimeout | PeerLost)
    assert isinstance(found, RefitTimeout | PeerLost)
    assert "generation rank 1 (refit rank 2) did not answer within 1.0 s" in f"{sent} {found}"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([*TENSORS, TENSORS[0]], "yields this weight twice"),
        ([*TENSORS, ("sparse", torch.eye(3).to_sparse())], "layout torch.sparse_coo"),
    ],
)
def test_an_export_that_is_no_list_of_whole_weights_is_refused_by_name(
    weights: Weights, message: str
) -> None:
    sent, found = run_epoch(sending(weights), receiving())
    assert isinstance(sent, RefitMismatch)
    assert message in str(sent)
    assert sent.parameter == weights[-1][0]
    assert isinstance(found, RefitError)
