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
from rlrefit.integration.transport.ipc import memory
from rlrefit.integration.transport.ipc.description import Allocation, Description
from rlrefit.integration.transport.ipc.descriptors import DescriptorServer
from rlrefit.integration.transport.ipc.driver import DriverError, driver
from rlrefit.integration.transport.ipc.memory import ExportedMemory, ImportedMemory, process_name
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
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


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
    monkeypatch.setattr(memory, "call", driver)
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

    def __call__(self, function: str, *args: Any) -> Any:
        if function == "cuMemRelease":
            return self.retained.remove(args[0])
        if function == "cuMemExportToShareableHandle":
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
