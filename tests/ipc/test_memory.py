"""Memory of peers: whose it is, and what stays open when it can't be mapped. The driver is played here.

That weights follow memory that sleeps, wakes elsewhere or fails to be mapped is in ``test_sleeping_engines.py``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlrefit.integration.errors import TransportUnavailable
from rlrefit.integration.gpu_memory.description import Description
from rlrefit.integration.gpu_memory.mapping import ImportedMemory
from rlrefit.integration.gpu_memory.memory import ExportedMemory, process_name
from rlrefit.integration.transport.storage import DeviceMemory
from tests.ipc.played_driver import CHUNK, PlayedDriver, played

READER, OWNER = torch.device("cuda", 0), torch.device("cuda", 1)


def open_descriptors() -> int:
    """Of this process. Those of what runs beside a test may become fewer meanwhile: of a rendezvous that ends, of a server that has loaded."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_forked_process_does_not_take_its_parent_for_itself() -> None:
    ours = process_name()
    inner, outer = os.pipe()
    child = os.fork()
    if not child:
        os.write(outer, process_name().encode())
        os._exit(0)
    os.close(outer)
    with os.fdopen(inner) as told:
        assert told.read() not in ("", ours)
    assert os.waitpid(child, 0)[1] == 0
    assert process_name() == ours


class Blocks:
    """Blocks of the owner's memory, one after another: which are held, and what lies where."""

    def __init__(self, driver: PlayedDriver, *chunks: int, classic: int = 0):
        self.driver, self.space = driver, driver.spaces[1]
        self.base = self.space.reserve(64 * CHUNK)
        at = self.base
        for size, is_classic in [(classic, True)] * bool(classic) + [(size, False) for size in chunks]:
            self.space.mapped[at] = driver.make(size, classic=is_classic)
            at += size

    @property
    def held(self) -> list[int]:
        """The blocks that somebody holds beside their mapping, by their first address."""
        return sorted(at - self.base for at, one in self.space.mapped.items() if one.references > 1)

    def export(self, *ranges: tuple[int, int], sleeps: tuple[tuple[int, int], ...] = ()) -> ExportedMemory:
        """What peers may map of these ranges, which count from the first block."""
        kept, lent = ([(self.base + at, size) for at, size in some] for some in (ranges, sleeps))
        return ExportedMemory(kept, OWNER, sleeps=lent)

    def told(self, exported: ExportedMemory) -> list[tuple[int, int, bool]]:
        """First address, chunks, and whether it sleeps, of each allocation."""
        return [(a.base - self.base, len(a.chunks), a.sleeps) for a in exported.allocations]


@pytest.fixture
def driver() -> Iterator[PlayedDriver]:
    with played(2) as made:
        yield made


@pytest.fixture
def blocks(driver: PlayedDriver) -> Blocks:
    """One of cudaMalloc, and two chunks."""
    return Blocks(driver, CHUNK, 2 * CHUNK, classic=CHUNK)


@pytest.mark.parametrize("nth", [1, 6, 40, 70])
def test_memory_that_can_not_be_mapped_leaves_no_descriptor_and_no_mapping(
    driver: PlayedDriver, nth: int
) -> None:
    gc.collect()  # what other tests left must not be closed in between
    before = open_descriptors()
    blocks = Blocks(driver, *[CHUNK // 2] * 70)
    exported = blocks.export((0, 35 * CHUNK))
    address = exported.serve(1, 5.0)
    driver.fail("cuMemImportFromShareableHandle", nth)
    # The error is kept, and with it all that its frames hold: nothing may depend on their end.
    with pytest.raises(TransportUnavailable) as kept, driver.on(0):
        ImportedMemory(Description("rank 1", "GPU-0", 5.0, exported.allocations, *address), READER, 5.0)
    exported.close()
    assert kept.value is not None
    assert (driver.spaces[0].mapped, driver.spaces[0].reserved) == ({}, {})
    assert blocks.held == []
    assert open_descriptors() <= before


@pytest.mark.parametrize("at", [0, CHUNK, 2 * CHUNK])
def test_other_memory_at_the_same_address_is_noticed_and_so_is_none(blocks: Blocks, at: int) -> None:
    exported = blocks.export((64, CHUNK), (2 * CHUNK + 5, 100))
    assert blocks.told(exported) == [(0, 0, False), (CHUNK, 2, False)]
    assert not exported.moved()
    first = blocks.space.mapped.pop(blocks.base + at)
    assert exported.moved()
    blocks.space.mapped[blocks.base + at] = blocks.driver.make(first.size, classic=first.classic)
    assert exported.moved()
    blocks.space.mapped[blocks.base + at] = first
    assert not exported.moved()
    assert blocks.held == [CHUNK, 2 * CHUNK]
    exported.close()
    exported.close()
    assert blocks.held == []


def test_memory_beside_that_of_the_parameters_may_come_and_go(blocks: Blocks) -> None:
    exported = blocks.export((CHUNK, 100))
    for at in (0, 2 * CHUNK):
        del blocks.space.mapped[blocks.base + at]
    assert not exported.moved()
    exported.close()


def test_memory_that_is_refused_is_not_held(blocks: Blocks) -> None:
    with pytest.raises(TransportUnavailable, match="CUDA_ERROR_INVALID_VALUE"):
        blocks.export((64, 4 * CHUNK))
    blocks.driver.fail("cuMemExportToShareableHandle", 1)
    with pytest.raises(TransportUnavailable, match="without shareable handles"):
        blocks.export((CHUNK, 64))
    assert blocks.held == []


def test_that_one_chunk_can_be_exported_is_tried_and_of_the_others_their_properties_tell(
    blocks: Blocks,
) -> None:
    blocks.driver.fail("cuMemExportToShareableHandle", 2)
    blocks.export((CHUNK, 3 * CHUNK)).close()


def test_what_is_lent_is_let_go_of_and_found_again_where_it_was(blocks: Blocks) -> None:
    exported = blocks.export((64, 100), sleeps=((CHUNK, 100), (2 * CHUNK, 100)))
    assert [(a.sleeps, len(a.identity)) for a in exported.allocations] == [(False, 1), (True, 0)]
    before = exported.allocations
    for _ in range(2):
        exported.release()
        assert blocks.held == []
        assert exported.moved()
        for at in (CHUNK, 2 * CHUNK):
            size = blocks.space.mapped[blocks.base + at].size
            blocks.space.mapped[blocks.base + at] = blocks.driver.make(size, classic=False)
        assert exported.find_again()
        assert exported.allocations == before
        assert not exported.moved()
        assert blocks.held == [CHUNK, 2 * CHUNK]
    exported.release()
    # What does not sleep has to be there still.
    blocks.space.mapped[blocks.base] = blocks.driver.make(CHUNK, classic=True)
    assert not exported.find_again()
    exported.close()
    assert blocks.held == []


def test_a_block_that_holds_what_is_lent_and_what_is_not_goes_as_a_whole(blocks: Blocks) -> None:
    exported = blocks.export((64, 100), (CHUNK, 100), sleeps=((CHUNK + 512, 100),))
    assert blocks.told(exported) == [(0, 0, False), (CHUNK, 1, True)]
    # So does what lies in part where something is lent: it stays in one row.
    exported = blocks.export((2 * CHUNK - 64, 128), sleeps=((CHUNK, 100),))
    assert blocks.told(exported) == [(CHUNK, 2, True)]
    assert exported.place(blocks.base + 2 * CHUNK - 64).offset == CHUNK - 64


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much torch's allocator says that it has given back, of two segments of this GPU and one of another, and
    of one in a pool that unmaps behind its back."""
    found = [5]
    own, sleeping = (0, 0), (1, 0)
    rows = [
        (1000, 500, 0, own),
        (4000, 100, 0, own),
        (1 << 30, 1 << 20, 1, own),
        (1 << 20, 1 << 16, 0, sleeping),
    ]
    snapshot = [
        {"address": at, "total_size": size, "device": device, "segment_pool_id": pool}
        for at, size, device, pool in rows
    ]
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda device: {"reserved_bytes": {"all": {"freed": found[0]}}},
    )
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: snapshot)
    return found


def test_memory_is_there_still_as_long_as_torchs_allocator_has_given_nothing_back(
    returned: list[int],
) -> None:
    weights = DeviceMemory(READER, lambda: [(1000, 500), (4050, 50), (9, 0)])
    assert weights.still_mapped()
    returned[0] += 1
    assert not weights.still_mapped()
    weights.confirm_unmoved()
    assert weights.still_mapped()


@pytest.mark.usefixtures("returned")
@pytest.mark.parametrize("place", [(999, 2), (1400, 101), (2000, 1), (1 << 30, 8), (1 << 20, 8)])
def test_memory_that_is_not_torchs_alone_is_never_taken_for_there(place: tuple[int, int]) -> None:
    assert not DeviceMemory(READER, lambda: [(1000, 10), place]).still_mapped()
