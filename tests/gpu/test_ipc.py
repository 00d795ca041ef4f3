"""One-sided refits between processes: on one GPU that they share, or each on its own where there are more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import RefitError, TransportUnavailable
from rlrefit.integration.gpu_memory.buckets import OwnBuckets
from rlrefit.integration.gpu_memory.driver import call, driver
from rlrefit.integration.gpu_memory.memory import ExportedMemory
from tests.ipc.worlds import Rank, Scenario, run

from .needs import needs

pytestmark = needs()


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    return str(tmp_path / "meeting")


@pytest.mark.parametrize(("sources", "destinations"), [(2, 2), (1, 2), (2, 1)])
def test_three_changed_refits_land_bit_for_bit_in_strided_parameters(
    meeting: str, sources: int, destinations: int
) -> None:
    ranks = run(Scenario(meeting, sources, destinations))
    for rank in ranks[sources:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[], [], []]
        assert all(refit["verified"] == refit["payload"] > 0 for refit in rank["refits"])


@pytest.mark.parametrize("verify", ["off", "sampled"])
def test_less_verification_checks_less_and_moves_the_same(meeting: str, verify: str) -> None:
    ranks = run(Scenario(meeting, verify=verify, bucket_bytes=1 << 19))
    for rank in ranks[2:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[], [], []]
        verified = [refit["verified"] for refit in rank["refits"]]
        assert all(v == 0 if verify == "off" else 0 < v < rank["refits"][0]["payload"] for v in verified)


def test_parameters_in_expandable_segments_of_many_chunks_are_written(meeting: str) -> None:
    ranks = run(Scenario(meeting, expandable=True, rows=200_000))
    for rank in ranks[2:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[], [], []]


def test_parameters_that_moved_are_found_again_and_the_old_ones_left_alone(meeting: str) -> None:
    for rank in run(Scenario(meeting, action="move"))[2:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[], [], []]


@pytest.mark.parametrize("expandable", [False, True])
def test_what_trainers_sent_from_where_their_weights_no_longer_were_is_void_on_every_rank(
    meeting: str, expandable: bool
) -> None:
    ranks = run(Scenario(meeting, action="late", expandable=expandable, verify="sampled"))
    assert all(rank["void"] for rank in ranks)
    # What was given back to the driver may not be read: then trainers look before they send.
    assert all(rank["checks"] == [True, True, False] for rank in ranks[:2])
    for rank in ranks[2:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[]] * 4


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_that_was_given_back_and_came_anew_is_noticed_whatever_its_address_is(
    meeting: str, expandable: bool
) -> None:
    ranks = run(Scenario(meeting, action="remap", expandable=expandable, rows=200_000))
    assert [rank["moved"] for rank in ranks] == [[False, place >= 2, False] for place in range(4)]
    for rank in ranks[2:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[], [], []]


@pytest.mark.parametrize("expandable", [False, True])
def test_engines_that_give_their_memory_back_between_refits_have_all_of_it_back(
    meeting: str, expandable: bool
) -> None:
    ranks = run(Scenario(meeting, action="sleep", expandable=expandable, rows=200_000))
    assert all(rank["moved"] == [True] * 3 for rank in ranks)
    for rank in ranks[2:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[], [], []]
        # What the allocator keeps beside large weights are blocks for small ones.
        assert all(given > 0.9 * held for held, given in rank["slept"]), rank["slept"]


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(("sources", "destinations"), [(2, 2), (1, 2), (2, 1)])
def test_engines_in_memory_that_nobody_can_map_read_three_changed_refits_bit_for_bit(
    meeting: str, sources: int, destinations: int, expandable: bool
) -> None:
    ranks = run(
        Scenario(meeting, sources, destinations, memory="private", expandable=expandable, rows=200_000)
    )
    for rank in ranks[sources:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[], [], []]
        assert all(refit["verified"] == refit["payload"] > 0 for refit in rank["refits"])


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(
    "memory",
    [
        "torch",
        "private",
        pytest.param(
            "saver",
            marks=pytest.mark.skipif(
                find_spec("torch_memory_saver") is None, reason="needs torch_memory_saver"
            ),
        ),
    ],
)
def test_trainers_that_leave_have_all_of_their_memory_back_and_engines_that_sleep_are_read_for(
    meeting: str, memory: str, expandable: bool
) -> None:
    ranks = run(
        Scenario(
            meeting,
            action="leave",
            memory=memory,
            pulls=memory == "torch",
            expandable=expandable,
            rows=200_000,
        )
    )
    assert [rank["name"] for rank in ranks] == ["pull"] * 4
    assert all(rank["moved"] == [True] * 3 for rank in ranks)
    for rank in ranks:
        # What the allocator keeps beside large weights are blocks for small ones.
        assert all(given > 0.9 * held for held, given in rank["gone"]), rank["gone"]
        assert all(refit["wrong"] == [] for refit in rank["refits"])


@pytest.mark.parametrize("expandable", [False, True])
def test_trainers_parameters_that_moved_under_engines_that_read_them_are_void_or_bound_anew(
    meeting: str, expandable: bool
) -> None:
    ranks = run(Scenario(meeting, action="late", pulls=True, expandable=expandable, verify="sampled"))
    assert all(rank["void"] for rank in ranks)
    assert all(rank["checks"] == [True, True, False] for rank in ranks[:2])
    for rank in ranks[2:]:
        assert [refit["wrong"] for refit in rank["refits"]] == [[]] * 4


def test_a_killed_trainer_ends_the_engines_that_read_it_in_a_typed_error_within_the_timeout(
    meeting: str,
) -> None:
    ranks = run(Scenario(meeting, action="kill", timeout_s=3.0, pulls=True))
    assert ranks[0] is None
    # Nobody reads before all may be read.
    assert ranks[1]["ended"] == "done"
    for rank in ranks[2:]:
        assert rank["ended"].startswith("RefitTimeout: refit rank 0 did not finish")
        assert 3.0 <= rank["seconds"] < 5.0


def test_a_checksum_that_differs_from_what_was_read_names_sender_and_weight(meeting: str) -> None:
    ranks = run(Scenario(meeting, action="lie", pulls=True))
    assert ranks[2]["ended"].startswith("VerificationError: what landed from refit rank 0")
    assert ranks[3]["ended"] == "done"


def test_a_killed_sender_ends_in_a_typed_error_that_names_it_within_the_timeout(meeting: str) -> None:
    ranks = run(Scenario(meeting, action="kill", timeout_s=3.0))
    assert ranks[0] is None
    assert ranks[1]["ended"] == "done"
    for rank in ranks[2:]:
        assert rank["ended"].startswith("RefitTimeout: refit rank 0 did not finish")
        assert 3.0 <= rank["seconds"] < 5.0


def test_a_killed_receiver_keeps_neither_the_senders_nor_the_other_receivers(meeting: str) -> None:
    ranks = run(Scenario(meeting, action="kill", victim=2, timeout_s=10.0))
    assert ranks[2] is None
    assert [ranks[rank]["ended"] for rank in (0, 1, 3)] == ["done"] * 3


def test_a_sender_whose_gpu_was_busy_too_long_writes_nothing_into_engines_that_gave_it_up(
    meeting: str,
) -> None:
    ranks = run(Scenario(meeting, action="busy", timeout_s=3.0))
    assert ranks[0]["ended"].startswith("RefitTimeout: this rank's earlier work on its GPU")
    for rank in ranks[2:]:
        assert rank["ended"].startswith("RefitTimeout: refit rank 0 did not finish")
        # Experts are dealt out to the trainers in turn, and rank 0 has the first.
        assert any(name.startswith("experts.0.") for name in rank["missing"])
        assert not any(name.startswith("experts.1.") for name in rank["missing"])


def test_a_checksum_that_differs_is_an_error_that_names_sender_and_weight(meeting: str) -> None:
    ranks = run(Scenario(meeting, action="lie"))
    assert ranks[2]["ended"].startswith("VerificationError: what landed from refit rank 0")
    assert "parameter " in ranks[2]["ended"]
    assert ranks[3]["ended"] == "done"


@pytest.mark.parametrize("pulls", [False, True], ids=["written", "read"])
@pytest.mark.parametrize(("action", "expandable"), [("refits", False), ("epochs", False), ("epochs", True)])
def test_a_hundred_refits_or_epochs_leave_no_memory_and_no_descriptors(
    meeting: str, action: str, expandable: bool, pulls: bool
) -> None:
    ranks = run(
        Scenario(
            meeting, 1, 1, action=action, times=100, expandable=expandable, verify="sampled", pulls=pulls
        ),
        240.0,
    )
    assert not any(refit["wrong"] for refit in ranks[1]["refits"])
    for rank in ranks:
        assert rank["resources"][-1] == rank["resources"][9]


def test_ranks_of_one_process_write_without_handles(meeting: str) -> None:
    ranks = [Rank(Scenario(meeting), rank, torch.device("cuda", 0)) for rank in range(4)]
    transports = [rank.make_transport() for rank in ranks]
    for rank, transport in zip(ranks, transports, strict=True):
        transport.bind(rank.fragments())
    described = [transport.describe() for transport in transports]
    for transport in transports:
        transport.connect(described)
    for version in (1, 2):
        for rank in ranks:
            rank.prepare(version)
        for rank, transport in zip(ranks, transports, strict=True):
            transport.synchronize()
            transport.run(rank.clock)
        assert [rank.endpoint.wrong(version) for rank in ranks[2:]] == [[], []]
    for transport in transports:
        transport.close()


def test_an_open_transport_does_not_keep_the_memory_of_parameters(meeting: str) -> None:
    scenario = Scenario(meeting, 1, 1, rows=200_000)
    ranks = [Rank(scenario, rank, torch.device("cuda", 0)) for rank in range(2)]
    transports = [rank.make_transport() for rank in ranks]
    for rank, transport in zip(ranks, transports, strict=True):
        transport.bind(rank.fragments())
    described = [transport.describe() for transport in transports]
    for transport in transports:
        transport.connect(described)
    held = torch.cuda.memory_allocated()
    for rank in ranks:
        rank.endpoint = None
    # The embedding alone has 200,000 rows of 256 two-byte elements on each side.
    assert held - torch.cuda.memory_allocated() >= 2 * 200_000 * 256 * 2
    for transport in transports:
        transport.close()


def test_an_engines_parameters_that_lie_on_the_host_are_refused_by_name(meeting: str) -> None:
    rank = Rank(Scenario(meeting), 2, torch.device("cuda", 0))
    offloaded = [replace(fragment, view=fragment.view.cpu()) for fragment in rank.fragments()]
    with pytest.raises(RefitError) as raised:
        rank.make_transport().bind(offloaded)
    assert raised.value.parameter == "experts.0.gate"


def test_a_thread_that_has_not_used_the_gpu_may_map_and_export_its_memory(device: torch.device) -> None:
    """As engines' worker threads do; CUDA has no context in a new thread."""
    with ThreadPoolExecutor(1) as thread:
        buckets = thread.submit(OwnBuckets, 1 << 20, device, 5.0).result()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(buckets.close).result()


@pytest.fixture
def device() -> torch.device:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    return device


def make_chunk(size: int, *, shareable: bool) -> Any:
    """Physical memory of the virtual-memory interface; the driver's handle."""
    wanted = driver().CUmemAllocationProp()
    wanted.type = driver().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 0
    if shareable:
        kinds = driver().CUmemAllocationHandleType
        wanted.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return call("cuMemCreate", size, wanted, 0)


def test_memory_made_without_shareable_handles_is_refused_with_the_reason(device: torch.device) -> None:
    size = 2 << 20
    handle = make_chunk(size, shareable=False)
    address = call("cuMemAddressReserve", size, 0, 0, 0)
    call("cuMemMap", address, size, 0, handle, 0)
    try:
        with pytest.raises(TransportUnavailable, match="without shareable handles"):
            ExportedMemory([(int(address) + 512, 1024)], device)
    finally:
        call("cuMemUnmap", address, size)
        call("cuMemAddressFree", address, size)
        call("cuMemRelease", handle)


def test_a_chunk_that_was_mapped_where_another_one_was_is_noticed(device: torch.device) -> None:
    size = 2 << 20
    access = driver().CUmemAccessDesc()
    access.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    address = call("cuMemAddressReserve", size, 0, 0, 0)
    exported: ExportedMemory | None = None
    for _ in range(3):
        handle = make_chunk(size, shareable=True)
        call("cuMemMap", address, size, 0, handle, 0)
        call("cuMemSetAccess", address, size, [access], 1)
        call("cuMemRelease", handle)
        if exported is not None:
            assert exported.moved()
            exported.close()
        exported = ExportedMemory([(int(address) + 512, 1024)], device)
        assert not exported.moved()
        call("cuMemUnmap", address, size)
        assert exported.moved()
    assert exported is not None
    exported.close()
    call("cuMemAddressFree", address, size)


def test_memory_of_cudamalloc_that_was_freed_and_allocated_again_is_noticed(device: torch.device) -> None:
    exported: ExportedMemory | None = None
    size = 64 << 20
    for _ in range(3):
        address = call("cuMemAlloc", size)
        if exported is not None:
            assert exported.moved()
            exported.close()
        exported = ExportedMemory([(int(address) + 512, 1024)], device)
        assert not exported.moved()
        call("cuMemFree", address)
        assert exported.moved()
    assert exported is not None
    exported.close()
