"""Groups over shared memory: the bytes of any parcel, typed errors, and nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from rlrefit.integration.comm import host_group, waiting
from rlrefit.integration.comm.group import Group, PeerBuffer
from rlrefit.integration.comm.host_group import HostGroup
from rlrefit.integration.comm.shared_memory import SharedMemory
from rlrefit.integration.errors import PeerLost, RefitError, RefitTimeout
from rlrefit.recipes.plan.catalog import GenLayout, TrainLayout
from tests.refit.mappings import wrong_refits
from tests.refit.matrix import model, stored

from .worlds import SharedWorld, SharedWorlds, left_behind, nothing_left

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def worlds() -> Iterator[SharedWorlds]:
    made = SharedWorlds()
    yield made
    made.close()


def lone_group(store: HashStore, rank: int, timeout_s: float = 20.0) -> HostGroup:
    return HostGroup(store, "pair", rank, 2, CPU, timeout_s, lambda stage: None)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 50_000])
def test_parcels_of_any_size_arrive_whole_from_all_to_all(worlds: SharedWorlds, nbytes: int) -> None:
    def sent(source: int, destination: int, turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * source + 10 * destination + turn)
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)

    def exchange(rank: int, group: Group) -> list[int]:
        others = [peer for peer in range(3) if peer != rank]
        out = {peer: torch.empty(nbytes, dtype=torch.uint8) for peer in others}
        into = {peer: torch.empty(nbytes, dtype=torch.uint8) for peer in others}
        prepared = group.prepare(
            [PeerBuffer(p, out[p]) for p in others],
            [PeerBuffer(p, into[p]) for p in others],
            nbytes % 2,
        )
        wrong = []
        for turn in range(3):
            for peer in others:
                out[peer].copy_(sent(rank, peer, turn))
                into[peer].fill_(0xFF)
            prepared.start("transfer")
            wrong += [peer for peer in others if not torch.equal(into[peer], sent(peer, rank, turn))]
        return wrong

    assert worlds.of(3).run(exchange) == [[], [], []]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.int64])
def test_a_broadcast_brings_any_dtype_from_any_root(worlds: SharedWorlds, dtype: torch.dtype) -> None:
    raw = torch.arange(30_000, dtype=torch.int64).view(torch.uint8)

    def broadcast(rank: int, group: Group) -> list[int]:
        wrong = []
        for root in range(3):
            buffer = (raw + root if rank == root else torch.full_like(raw, 0xFF)).view(dtype)
            # One element of a column counts as contiguous.
            one = torch.zeros(3, 7, dtype=dtype)[:1, 2]
            one[0] = 2 * (rank == root)
            for sent in (buffer, one):
                group.broadcast(sent, root, "misc")
            if not torch.equal(buffer.view(torch.uint8), raw + root) or one.item() != 2:
                wrong.append(root)
        return wrong

    assert worlds.of(3).run(broadcast) == [[], [], []]


@pytest.mark.parametrize(
    ("train", "gen"),
    [
        (TrainLayout(tp=2, ep=2, etp=1), GenLayout(tp=4)),
        (TrainLayout(tp=1, ep=2, pp=2, etp=2), GenLayout(tp=2, ep=2, dp=2)),
        (TrainLayout(tp=4, ep=1, etp=2), GenLayout(tp=1, dp=2)),
        (TrainLayout(tp=1, pp=2), GenLayout(tp=2)),
    ],
)
@pytest.mark.parametrize("experts", [0, 4])
def test_mappings_land_bit_for_bit_through_buckets_that_messages_are_cut_for(
    worlds: SharedWorlds, train: TrainLayout, gen: GenLayout, experts: int
) -> None:
    if not experts:
        train, gen = TrainLayout(tp=train.tp, pp=train.pp), GenLayout(tp=gen.tp, dp=gen.dp)
    mapping = stored(model(experts=experts), train, gen, 1 << 14, "full")
    assert wrong_refits(worlds, mapping, ("p2p", "golden"), (1, 2, 3)) == []


def test_a_peer_that_closes_ends_the_exchange_at_once_and_nothing_stays_open() -> None:
    before = left_behind()

    def exchange(rank: int, group: Group) -> None:
        buffer = torch.zeros(1 << 20, dtype=torch.uint8)
        group.connect([1 - rank])
        if rank == 1:
            group.close(failed=True)
            return
        with pytest.raises(PeerLost, match=r"group ranks \[1\] closed their end") as raised:
            group.exchange([PeerBuffer(1, buffer)], [], "transfer")
        assert (raised.value.rank, raised.value.stage) == (0, "transfer")
        group.close(failed=True)
        with pytest.raises(RefitError, match="closed"):
            group.exchange([PeerBuffer(1, buffer)], [], "transfer")

    start = time.monotonic()
    with SharedWorld(2) as world:
        assert world.run(exchange) == [None, None]
    assert time.monotonic() - start < 15
    assert nothing_left(before)


@pytest.mark.parametrize("ends", [True, False])
def test_memory_that_a_gpu_still_copies_from_outlives_the_group_that_has_failed(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[bool] = []

    class Copy:
        """What stands in for a GPU's event, since there is none here."""

        def record(self, stream: object) -> None: ...

        def query(self) -> bool:
            return copied.append(True) or (ends and len(copied) > 3)

    kept: list[object] = []
    monkeypatch.setattr(waiting, "_left_running", kept)
    monkeypatch.setattr(host_group, "_DRAIN_WITHIN", 0.2)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = (lone_group(store, rank, 0.5) for rank in (0, 1))
        list(pool.map(lambda group: group.connect([0, 1]), (first, second)))
        [pair] = first._pairs.values()
        step = host_group._Flow.step

        def on_gpu(flow: host_group._Flow) -> bool:
            """The first bucket is on its way, and comes to no end."""
            flow.copied = Copy()  # type: ignore[assignment]
            return False

        monkeypatch.setattr(host_group._Flow, "step", on_gpu)
        with pytest.raises(RefitTimeout):
            first.exchange([PeerBuffer(1, torch.zeros(9, dtype=torch.uint8))], [], "transfer")
        monkeypatch.setattr(host_group._Flow, "step", step)
        assert first.abort() == ends
        first.close(failed=True)
        assert (pair.shared.memory.numel() == 0) == ends == (not kept)
        pair.close()
        second.close(failed=True)


def test_what_was_sent_whole_arrives_though_the_sender_has_left() -> None:
    def exchange(rank: int, group: Group) -> bool:
        buffer = torch.full((100,), 7 if rank == 0 else 0, dtype=torch.uint8)
        group.connect([1 - rank])
        if rank == 0:
            group.exchange([PeerBuffer(1, buffer)], [], "transfer")
            group.close()
        else:
            time.sleep(0.1)
            group.exchange([], [PeerBuffer(0, buffer)], "transfer")
        return bool((buffer == 7).all())

    with SharedWorld(2) as world:
        assert world.run(exchange) == [True, True]


def test_a_late_peer_is_named_when_the_time_is_up() -> None:
    def exchange(rank: int, group: Group) -> None:
        group.connect([1 - rank])
        group.timeout_s = 0.2
        if rank == 0:
            with pytest.raises(RefitTimeout, match=r"group ranks \[1\]") as raised:
                group.exchange([], [PeerBuffer(1, torch.zeros(8, dtype=torch.uint8))], "misc")
            assert (raised.value.stage, raised.value.rank) == ("misc", 0)

    with SharedWorld(2) as world:
        assert world.run(exchange) == [None, None]


def test_a_rank_that_never_comes_is_a_timeout_and_leaves_nothing() -> None:
    before = left_behind()
    for rank in (0, 1):
        group = lone_group(HashStore(), rank, 0.2)
        with pytest.raises(RefitTimeout):
            group.exchange([], [PeerBuffer(1 - rank, torch.zeros(8, dtype=torch.uint8))], "transfer")
        group.close(failed=True)
    assert nothing_left(before)


def test_a_wait_looks_at_the_other_ranks_and_raises_what_it_finds() -> None:
    def gave_up(stage: str) -> None:
        raise PeerLost("trainer rank 3 gave up", stage=stage)

    store = HashStore()
    groups = [HostGroup(store, "pair", rank, 2, CPU, 20.0, gave_up) for rank in range(2)]

    def exchange(rank: int, group: Group) -> None:
        groups[rank].connect([1 - rank])
        if rank == 0:
            with pytest.raises(PeerLost, match="trainer rank 3"):
                groups[0].exchange([], [PeerBuffer(1, torch.zeros(8, dtype=torch.uint8))], "transfer")

    with SharedWorld(2) as world:
        assert world.run(exchange) == [None, None]
    for group in groups:
        group.close(failed=True)


def test_shared_memory_whose_size_its_maker_could_change_is_refused() -> None:
    shared, descriptor = SharedMemory.make(8192)
    unsealed = os.memfd_create("unsealed")
    try:
        with pytest.raises(ValueError, match="8192 bytes instead of 4096"):
            SharedMemory(descriptor, 4096)
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(descriptor, 0)
        os.ftruncate(unsealed, 4096)
        with pytest.raises(ValueError, match="can still change"):
            SharedMemory(unsealed, 4096)
    finally:
        os.close(descriptor)
        os.close(unsealed)
        shared.close()
