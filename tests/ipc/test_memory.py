"""Memory of peers: whose it is, and what stays open when it can't be mapped. The driver is played here."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlrefit.integration.errors import TransportUnavailable
from rlrefit.integration.gpu_memory import mapping, memory
from rlrefit.integration.gpu_memory.description import Allocation, Description
from rlrefit.integration.gpu_memory.descriptors import DescriptorServer
from rlrefit.integration.gpu_memory.driver import DriverError, driver
from rlrefit.integration.gpu_memory.mapping import ImportedMemory
from rlrefit.integration.gpu_memory.memory import ExportedMemory, process_name
from rlrefit.integration.transport.storage import DeviceMemory
from tests.spawn import processes

DEVICE = torch.device("cuda", 0)
CHUNK = 2 << 20


class Driver:
    """Maps chunks, but fails at one of them; notes what is still mapped and held."""

    def __init__(self, fails_at: int):
        self.fails_at = fails_at
        self.imports = 0
        self.open: list[str] = []

    def __call__(self, function: str, *args: Any) -> Any:
        ends = {"cuMemUnmap": "cuMemMap", "cuMemAddressFree": "cuMemAddressReserve"}
        if function == "cuMemImportFromShareableHandle":
            if self.imports == self.fails_at:
                raise DriverError(function, "CUDA_ERROR_OUT_OF_MEMORY")
            self.imports += 1
        elif function in ends:
            self.open.remove(ends[function])
        elif function in ends.values():
            self.open.append(function)
        return 1 << 40


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, mapping):
        monkeypatch.setattr(module, "on_device", lambda device: nullcontext())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _tell_name(pipe: Connection) -> None:
    pipe.send(process_name())


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


def test_a_process_that_was_started_anew_has_another_name() -> None:
    context = processes()
    inner, outer = context.Pipe(duplex=False)
    child = context.Process(target=_tell_name, args=(outer,))
    child.start()
    assert inner.recv() != process_name()
    child.join()


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("fails_at", [0, 5, 39, 69])
def test_memory_that_can_not_be_mapped_leaves_no_descriptor_and_no_mapping(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    driver = Driver(fails_at)
    monkeypatch.setattr(mapping, "call", driver)
    gc.collect()  # what other tests left must not be closed in between
    before = open_descriptors()
    server = DescriptorServer(lambda i: os.open(os.devnull, os.O_RDONLY), 70, 1, 5.0)
    peer = Description(
        "another",
        "GPU-0",
        5.0,
        (Allocation(1 << 41, 70 * CHUNK, "", (CHUNK,) * 70),),
        server.address,
        server.token,
    )
    # The error is kept, and with it all that its frames hold: nothing may depend on their end.
    with pytest.raises(TransportUnavailable, match="CUDA_ERROR_OUT_OF_MEMORY") as kept:
        ImportedMemory(peer, DEVICE, 5.0)
    server.close()
    assert kept.value is not None
    assert driver.open == []
    assert open_descriptors() == before


class Mapped:
    """What lies where on a GPU: by address the size, the identity, and whether cudaMalloc made it."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, int, bool]] = {}
        self.retained: list[int] = []
        self.exportable = True
        self.attempts = 0

    def __call__(self, function: str, *args: Any) -> Any:
        if function == "cuMemRelease":
            return self.retained.remove(args[0])
        if function == "cuMemGetAllocationPropertiesFromHandle":
            kinds = driver().CUmemAllocationHandleType
            asked = (
                kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                if self.exportable
                else kinds.CU_MEM_HANDLE_TYPE_NONE
            )
            return SimpleNamespace(requestedHandleTypes=asked)
        if function == "cuMemExportToShareableHandle":
            self.attempts += 1
            if not self.exportable:
                raise DriverError(function, "CUDA_ERROR_NOT_PERMITTED")
            return os.open(os.devnull, os.O_RDONLY)
        at = int(args[-1])
        base = next((b for b, (size, _, _) in self.blocks.items() if b <= at < b + size), None)
        if base is None:
            raise DriverError(function, "CUDA_ERROR_INVALID_VALUE")
        size, identity, classic = self.blocks[base]
        if function == "cuMemRetainAllocationHandle":
            self.retained.append(identity)
            return identity
        legacy = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        return {
            "cuMemGetAddressRange": (base, size),
            "cuPointerGetAttribute": classic if args[0] == legacy else identity,
            "cuIpcGetMemHandle": SimpleNamespace(getPtr=lambda: ctypes.addressof(_HANDLE)),
        }[function]


_HANDLE = ctypes.create_string_buffer(64)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch, on_a_gpu: None) -> Mapped:
    mapped = Mapped()
    monkeypatch.setattr(memory, "call", mapped)
    mapped.blocks = {
        0: (CHUNK, 1, True),
        CHUNK: (CHUNK, 2, False),
        2 * CHUNK: (2 * CHUNK, 3, False),
    }
    return mapped


@pytest.mark.parametrize("base", [0, CHUNK, 2 * CHUNK])
def test_other_memory_at_the_same_address_is_noticed_and_so_is_none(mapped: Mapped, base: int) -> None:
    exported = ExportedMemory([(64, CHUNK), (2 * CHUNK + 5, 100)], DEVICE)
    assert [(a.base, a.size, a.chunks) for a in exported.allocations] == [
        (0, CHUNK, ()),
        (CHUNK, 3 * CHUNK, (CHUNK, 2 * CHUNK)),
    ]
    assert not exported.moved()
    size, identity, classic = mapped.blocks.pop(base)
    assert exported.moved()
    mapped.blocks[base] = (size, 9, classic)
    assert exported.moved()
    mapped.blocks[base] = (size, identity, classic)
    assert not exported.moved()
    assert sorted(mapped.retained) == [2, 3]
    exported.close()
    exported.close()
    assert mapped.retained == []


def test_memory_beside_that_of_the_parameters_may_come_and_go(mapped: Mapped) -> None:
    exported = ExportedMemory([(CHUNK, 100)], DEVICE)
    del mapped.blocks[0], mapped.blocks[2 * CHUNK]
    assert not exported.moved()
    exported.close()


def test_memory_that_is_refused_is_not_held(mapped: Mapped) -> None:
    del mapped.blocks[2 * CHUNK]
    with pytest.raises(TransportUnavailable, match="CUDA_ERROR_INVALID_VALUE"):
        ExportedMemory([(64, 2 * CHUNK)], DEVICE)
    mapped.exportable = False
    with pytest.raises(TransportUnavailable, match="without shareable handles"):
        ExportedMemory([(CHUNK, 64)], DEVICE)
    assert mapped.retained == []


def test_that_one_chunk_can_be_exported_is_tried_and_of_the_others_their_properties_tell(
    mapped: Mapped,
) -> None:
    exported = ExportedMemory([(CHUNK, 3 * CHUNK)], DEVICE)
    assert mapped.attempts == 1
    exported.close()


def test_what_is_lent_is_let_go_of_and_found_again_where_it_was(mapped: Mapped) -> None:
    exported = ExportedMemory([(64, 100)], DEVICE, sleeps=[(CHUNK, 100), (2 * CHUNK, 100)])
    assert exported.can_release
    assert [(a.base, a.sleeps, a.identity) for a in exported.allocations] == [
        (0, False, (1,)),
        (CHUNK, True, ()),
    ]
    before = exported.allocations
    for identity in (4, 6):
        exported.release()
        assert mapped.retained == []
        assert exported.moved()
        mapped.blocks[CHUNK] = (CHUNK, identity, False)
        mapped.blocks[2 * CHUNK] = (2 * CHUNK, identity + 1, False)
        assert exported.find_again()
        assert exported.allocations == before
        assert not exported.moved()
        assert sorted(mapped.retained) == [identity, identity + 1]
    exported.release()
    exported.close()
    assert mapped.retained == []


@pytest.mark.parametrize("changed", ["size", "kind", "what does not sleep"])
def test_other_blocks_where_the_lent_ones_were_are_looked_up_anew(mapped: Mapped, changed: str) -> None:
    exported = ExportedMemory([(64, 100)], DEVICE, sleeps=[(CHUNK, 100), (2 * CHUNK, 100)])
    exported.release()
    mapped.blocks |= {
        "size": {2 * CHUNK: (CHUNK, 5, False)},
        "kind": {2 * CHUNK: (2 * CHUNK, 5, True)},
        "what does not sleep": {0: (CHUNK, 5, True)},
    }[changed]
    assert not exported.find_again()
    exported.close()
    assert mapped.retained == []


def test_a_block_that_holds_what_is_lent_and_what_is_not_goes_as_a_whole(mapped: Mapped) -> None:
    exported = ExportedMemory([(64, 100), (CHUNK, 100)], DEVICE, sleeps=[(CHUNK + 512, 100)])
    assert [(a.base, a.sleeps) for a in exported.allocations] == [(0, False), (CHUNK, True)]
    assert exported.can_release
    exported.close()
    opened_by_handle = ExportedMemory([], DEVICE, sleeps=[(64, 100)])
    assert not opened_by_handle.can_release
    opened_by_handle.close()


def test_what_is_not_lent_but_lies_in_part_where_something_is_stays_in_one_row(mapped: Mapped) -> None:
    exported = ExportedMemory([(2 * CHUNK - 64, 128)], DEVICE, sleeps=[(CHUNK, 100)])
    assert [(a.base, a.chunks, a.sleeps) for a in exported.allocations] == [
        (CHUNK, (CHUNK, 2 * CHUNK), True),
    ]
    assert exported.place(2 * CHUNK - 64).offset == CHUNK - 64
    exported.close()
    assert mapped.retained == []


class Rows:
    """Chunks of a peer as they are mapped here: by address the descriptor's number."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.reserved = 0

    def __call__(self, function: str, *args: Any) -> Any:
        if function == "cuMemAddressReserve":
            self.reserved += 1
            return self.reserved << 40
        if function == "cuMemAddressFree":
            assert not any(at >> 40 == args[0] >> 40 for at in self.mapped), "still mapped"
            self.reserved -= 1
        elif function == "cuMemImportFromShareableHandle":
            return os.fstat(args[0]).st_size
        elif function == "cuMemMap":
            assert args[0] not in self.mapped, "mapped twice"
            self.mapped[args[0]] = args[3]
        elif function == "cuMemUnmap":
            del self.mapped[args[0]]
        return None


@pytest.mark.usefixtures("on_a_gpu")
def test_what_a_peer_lends_is_mapped_again_at_the_same_addresses_and_all_else_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = Rows()
    monkeypatch.setattr(mapping, "call", rows)
    # Each descriptor is told by the size of its file.
    generation = 0

    def chunk(index: int) -> int:
        path = tmp_path / str(index)
        path.write_bytes(b"0" * (100 * generation + index))
        return os.open(path, os.O_RDONLY)

    def told() -> tuple[DescriptorServer, Description]:
        server = DescriptorServer(chunk, 43, 1, 5.0)
        kept = Allocation(1 << 41, 2 * CHUNK, "", (CHUNK,) * 2, False, (1, 2))
        sleeping = Allocation(1 << 42, 41 * CHUNK, "", (CHUNK,) * 41, True)
        return server, Description("another", "GPU-0", 5.0, (kept, sleeping), server.address, server.token)

    server, description = told()
    imported = ImportedMemory(description, DEVICE, 5.0)
    server.close()
    bases = list(imported.bases)
    kept = {(1 << 40) + i * CHUNK: i for i in range(2)}
    for generation in (1, 2):
        imported.release()
        assert rows.mapped == kept
        server, description = told()
        imported.map_again(description)
        server.close()
        sleeping = {(2 << 40) + i * CHUNK: 100 * generation + 2 + i for i in range(41)}
        assert rows.mapped == kept | sleeping
        assert imported.bases == bases
    imported.release()
    imported.close()
    assert (rows.mapped, rows.reserved) == ({}, 0)


@pytest.mark.usefixtures("on_a_gpu")
def test_lent_memory_that_does_not_come_back_leaves_nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    monkeypatch.setattr(mapping, "call", rows)
    server = DescriptorServer(lambda i: os.open(os.devnull, os.O_RDONLY), 3, 1, 5.0)
    sleeping = Allocation(1 << 42, 3 * CHUNK, "", (CHUNK,) * 3, True)
    description = Description("another", "GPU-0", 5.0, (sleeping,), server.address, server.token)
    imported = ImportedMemory(description, DEVICE, 5.0)
    imported.release()
    server.close()
    with pytest.raises(TransportUnavailable, match="can't be opened"):
        imported.map_again(description)
    assert (rows.mapped, rows.reserved) == ({}, 0)


class Allocator:
    """What torch's says of itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *segments: tuple[int, int]):
        self.returned = 5
        monkeypatch.setattr(
            torch.cuda,
            "memory_stats_as_nested_dict",
            lambda device: {"reserved_bytes": {"all": {"freed": self.returned}}},
        )
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        rows = [{"address": start, "total_size": size, "device": 0} for start, size in segments]
        rows.append({"address": 1 << 30, "total_size": 1 << 20, "device": 1})
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: rows)


def test_memory_is_there_still_as_long_as_torchs_allocator_has_given_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Allocator(monkeypatch, (1000, 500), (4000, 100))
    weights = DeviceMemory(torch.device("cuda", 0), lambda: [(1000, 500), (4050, 50), (9, 0)])
    assert weights.still_mapped()
    allocator.returned += 1
    assert not weights.still_mapped()
    weights.confirm_unmoved()
    assert weights.still_mapped()


@pytest.mark.parametrize("place", [(999, 2), (1400, 101), (2000, 1), (1 << 30, 8)])
def test_memory_that_is_not_torchs_alone_is_never_taken_for_there(
    monkeypatch: pytest.MonkeyPatch, place: tuple[int, int]
) -> None:
    Allocator(monkeypatch, (1000, 500), (4000, 100))
    assert not DeviceMemory(torch.device("cuda", 0), lambda: [(1000, 10), place]).still_mapped()
