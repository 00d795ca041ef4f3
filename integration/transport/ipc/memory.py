"""Device memory for other processes of the host: what an exporter offers, and what an importer maps.

Memory of ``cudaMalloc`` has a classic IPC handle, which is plain data. Memory of virtual-memory pools (torch's
expandable segments) is made of chunks; each is exported as a file descriptor, if its pool asked for that when it
made the chunk, and the importer maps all of them in one row. Pools that did not
(torch_memory_saver; vLLM's sleep mode where the driver offers it no handles) can't be exported at all, and the reason is raised as :class:`TransportUnavailable`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from ...errors import TransportUnavailable
from .description import HANDLE_HEX, Allocation, Description, Place
from .descriptors import DescriptorServer, fetch
from .driver import DriverError, call, driver

logger = logging.getLogger(__name__)

_TOKEN = secrets.token_hex(16)


@dataclass(frozen=True)
class _Block:
    """Memory that the driver allocated or mapped as a whole; without a handle it is a chunk.

    ``identity`` tells it from other memory at the same address: the driver's number of the allocation, which is
    never used again, or the chunk's handle, which is not used again while it is retained here.
    """

    base: int
    size: int
    handle: str
    identity: int


class ExportedMemory:
    """The allocations that hold some memory of this process.

    Attributes:
        allocations: in ascending order of their bases; chunks that follow each other are one.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]], device: torch.device):
        """Look them up.

        Args:
            ranges: (address, bytes) of memory on ``device``.
            device: a CUDA device.

        Raises:
            TransportUnavailable: some memory can't be exported; says why.
        """
        self._device = device
        self._server: DescriptorServer | None = None
        self._blocks: list[_Block] = []
        try:
            with torch.cuda.device(device):
                covered = 0
                for address, nbytes in sorted(ranges):
                    at = max(address, covered)
                    while at < address + nbytes:
                        self._blocks.append(_block_at(at))
                        covered = at = self._blocks[-1].base + self._blocks[-1].size
        except BaseException:
            self.close()
            raise
        self._chunks = [block.base for block in self._blocks if not block.handle]
        self.allocations = _joined(self._blocks)
        self._bases = [a.base for a in self.allocations]

    def place(self, address: int) -> Place:
        """Where an address of the ranges lies."""
        index = bisect_right(self._bases, address) - 1
        return Place(index, address - self._bases[index])

    def serve(self, readers: int, timeout_s: float) -> tuple[str, str]:
        """Hand out the chunks' descriptors to ``readers`` processes; returns the address and token, empty if there are none."""
        if not self._chunks or not readers:
            return "", ""
        self._server = DescriptorServer(self._open_chunk, len(self._chunks), readers, timeout_s)
        return self._server.address, self._server.token

    def moved(self) -> bool:
        """Whether other memory than at first lies at the same addresses, or none at all.

        So it is after ``empty_cache`` between freeing and allocating again, and after a pool has unmapped its chunks
        and mapped new ones: no address changes, and peers have the old memory mapped.
        """
        with torch.cuda.device(self._device):
            return not all(_is_there(block) for block in self._blocks)

    def close(self) -> None:
        """Stop serving; safe to call twice. What peers have mapped stays mapped."""
        if self._server is not None:
            self._server.close()
            self._server = None
        with torch.cuda.device(self._device):
            while self._blocks:
                block = self._blocks.pop()
                if not block.handle:
                    _release(block)

    def _open_chunk(self, index: int) -> int:
        with torch.cuda.device(self._device):
            return _chunk_descriptor(self._chunks[index])


class ImportedMemory:
    """A peer's allocations, mapped into this process.

    Attributes:
        bases: address of each of the description's allocations.
    """

    def __init__(self, description: Description, device: torch.device, timeout_s: float):
        """Map them.

        Args:
            description: of the peer.
            device: from which they will be reached.
            timeout_s: limit of waiting for the peer's descriptors.

        Raises:
            TransportUnavailable: they can't be opened from here; says why.
        """
        self.bases: list[int] = []
        self._close: list[Callable[[], None]] = []
        self._device = device
        if description.process == process_name():
            # Rank threads of one process; their memory is here already.
            if description.device != device_uuid(device):
                raise TransportUnavailable(
                    "one process drives both GPUs, and ipc joins processes", stage="connect"
                )
            self.bases = [a.base for a in description.allocations]
            return
        count = sum(len(a.chunks) for a in description.allocations)
        # Descriptors come in batches; those of the last one that were not used must not stay open.
        descriptors = closing(fetch(description.address, description.token, count, timeout_s))
        try:
            with descriptors as following, torch.cuda.device(device):
                for allocation in description.allocations:
                    if allocation.handle:
                        self.bases.append(self._open_classic(allocation))
                    else:
                        self.bases.append(self._map_chunks(allocation, lambda: next(following)))
        except (DriverError, OSError) as error:
            self.close()
            raise TransportUnavailable(
                f"a peer's GPU memory can't be opened ({error}). The processes must share the host, its IPC and network "
                "namespaces and the user, and their GPUs must reach each other",
                stage="connect",
            ) from error

    def close(self) -> None:
        """Unmap everything; nothing on the device may use it any more. Safe to call twice."""
        with torch.cuda.device(self._device):
            while self._close:
                self._close.pop()()

    def _open_classic(self, allocation: Allocation) -> int:
        handle = driver().CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), bytes.fromhex(allocation.handle), HANDLE_HEX // 2)
        lazily = driver().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        pointer = call("cuIpcOpenMemHandle", handle, lazily.value)
        self._close.append(lambda: call("cuIpcCloseMemHandle", pointer))
        return int(pointer)

    def _map_chunks(self, allocation: Allocation, next_descriptor: Callable[[], int]) -> int:
        start = call("cuMemAddressReserve", allocation.size, 0, 0, 0)
        self._close.append(lambda: call("cuMemAddressFree", start, allocation.size))
        at = int(start)
        for size in allocation.chunks:
            self._map_chunk(at, size, next_descriptor())
            at += size
        access = driver().CUmemAccessDesc()
        access.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device.index
        access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", start, allocation.size, [access], 1)
        return int(start)

    def _map_chunk(self, address: int, size: int, descriptor: int) -> None:
        try:
            handle = call("cuMemImportFromShareableHandle", descriptor, _descriptor_type())
        finally:
            os.close(descriptor)
        try:
            call("cuMemMap", address, size, 0, handle, 0)
        finally:
            # The mapping keeps the memory.
            call("cuMemRelease", handle)
        self._close.append(lambda: call("cuMemUnmap", address, size))


def process_name() -> str:
    """Tells this process from all others: memory handles are not opened where they were made."""
    # Made anew at each use, since a forked process inherits all that was made at import.
    return f"{_TOKEN}-{os.getpid()}"


def device_uuid(device: torch.device) -> str:
    """The device's UUID, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _block_at(address: int) -> _Block:
    """The block that holds an address; the caller releases the identity of a chunk."""
    try:
        base, size = (int(value) for value in call("cuMemGetAddressRange", address))
        attributes = driver().CUpointer_attribute
        if call("cuPointerGetAttribute", attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, base):
            handle = call("cuIpcGetMemHandle", base)
            shareable = ctypes.string_at(handle.getPtr(), HANDLE_HEX // 2).hex()
            return _Block(base, size, shareable, _buffer_id(base))
        # Only an attempt tells whether the chunk can be exported.
        os.close(_chunk_descriptor(base))
        return _Block(base, size, "", _retained(base))
    except DriverError as error:
        raise TransportUnavailable(
            f"the parameters' GPU memory can't be shared with other processes ({error}): it comes from a pool that made "
            "it without shareable handles, as torch_memory_saver does, and vLLM's sleep mode on some hosts",
            stage="bind",
        ) from error


def _release(chunk: _Block) -> None:
    try:
        call("cuMemRelease", chunk.identity)
    except DriverError as error:
        # The context is lost, and the chunk with it; what lost it has been raised where it happened.
        logger.warning("a chunk of GPU memory was not released: %s", error)


def _is_there(block: _Block) -> bool:
    try:
        if block.handle:
            return _buffer_id(block.base) == block.identity
        retained = _retained(block.base)
    except DriverError as error:
        # So it says of addresses without memory. Any other trouble shows again when memory is looked up anew.
        logger.debug("no memory at %#x any more: %s", block.base, error)
        return False
    call("cuMemRelease", retained)
    return retained == block.identity


def _buffer_id(base: int) -> int:
    return int(
        call("cuPointerGetAttribute", driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, base)
    )


def _retained(base: int) -> int:
    """The handle of the chunk that is mapped at ``base``: the one it was mapped with, to be released once more."""
    return int(call("cuMemRetainAllocationHandle", base))


def _chunk_descriptor(base: int) -> int:
    """A new file descriptor of the chunk that is mapped at ``base``."""
    handle = _retained(base)
    try:
        return int(call("cuMemExportToShareableHandle", handle, _descriptor_type(), 0))
    finally:
        call("cuMemRelease", handle)


def _descriptor_type() -> object:
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _joined(blocks: Sequence[_Block]) -> tuple[Allocation, ...]:
    """Allocations of blocks in ascending order; chunks that follow each other become one."""
    found: list[Allocation] = []
    for block in blocks:
        last = found[-1] if found else None
        if block.handle:
            found.append(Allocation(block.base, block.size, block.handle))
        elif last is not None and last.chunks and last.base + last.size == block.base:
            found[-1] = Allocation(last.base, last.size + block.size, "", (*last.chunks, block.size))
        else:
            found.append(Allocation(block.base, block.size, "", (block.size,)))
    return tuple(found)
