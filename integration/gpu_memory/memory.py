"""Exports device memory to other processes of the host.

Memory of ``cudaMalloc`` has a classic IPC handle, which is plain data. Memory of virtual-memory pools (torch's expandable
segments) consists of chunks. Each chunk is exported as a file descriptor, and the importer maps all of them one after another.
That works if the pool asked for it when it made the chunk. Pools that did not (torch_memory_saver; vLLM's sleep mode where the
driver has no such handles) can't be exported; :class:`TransportUnavailable` says why.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..errors import TransportUnavailable, end_all
from .description import HANDLE_HEX, Allocation, Place
from .descriptors import DescriptorServer
from .driver import DriverError, call, driver, on_device

logger = logging.getLogger(__name__)

_TOKEN = secrets.token_hex(16)


@dataclass(frozen=True)
class _Block:
    """Memory that the driver allocated or mapped as a whole. Without a handle it is a chunk.

    ``identity`` differs from that of any other memory at the same address. It is the driver's number of the allocation,
    which is never used again, or the chunk's handle, which is not used again while it is retained here. ``sleeps``: its
    owner gives it back to the driver between refits.
    """

    base: int
    size: int
    handle: str
    identity: int
    sleeps: bool


class ExportedMemory:
    """The allocations that contain given memory of this process.

    Attributes:
        allocations: in ascending order of their bases. Adjacent chunks are one allocation.
    """

    def __init__(
        self, ranges: Iterable[tuple[int, int]], device: torch.device, sleeps: Iterable[tuple[int, int]] = ()
    ):
        """Look them up.

        Args:
            ranges: (address, bytes) of memory on ``device``.
            device: a CUDA device.
            sleeps: more such memory, which its owner gives back to the driver between refits.

        Raises:
            TransportUnavailable: some memory can't be exported; says why.
        """
        self._device = device
        self._server: DescriptorServer | None = None
        self._blocks: list[_Block] = []
        self._released = False
        try:
            with on_device(device):
                # Memory that sleeps comes first: a block with both kinds sleeps as a whole.
                self._look_up(sleeps, sleeps=True)
                kept = sorted(ranges)
                self._look_up(kept, sleeps=False)
            self._mark_whole(kept)
        except BaseException:
            self.close()
            raise
        self._describe()

    def place(self, address: int) -> Place:
        """Where an address of the ranges lies."""
        index = bisect_right(self._bases, address) - 1
        return Place(index, address - self._bases[index])

    def serve(self, readers: int, timeout_s: float) -> tuple[str, str]:
        """Serve the chunks' descriptors to ``readers`` processes. Returns the address and token; empty if there are no chunks."""
        if not self._chunks or not readers:
            return "", ""
        self._server = DescriptorServer(self._open_chunk, len(self._chunks), readers, timeout_s)
        return self._server.address, self._server.token

    def moved(self) -> bool:
        """Whether other memory now lies at the same addresses, or none.

        That happens if ``empty_cache`` is called between freeing and allocating again, and if a pool unmaps its chunks and
        maps new ones. No address changes then, but peers have the old memory mapped.
        """
        with on_device(self._device):
            return self._released or not all(_is_there(block) for block in self._blocks)

    def release(self) -> None:
        """Stop serving, and release memory that sleeps, so that its owner can give it back."""
        self._stop()
        self._released = True
        with on_device(self._device):
            for block in self._blocks:
                if block.sleeps:
                    _let_go(block)

    def find_again(self) -> bool:
        """After :meth:`release`: whether memory of the same kinds and sizes lies where the sleeping was, and all other memory is
        unchanged. If not, the caller looks everything up anew."""
        before, self._blocks = self._blocks, [block for block in self._blocks if not block.sleeps]
        self._released = False
        with on_device(self._device):
            if not all(_is_there(block) for block in self._blocks):
                return False
            for old in before:
                if not old.sleeps:
                    continue
                with _shareable():
                    found = _block(*_extent_at(old.base), sleeps=True, known=True)
                self._blocks.append(found)
                # Other memory has another handle, which the next description brings.
                if (found.base, found.size, bool(found.handle)) != (old.base, old.size, bool(old.handle)):
                    return False
        self._describe()
        return True

    def close(self) -> None:
        """Stop serving; safe to call twice. What peers have mapped stays mapped."""
        blocks, self._blocks = self._blocks, []
        kept = [block for block in blocks if not (self._released and block.sleeps)]
        with on_device(self._device):
            end_all([self._stop, *(partial(_let_go, block) for block in kept)])

    def _look_up(self, ranges: Iterable[tuple[int, int]], *, sleeps: bool) -> None:
        known = {block.base: block.size for block in self._blocks}
        covered = 0
        for address, nbytes in sorted(ranges):
            at = max(address, covered)
            while at < address + nbytes:
                with _shareable():
                    base, size = _extent_at(at)
                    if base not in known:
                        self._blocks.append(_block(base, size, sleeps=sleeps, known=bool(known)))
                        known[base] = size
                covered = at = base + size

    def _mark_whole(self, ranges: Iterable[tuple[int, int]]) -> None:
        """A range that sleeps in part sleeps as a whole, since peers map it as one."""
        for address, nbytes in ranges:
            held = [
                i
                for i, b in enumerate(self._blocks)
                if b.base < address + nbytes and address < b.base + b.size
            ]
            if any(self._blocks[i].sleeps for i in held):
                for i in held:
                    self._blocks[i] = replace(self._blocks[i], sleeps=True)

    def _describe(self) -> None:
        self._blocks.sort(key=lambda block: block.base)
        self._chunks = [block.base for block in self._blocks if not block.handle]
        self.allocations = _joined(self._blocks)
        self._bases = [a.base for a in self.allocations]

    def _open_chunk(self, index: int) -> int:
        with on_device(self._device):
            return _chunk_descriptor(self._chunks[index])

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def process_name() -> str:
    """A name that no other process has. CUDA does not open memory handles in the process that made them."""
    # Made at each call, since a forked process inherits what was made at import.
    return f"{_TOKEN}-{os.getpid()}"


def device_uuid(device: torch.device) -> str:
    """The device's UUID, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _shareable() -> Iterator[None]:
    try:
        yield
    except DriverError as error:
        raise TransportUnavailable(
            f"the parameters' GPU memory can't be shared with other processes ({error}): it comes from a pool that made "
            "it without shareable handles, as torch_memory_saver does, and vLLM's sleep mode on some hosts",
            stage="bind",
        ) from error


def _extent_at(address: int) -> tuple[int, int]:
    """First address and bytes of the block that holds an address."""
    base, size = call("cuMemGetAddressRange", address)
    return int(base), int(size)


def _block(base: int, size: int, *, sleeps: bool, known: bool) -> _Block:
    """The block at ``base``; the caller releases the identity of a chunk.

    Args:
        base: its first address.
        size: its bytes.
        sleeps: whether its owner gives it back to the driver between refits.
        known: whether another block could be exported, which shows that this host lets processes share memory.

    Raises:
        DriverError: it can't be exported.
    """
    attributes = driver().CUpointer_attribute
    if call("cuPointerGetAttribute", attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, base):
        handle = call("cuIpcGetMemHandle", base)
        shareable = ctypes.string_at(handle.getPtr(), HANDLE_HEX // 2).hex()
        return _Block(base, size, shareable, _buffer_id(base), sleeps)
    identity = _retained(base)
    try:
        # An attempt costs a millisecond, and a model has hundreds of chunks.
        if not (known and _has_descriptor(identity)):
            os.close(_chunk_descriptor(base))
    except BaseException:
        call("cuMemRelease", identity)
        raise
    return _Block(base, size, "", identity, sleeps)


def _has_descriptor(handle: int) -> bool:
    """Whether a chunk was made to be exported as a descriptor alone. For other chunks only an attempt shows it."""
    properties = call("cuMemGetAllocationPropertiesFromHandle", handle)
    return bool(properties.requestedHandleTypes == descriptor_type())


def _let_go(block: _Block) -> None:
    if block.handle:
        return
    try:
        call("cuMemRelease", block.identity)
    except DriverError as error:
        # The CUDA context is lost, and the chunk with it. The cause was raised where it happened.
        logger.warning("a chunk of GPU memory was not released: %s", error)


def _is_there(block: _Block) -> bool:
    try:
        if block.handle:
            return _buffer_id(block.base) == block.identity
        retained = _retained(block.base)
    except DriverError as error:
        # The driver returns this for addresses without memory. Other causes show again when memory is looked up anew.
        logger.debug("no memory at %#x any more: %s", block.base, error)
        return False
    call("cuMemRelease", retained)
    return retained == block.identity


def _buffer_id(base: int) -> int:
    return int(
        call("cuPointerGetAttribute", driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, base)
    )


def _retained(base: int) -> int:
    """The handle with which the chunk at ``base`` was mapped. The caller has to release it."""
    return int(call("cuMemRetainAllocationHandle", base))


def _chunk_descriptor(base: int) -> int:
    """A new file descriptor of the chunk that is mapped at ``base``."""
    handle = _retained(base)
    try:
        return int(call("cuMemExportToShareableHandle", handle, descriptor_type(), 0))
    finally:
        call("cuMemRelease", handle)


def descriptor_type() -> object:
    """The handle type of chunks for other processes: file descriptors."""
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _joined(blocks: Sequence[_Block]) -> tuple[Allocation, ...]:
    """Allocations of blocks in ascending order. Adjacent chunks become one."""
    found: list[Allocation] = []
    for block in blocks:
        last = found[-1] if found else None
        # Memory that sleeps is other memory each time it wakes, so it has no identity.
        identity = () if block.sleeps else (block.identity,)
        if block.handle:
            found.append(Allocation(block.base, block.size, block.handle, (), block.sleeps, identity))
        elif last and last.chunks and last.sleeps == block.sleeps and last.base + last.size == block.base:
            found[-1] = replace(
                last,
                size=last.size + block.size,
                chunks=(*last.chunks, block.size),
                identity=(*last.identity, *identity),
            )
        else:
            found.append(Allocation(block.base, block.size, "", (block.size,), block.sleeps, identity))
    return tuple(found)
