"""Full tensors between ranks that are threads of the test's process, each with an event loop of its own."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlrefit.integration.broadcast import messages
from rlrefit.integration.broadcast.buckets import Buckets
from rlrefit.integration.broadcast.full_tensors import FullTensorEpoch, FullTensorSettings
from rlrefit.integration.broadcast.messages import (
    LAST,
    MessageHead,
    TensorPart,
    read_description,
    read_head,
    write_description,
    write_head,
)
from rlrefit.integration.comm.group import Group
from rlrefit.integration.comm.torch_group import TorchGroup
from rlrefit.integration.control import Rendezvous, RendezvousServer, listen
from rlrefit.integration.errors import PeerLost, RefitError, RefitMismatch, RefitTimeout, VerificationError

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


# Their memory holds other values than they show.
LAZY: Weights = [
    ("conjugate", torch.tensor([1 + 2j, 3 - 1j]).conj()),
    ("negative", torch._neg_view(torch.ones(3, 2).T)),
]


@pytest.mark.parametrize(
    "weights", [TENSORS, [("none", torch.empty(0, 4))], [("one", torch.tensor(2.0))], LAZY]
)
def test_the_loader_may_keep_what_it_gets_and_every_byte_can_be_checked(weights: Weights) -> None:
    sent, *received = run_epoch(sending(weights), receiving(), receiving(), verify="full")
    for found, record in received:
        assert [name for name, _ in found] == [name for name, _ in weights]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, weights, strict=True))
        size = sum(tensor.nbytes for _, tensor in weights)
        assert record.bytes_verified == record.bytes_misc == sent.bytes_misc == size


def test_an_export_of_nothing_is_no_new_version() -> None:
    sent, *received = run_epoch(sending([]), receiving(), receiving())
    assert isinstance(sent, RefitMismatch)
    assert sent.stage == "export"
    for found in received:
        assert isinstance(found, RefitError)
        assert "yields no weight" in str(found)


def test_bytes_that_change_on_the_wire_are_not_handed_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    true_arrived = Buckets.arrived

    def arrived(self: Buckets) -> torch.Tensor:
        bucket = true_arrived(self)
        bucket[700] ^= 1
        return bucket

    monkeypatch.setattr(Buckets, "arrived", arrived)
    sent, found = run_epoch(sending(TENSORS), receiving())
    assert isinstance(found, VerificationError)
    assert found.parameter == "layers.0.weight"
    assert isinstance(sent, RefitError)


def _swapped(described: torch.Tensor) -> None:
    """Two names of the same length change places."""
    text = described.numpy().tobytes()
    for a, b in ((b"layers.0", b"layers.x"), (b"layers.1", b"layers.0"), (b"layers.x", b"layers.1")):
        text = text.replace(a, b)
    described.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def _no_json(described: torch.Tensor) -> None:
    described[0] = 0


def _last_no_more(head: torch.Tensor) -> None:
    head[3] &= ~LAST


def _larger(head: torch.Tensor) -> None:
    head[:2] += 64


# What is damaged, and which broadcast of the update that is on its way: heads and descriptions take turns.
DAMAGES = {
    "swapped names": (_swapped, 1),
    "no JSON": (_no_json, 3),
    "no end": (_last_no_more, 4),
    "sizes": (_larger, 2),
}


@pytest.mark.parametrize("verify", ["off", "sampled", "full"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_names_places_and_heads_are_found_whatever_is_verified_and_all_ranks_hear_at_once(
    monkeypatch: pytest.MonkeyPatch, damage: str, verify: str
) -> None:
    change, at = DAMAGES[damage]
    true_broadcast, seen = TorchGroup.broadcast, [0]

    def broadcast(self: Group, buffer: torch.Tensor, root: int, stage: str) -> None:
        true_broadcast(self, buffer, root, stage)
        if self.rank == 1:
            if seen[0] == at:
                change(buffer)
            seen[0] += 1

    monkeypatch.setattr(TorchGroup, "broadcast", broadcast)
    start = time.monotonic()
    sent, found, other = run_epoch(sending(TENSORS), receiving(), receiving(), verify=verify, timeout_s=60.0)
    assert time.monotonic() - start < 45
    assert isinstance(found, VerificationError)
    assert found.rank == 1
    for error in (sent, other):
        # With the first rank's reason, and not with what its end did to the wire.
        assert isinstance(error, PeerLost)
        assert "VerificationError" in str(error)


NAME = "layers.0.weight"
WHOLE = [NAME, "float32", [100, 3], 0, 1200, 0]


def _changed(place: int, value: object) -> Callable[[list[list[Any]]], Any]:
    def change(rows: list[list[Any]]) -> Any:
        rows[0][place] = value
        return rows

    return change


# What a sender of another make could say of its first message, and the weight that it is wrong about.
CONTRADICTIONS: dict[str, tuple[Callable[[list[list[Any]]], Any], str]] = {
    "beyond the bucket": (_changed(5, 1 << 20), NAME),
    "on one another": (lambda rows: [rows[0], [*rows[1][:5], 1024], *rows[2:]], "layers.1.weight"),
    "where none begins": (_changed(5, 2), NAME),
    "more than the weight has": (_changed(4, 1201), NAME),
    "a part, and then another weight": (_changed(4, 16), NAME),
    "from the middle": (_changed(3, 600), NAME),
    "another dtype": (_changed(1, "float64"), NAME),
    "no dtype": (_changed(1, "float33"), NAME),
    "a module for a dtype": (_changed(1, "nn"), NAME),
    "a negative shape": (_changed(2, [-100, -3]), NAME),
    "a shape that is none": (_changed(2, 300), NAME),
    "a place that is true": (_changed(5, True), NAME),
    "no name": (_changed(0, 3), ""),
    "twice": (lambda rows: [rows[0], [rows[0][0], *rows[1][1:]], *rows[2:]], NAME),
    "fewer fields": (lambda rows: [rows[0][:5], *rows[1:]], ""),
    "no list": (lambda rows: {"parts": rows}, ""),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused_by_name_before_the_engine_sees_it_and_the_sender_hears_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    change, name = CONTRADICTIONS[kind]

    def described(parts: list[TensorPart]) -> bytes:
        return json.dumps(change(json.loads(write_description(parts)))).encode()

    monkeypatch.setattr(messages, "write_description", described)
    loaded: list[str] = []
    start = time.monotonic()
    sent, found = run_epoch(sending(TENSORS), receiving(loader=loaded.append), timeout_s=60.0)
    assert time.monotonic() - start < 45
    assert isinstance(found, RefitMismatch)
    assert (found.parameter, found.rank, loaded) == (name, 1, [])
    assert isinstance(sent, PeerLost)
    assert "RefitMismatch" in str(sent)


# Of a weight with three parts of a bucket each: the second one is left out, or the last one; and text that is no JSON.
DESCRIPTIONS: dict[str, tuple[Callable[[list[TensorPart]], bytes], str]] = {
    "no second part": (lambda parts: write_description([p for p in parts if p.start != 4096]), "wide"),
    "no last part": (lambda parts: write_description([p for p in parts if p.start != 8192]), "wide"),
    "no JSON, with the right digest": (lambda parts: b"\xff" * 8, ""),
}


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_a_weight_of_which_pieces_are_missing_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    described, parameter = DESCRIPTIONS[kind]
    monkeypatch.setattr(messages, "write_description", described)
    sent, found = run_epoch(sending([("wide", torch.ones(3 * 1024))]), receiving(), timeout_s=60.0)
    assert isinstance(found, RefitMismatch)
    assert found.parameter == parameter
    assert isinstance(sent, PeerLost)


def test_every_bit_of_what_a_message_says_of_itself_counts() -> None:
    description = write_description([TensorPart(*WHOLE)])
    head = MessageHead(1200, len(description), 0, LAST)
    words = write_head(head, description)
    assert read_head(words, 0, 4096, 1) == head
    assert read_description(description, words, 1) == [TensorPart(*WHOLE)]
    for bit in range(7 * 64):
        flipped = torch.tensor(words)
        flipped.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        with pytest.raises(VerificationError):
            read_head(flipped.tolist(), 0, 4096, 1)
    for bit in range(len(description) * 8):
        other = bytearray(description)
        other[bit // 8] ^= 1 << bit % 8
        with pytest.raises(VerificationError):
            read_description(bytes(other), words, 1)


def test_the_first_update_checks_all_messages_and_the_next_ones_come_to_each_in_turn() -> None:
    updates = 4

    async def send(epoch: FullTensorEpoch) -> list[int]:
        return [(await epoch.send(iter(TENSORS), version)).bytes_misc for version in range(updates)]

    async def receive(epoch: FullTensorEpoch) -> list[int]:
        records: list[Any] = []
        for version in range(updates):
            async for _ in epoch.receive(version, records.append):
                pass
        return [record.bytes_verified for record in records]

    _, verified = run_epoch(send, receive, timeout_s=60.0)
    # Three messages of three weights each.
    assert verified == [9 * 1200, 3600, 3600, 3600]


def test_a_loader_that_fails_ends_the_update_on_all_ranks() -> None:
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


def test_a_rank_that_never_comes_ends_the_update_within_the_timeout_and_the_epoch() -> None:
    ended = threading.Barrier(3)

    async def idle(epoch: FullTensorEpoch) -> None:
        await asyncio.to_thread(ended.wait, 60)

    async def send_twice(epoch: FullTensorEpoch) -> None:
        try:
            await epoch.send(iter(TENSORS), 1)
        finally:
            await asyncio.to_thread(ended.wait, 60)
            with pytest.raises(RefitError, match="has ended"):
                await epoch.send(iter(TENSORS), 2)

    async def receive(epoch: FullTensorEpoch) -> None:
        try:
            await receiving()(epoch)
        finally:
            await asyncio.to_thread(ended.wait, 60)

    sent, found, _ = run_epoch(send_twice, receive, idle, timeout_s=2.0)
    assert isinstance(sent, RefitTimeout | PeerLost)
    assert isinstance(found, RefitTimeout | PeerLost)
    assert "generation rank 1 (refit rank 2) did not answer" in f"{sent} {found}"


@pytest.mark.parametrize("wrong", [TENSORS[0], ("sparse", torch.eye(3).to_sparse())], ids=["twice", "sparse"])
def test_an_export_that_is_no_list_of_whole_weights_is_refused_by_name(
    wrong: tuple[str, torch.Tensor],
) -> None:
    sent, found = run_epoch(sending([*TENSORS, wrong]), receiving())
    assert isinstance(sent, RefitMismatch)
    assert sent.parameter == wrong[0]
    assert isinstance(found, RefitError)
