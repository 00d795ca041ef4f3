"""Votes, barriers and stores between ranks: nobody passes early, everybody hears of a failure at once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from rlrefit.integration.control import GroupStore, RendezvousServer, client, frames, meeting, open_rendezvous
from rlrefit.integration.control import server as server_module
from rlrefit.integration.control.channel import Channel
from rlrefit.integration.control.frames import pack_json, pack_values
from rlrefit.integration.errors import PeerLost, RefitError, RefitMismatch, RefitTimeout

from .meeting import join, on_all_ranks


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = open_rendezvous("127.0.0.1", 2, 2)
    yield server
    server.close()


def test_nobody_passes_a_barrier_before_the_last_rank_is_there(server: RendezvousServer) -> None:
    def body(rank: int, channel: Channel) -> list[tuple[float, float]]:
        times = []
        for index in range(5):
            if rank == index % 4:
                time.sleep(0.03)
            arrived = time.monotonic()
            channel.barrier(f"b/{index}")
            times.append((arrived, time.monotonic()))
        return times

    for round_ in zip(*on_all_ranks(server, body), strict=True):
        assert min(passed for _, passed in round_) >= max(arrived for arrived, _ in round_)


def test_the_first_abort_is_the_cause_that_every_rank_hears(server: RendezvousServer) -> None:
    def body(rank: int, channel: Channel) -> Any:
        if rank == 1:
            channel.abort("the loader failed")
            channel.abort("a consequence")
        with pytest.raises(PeerLost, match=r"trainer rank 1 .*the loader failed"):
            channel.barrier("b")
        with pytest.raises(PeerLost, match="the loader failed"):
            channel.check_abort("transfer")
        return True

    assert on_all_ranks(server, body) == [True] * 4


def test_the_store_is_as_large_after_two_hundred_refits_as_after_one(server: RendezvousServer) -> None:
    def body(rank: int, channel: Channel) -> Any:
        channel.store.set(f"specs/{rank}", b"x" * 100)
        sizes = []
        for index in range(200):
            channel.barrier(f"begin/{index}", version=index)
            channel.barrier(f"commit/{index}")
            if index in (0, 199):
                channel.vote(f"still/{index}", None)
                sizes.append(server.entries)
                channel.vote(f"counted/{index}", None)
        return sizes

    # Ranks may have come to the next vote by the time that another one counts.
    assert all(abs(first - last) <= 1 for first, last in on_all_ranks(server, body))


def test_what_is_too_large_or_a_bomb_is_refused_before_it_is_unpacked(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = frames.pack_json([0] * 200_000)
    monkeypatch.setattr(frames, "MAX_MESSAGE", 50_000)
    assert len(bomb) < 50_000
    with pytest.raises(frames.Malformed, match="unpacks to more"):
        frames.unpack_json(bomb)
    channel = join(server, 0)
    with pytest.raises(RefitError, match=r"specs can't be sent.*limit of 50000"):
        channel.vote("specs", [0] * 200_000)
    channel.check_abort("and the connection goes on")
    channel.close()


def test_the_group_store_sets_counts_waits_and_clones(server: RendezvousServer) -> None:
    store = GroupStore(server.rendezvous, 1, lambda: 30.0)
    assert not store.check(["a"])
    store.set("a", "text")
    store.set("b", b"\0bytes")
    assert store.check(["a", "b"])
    assert (store.get("a"), store.clone().get("b")) == (b"text", b"\0bytes")
    assert [store.add("n", 3), store.add("n", -1)] == [3, 2]
    store.wait(["a", "n"], timedelta(seconds=20))
    assert store.delete_key("a")
    assert not store.delete_key("a")
    start = time.monotonic()
    with pytest.raises(RefitTimeout, match="were not all set"):
        store.wait(["a", "b"], timedelta(seconds=0.2))
    assert time.monotonic() - start < 15
    store.close()


def test_what_ranks_tell_together_above_the_limit_ends_the_vote_at_once_and_names_who_tells_most(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "MAX_ANSWER", 400_000)
    generator = random.Random(3)

    def body(rank: int, channel: Channel) -> Any:
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            channel.vote("holdings", generator.randbytes(250_000 if rank == 2 else 60_000).hex())
        return caught.value.blamed, time.monotonic() - start

    results = on_all_ranks(server, body, timeout_s=20.0)
    assert [blamed for blamed, _ in results] == [2] * 4
    assert all(seconds < 15 for _, seconds in results)


def test_a_vote_of_more_than_one_message_may_hold_reaches_all_ranks(
    server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (frames, client, server_module):
        monkeypatch.setattr(module, "MAX_MESSAGE", 300_000)
    told = [random.Random(rank).randbytes(100_000).hex() for rank in range(4)]
    assert on_all_ranks(server, lambda rank, channel: channel.vote("v", told[rank])) == [told] * 4


@dataclass(frozen=True)
class Told:
    name: str
    sizes: tuple[int, ...] = ()


def test_a_vote_with_a_dataclass_gives_all_or_names_the_rank_and_the_field_of_another_form(
    server: RendezvousServer,
) -> None:
    def body(rank: int, channel: Channel) -> Any:
        told = channel.vote_as("told", Told(str(rank), (rank,)))
        if rank == 2:
            channel.vote("again", {"name": "2", "sizes": [1, "x"]})
            return told
        with pytest.raises(RefitMismatch) as raised:
            channel.vote_as("again", Told(str(rank)))
        assert raised.value.blamed == 2
        assert "sizes[1]" in str(raised.value)
        return told

    assert on_all_ranks(server, body) == [[Told(str(rank), (rank,)) for rank in range(4)]] * 4


def test_direct_data_reaches_the_ranks_that_it_is_for_beside_what_all_are_told(
    server: RendezvousServer,
) -> None:
    def body(rank: int, channel: Channel) -> Any:
        direct = {other: f"{rank} to {other}" for other in range(4) if other < rank}
        return channel.exchange("bound/1", [rank, {"alike": 1}], direct)

    for rank, (rows, direct) in enumerate(on_all_ranks(server, body)):
        assert rows == [[other, {"alike": 1}] for other in range(4)]
        assert len({id(alike) for _, alike in rows}) == 1, "what is told alike is one object"
        assert direct == {sender: f"{sender} to {rank}" for sender in range(rank + 1, 4)}


def test_what_512_ranks_are_told_of_equal_holdings_is_not_512_times_as_much() -> None:
    groups = [pack_json([[[[0, 128 * tp], [0, 7168]]], "bfloat16", "x" * 400]) for tp in range(32)]
    rows = [[pack_json({"host": f"node-{rank // 8}"}), groups[rank % 32]] for rank in range(512)]
    assert len(pack_values(rows)) < 10_000  # and not 512 * 450
