"""Ranks that share one GPU: refits through CUDA IPC and through host memory, and exchanges of their groups."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rlrefit.integration.errors import RefitError, RefitTimeout
from rlrefit.integration.exchanges import Parcel
from rlrefit.integration.process_groups import Group
from rlrefit.integration.shared_wire.device_group import DeviceGroup
from rlrefit.integration.shared_wire.host_group import HostGroup
from tests.gpu.test_refit_over_nccl import refit_three_times
from tests.refit.test_killed_peer import kill_a_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BUCKET = 1 << 20


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started see one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])


@pytest.mark.parametrize("queues", ["1", "8"])
@pytest.mark.parametrize(
    ("engine", "transport", "carries"),
    [
        ("colocated_ipc", "auto", "ipc"),
        ("colocated_ipc", "p2p", "buckets"),
        ("colocated_ipc", "golden", "golden"),
        ("nccl_xfer", "p2p", "p2p"),
        ("packed_broadcast", "auto", "broadcast"),
    ],
)
@pytest.mark.usefixtures("one_gpu")
def test_ranks_of_one_gpu_refit_three_changed_versions_bit_for_bit(
    engine: str, transport: str, carries: str, queues: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    rows = refit_three_times(4, engine, transport)
    assert {row[4]["transport"] for row in rows} == {carries}


@pytest.mark.parametrize("killed", [2, 0])
@pytest.mark.usefixtures("one_gpu")
def test_the_death_of_a_rank_ends_the_refit_on_all_others_within_the_timeout(killed: int) -> None:
    kill_a_rank("transfer", on_gpu=True, killed=killed, engine="colocated_ipc")


def on_two_ranks(
    kind: type[DeviceGroup] | type[HostGroup], body: Callable[[int, Group], Any], timeout_s: float = 20.0
) -> list[Any]:
    """What ``body(rank, group)`` returns on two ranks of GPU 0, each a thread with a stream of its own."""
    store, device = HashStore(), torch.device("cuda", 0)
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        group = kind(store, "pair", rank, 2, device, timeout_s, lambda stage: None, 2, BUCKET)
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                results[rank] = body(rank, group)
        except RefitError as error:
            results[rank] = error
        finally:
            group.close(failed=isinstance(results[rank], RefitError))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("kind", [DeviceGroup, HostGroup])
def test_parcels_larger_than_buckets_arrive_in_both_directions_and_lanes(kind: Any) -> None:
    def value(rank: int, turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * turn + rank)
        return torch.randint(0, 256, (5 * BUCKET + 17,), dtype=torch.uint8, generator=generator).cuda()

    def body(rank: int, group: Group) -> list[bool]:
        out, into = value(rank, 0), torch.zeros(5 * BUCKET + 17, dtype=torch.uint8, device="cuda")
        prepared = [group.prepare([Parcel(1 - rank, out)], [Parcel(1 - rank, into)], lane) for lane in (0, 1)]
        found = []
        for turn in range(6):
            out.copy_(value(rank, turn))
            into.fill_(0xFF)
            prepared[turn % 2].start("transfer")
            found.append(torch.equal(into, value(1 - rank, turn)))
        whole = value(0, 9) if rank == 0 else torch.zeros_like(out)
        group.broadcast(whole, 0, "misc")
        return [*found, torch.equal(whole, value(0, 9))]

    assert on_two_ranks(kind, body) == [[True] * 7] * 2


def test_a_wait_for_a_peer_that_sends_nothing_ends_in_time_and_leaves_the_gpu_usable() -> None:
    def body(rank: int, group: Group) -> None:
        group.connect([1 - rank])
        if rank == 0:
            group.exchange([], [Parcel(1, torch.zeros(64, dtype=torch.uint8, device="cuda"))], "transfer")

    start = time.monotonic()
    first, second = on_two_ranks(DeviceGroup, body, timeout_s=1.0)
    torch.cuda.synchronize()
    assert isinstance(first, RefitTimeout)
    assert second is None
    assert time.monotonic() - start < 10
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_a_hundred_groups_leave_no_memory_on_the_gpu() -> None:
    def body(rank: int, group: Group) -> bool:
        out = torch.full((3 * BUCKET,), rank, dtype=torch.uint8, device="cuda")
        into = torch.zeros_like(out)
        group.exchange([Parcel(1 - rank, out)], [Parcel(1 - rank, into)], "transfer")
        return bool((into == 1 - rank).all())

    assert on_two_ranks(DeviceGroup, body) == [True, True]
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(100):
        assert on_two_ranks(DeviceGroup, body) == [True, True]
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20
