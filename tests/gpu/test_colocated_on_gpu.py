"""Ranks that share one GPU: refits through CUDA IPC and through host memory, and exchanges of their groups."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from rlrefit.integration.comm.device_group import DeviceGroup
from rlrefit.integration.comm.group import Group, PeerBuffer
from rlrefit.integration.comm.host_group import HostGroup
from rlrefit.integration.comm.shared_memory import SharedGroup
from rlrefit.integration.errors import RefitError, RefitTimeout
from tests.gpu.test_refit_over_nccl import refit_three_times
from tests.refit.test_killed_peer import kill_a_rank

from .needs import needs
from .spawned import spawned

pytestmark = needs()

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


Body = Callable[[int, Group], Any]


def rank_main(
    kind: type[SharedGroup], body: Body, timeout_s: float, meeting: str, rank: int, results: Any
) -> None:
    device = torch.device("cuda", 0)
    group = kind(FileStore(meeting, 2), "pair", rank, 2, device, timeout_s, lambda stage: None, 2, BUCKET)
    found: Any = None
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found = body(rank, group)
    except RefitError as error:
        found = type(error)
    except Exception:
        found = traceback.format_exc()
    group.close(failed=isinstance(found, type))
    # Torch's queue would share the memory of what it pickles: only plain data goes through it.
    results.put((rank, found))


def on_two_ranks(kind: type[SharedGroup], body: Body, tmp_path: Path, timeout_s: float = 20.0) -> list[Any]:
    """What ``body(rank, group)`` returns on two ranks of GPU 0, or the class of the refit's error that it raises.

    Each is a process with a stream of its own: streams of one process may share a hardware queue, where a wait for the
    other rank would stand before what it waits for. No refit puts such ranks on this wire.
    """
    ranks = [(kind, body, timeout_s, str(tmp_path / "meeting"), rank) for rank in range(2)]
    with spawned(rank_main, ranks) as results:
        found = dict(results.get(timeout=90) for _ in ranks)
    return [found[0], found[1]]


def random_bytes(rank: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * turn + rank)
    return torch.randint(0, 256, (5 * BUCKET + 17,), dtype=torch.uint8, generator=generator).cuda()


def exchange_large_parcels(rank: int, group: Group) -> list[bool]:
    out, into = random_bytes(rank, 0), torch.zeros(5 * BUCKET + 17, dtype=torch.uint8, device="cuda")
    prepared = [
        group.prepare([PeerBuffer(1 - rank, out)], [PeerBuffer(1 - rank, into)], lane) for lane in (0, 1)
    ]
    found = []
    for turn in range(6):
        out.copy_(random_bytes(rank, turn))
        into.fill_(0xFF)
        prepared[turn % 2].start("transfer")
        found.append(torch.equal(into, random_bytes(1 - rank, turn)))
    whole = random_bytes(0, 9) if rank == 0 else torch.zeros_like(out)
    group.broadcast(whole, 0, "misc")
    return [*found, torch.equal(whole, random_bytes(0, 9))]


@pytest.mark.parametrize("queues", ["1", "8"])
@pytest.mark.parametrize("kind", [DeviceGroup, HostGroup])
def test_parcels_larger_than_buckets_arrive_in_both_directions_and_lanes(
    kind: Any, queues: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert on_two_ranks(kind, exchange_large_parcels, tmp_path) == [[True] * 7] * 2


def wait_for_a_silent_peer(rank: int, group: Group) -> tuple[str, float, float]:
    group.connect([1 - rank])
    start, raised = time.monotonic(), ""
    if rank == 0:
        try:
            group.exchange([], [PeerBuffer(1, torch.zeros(64, dtype=torch.uint8, device="cuda"))], "transfer")
        except RefitTimeout as error:
            raised = type(error).__name__
            group.close(failed=True)
        torch.cuda.synchronize()
    else:
        time.sleep(5)  # its end would tell the other one more than silence
    return raised, time.monotonic() - start, torch.ones(4, device="cuda").sum().item()


def test_a_wait_for_a_peer_that_sends_nothing_ends_in_time_and_leaves_the_gpu_usable(tmp_path: Path) -> None:
    first, second = on_two_ranks(DeviceGroup, wait_for_a_silent_peer, tmp_path, timeout_s=1.0)
    assert first[0] == "RefitTimeout"
    assert first[1] < 4
    assert first[2] == second[2] == 4


def exchange_in_a_hundred_groups(rank: int, group: SharedGroup) -> tuple[list[bool], int]:
    """Whether each arrived, and the bytes of the GPU's memory that are gone since the first."""
    out = torch.full((3 * BUCKET,), rank, dtype=torch.uint8, device="cuda")
    into = torch.zeros_like(out)
    found, free = [], 0
    for turn in range(101):
        own = type(group)(
            group._store, f"pair{turn}", rank, 2, group.device, 20.0, lambda stage: None, 2, BUCKET
        )
        into.zero_()
        own.exchange([PeerBuffer(1 - rank, out)], [PeerBuffer(1 - rank, into)], "transfer")
        found.append(bool((into == 1 - rank).all()))
        # Both have closed when both have met again.
        own.close()
        group.exchange([PeerBuffer(1 - rank, out)], [PeerBuffer(1 - rank, into)], "transfer")
        torch.cuda.synchronize()
        if turn == 0:
            free, _ = torch.cuda.mem_get_info()
    return found, free - torch.cuda.mem_get_info()[0]


def test_a_hundred_groups_leave_no_memory_on_the_gpu(tmp_path: Path) -> None:
    for found, lost in on_two_ranks(DeviceGroup, exchange_in_a_hundred_groups, tmp_path):
        assert found == [True] * 101
        assert lost < 64 << 20
