"""Where sampled checks begin: each epoch at a message of its own, which all of its ranks know."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from rlrefit.integration.comm.group import Group
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, RendezvousServer, listen
from rlrefit.integration.errors import PeerLost, VerificationError
from rlrefit.integration.layout import Mesh, Replicate, Shard
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.integration.xferdtensor import op, xferdtensor

from . import synthetic
from .groups import GroupWorld
from .synthetic import pair, refit_changed, run_world

# Three messages for each transport: buckets of 1 MiB, or four for each two of 2 MiB over gloo.
SPECS = [TensorSpec(name, (rows, 1024), torch.float32) for name, rows in (("a", 250), ("b", 245), ("c", 200))]
MESSAGES = 3
TOTAL = sum(spec.nbytes for spec in SPECS)


def token_of(number: int) -> str:
    return f"{number:064x}"


def turn_of(token: str) -> int:
    return Rendezvous("127.0.0.1", 1, 1, 1, 0, token).turn


def tokens_for(messages: int) -> list[str]:
    """A token for each message at which sampled checks can begin, in the messages' order."""
    found: dict[int, str] = {}
    for number in itertools.count(1):
        found.setdefault(turn_of(token_of(number)) % messages, token_of(number))
        if len(found) == messages:
            return [found[message] for message in range(messages)]
    raise AssertionError("a count does not end")


def epoch(
    monkeypatch: pytest.MonkeyPatch, token: str, body: Any, config: RefitConfig, engine: str
) -> list[Any]:
    """One epoch with this token, of a trainer and an engine."""

    def opened(host: str, train_ranks: int, gen_ranks: int) -> RendezvousServer:
        listener = listen(host)
        port = listener.getsockname()[1]
        return RendezvousServer(listener, Rendezvous(host, port, train_ranks, gen_ranks, 0, token))

    monkeypatch.setattr(synthetic, "open_rendezvous", opened)
    return run_world(*pair(SPECS), body, config, engine)


def test_epochs_begin_at_messages_that_are_spread_evenly() -> None:
    found = Counter(turn_of(token_of(number)) % 12 for number in range(1200))
    assert set(found) == set(range(12))
    assert all(60 <= times <= 140 for times in found.values())


@pytest.mark.parametrize(
    ("transport", "engine"), [("p2p", "nccl_xfer"), ("golden", "nccl_xfer"), ("auto", "packed_broadcast")]
)
def test_epochs_of_one_refit_and_refits_of_one_epoch_come_to_every_message_whatever_the_versions_are(
    monkeypatch: pytest.MonkeyPatch, transport: str, engine: str
) -> None:
    bucket_mb = 2 if transport == "p2p" else 1
    config = RefitConfig(bucket_mb=bucket_mb, timeout_s=20.0, verify="sampled", transport=transport)

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refits = [refit_changed(session, endpoint, version) for version in range(0, 2 * MESSAGES, 2)]
        assert all(wrong == [] for _, wrong in refits)
        return [record.bytes_verified for record, _ in refits]

    verified = [epoch(monkeypatch, token, body, config, engine)[1] for token in tokens_for(MESSAGES)]
    assert all(0 < nbytes < TOTAL for of_epoch in verified for nbytes in of_epoch)
    for together in (*verified, *zip(*verified, strict=True)):
        assert sum(together) == TOTAL


@pytest.mark.parametrize("message", range(MESSAGES))
def test_a_lasting_fault_is_found_within_as_many_refits_as_a_pair_has_messages(
    monkeypatch: pytest.MonkeyPatch, message: int
) -> None:
    config = RefitConfig(bucket_mb=2, timeout_s=20.0, verify="sampled", transport="p2p")
    committed: list[int] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        engine: Any = session.engine
        if rank == 1:
            exchanges = [one.exchange for one in engine._bulk._transport._bound.rounds]
            assert len(exchanges) == MESSAGES
            receive = exchanges[message].finish

            def finish(stage: str) -> None:
                receive(stage)
                exchanges[message]._receives[0].buffer[4567] ^= 1

            exchanges[message].finish = finish
        for version in range(MESSAGES):
            refit_changed(session, endpoint, version)
            if rank == 1:
                committed.append(version)

    begun = tokens_for(MESSAGES)
    for first, token in enumerate(begun):
        committed.clear()
        sent, found = epoch(monkeypatch, token, body, config, "nccl_xfer")
        assert isinstance(found, VerificationError)
        assert isinstance(sent, PeerLost)
        # Until its turn comes it goes unseen, and not longer.
        assert len(committed) == (message - first) % MESSAGES


@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_layouts_of_single_tensors_begin_where_their_first_rank_says(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Each rank draws a number of its own; where they did not take the same, checksums would differ."""
    shape = (12, 1024)
    drawn = itertools.count(1000)
    monkeypatch.setattr(op.secrets, "randbits", lambda bits: next(drawn))
    whole = torch.arange(12 * 1024, dtype=torch.float32).view(shape)

    def body(rank: int, group: Group) -> Any:
        verified = []
        for call in range(8):
            src = (whole + call) if rank == 0 else None
            dst = torch.full(shape, float("nan")) if rank == 1 else None
            result = xferdtensor(
                src, Mesh((1,), (0,)), (Replicate(),), dst, Mesh((1,), (1,)), (Shard(0),), group,
                shape=shape, transport=transport, bucket_bytes=4 * 4096, verify="sampled",
            )  # fmt: skip
            if dst is not None:
                assert torch.equal(dst, whole + call)
            verified.append(result.verified_bytes)
        return verified

    with GroupWorld(2) as world:
        _, verified = world.run(body)
    assert all(0 < nbytes < whole.nbytes for nbytes in verified)
    messages = next(n for n in range(1, len(verified)) if sum(verified[:n]) == whole.nbytes)
    for begin in range(len(verified) - messages + 1):
        assert sum(verified[begin : begin + messages]) == whole.nbytes
