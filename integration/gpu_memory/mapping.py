"""Device memory of other processes of the host, mapped into this one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from ..errors import TransportUnavailable, end_all
from ..packing import Strided
from .description import HANDLE_HEX, Allocation, Description
from .descriptors import fetch
from .driver import DriverError, call, driver, on_device
from .memory import descriptor_type, device_uuid, process_name


class _Classic:
    """An allocation that is opened by its classic IPC handle; the driver chooses at which address."""

    def __init__(self, allocation: Allocation):
        self._pointer: Any = None
        self.base = self.open(allocation)

    def open(self, allocation: Allocation) -> int:
        handle = driver().CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), bytes.fromhex(allocation.handle), HANDLE_HEX // 2)
        lazily = driver().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self._pointer = call("cuIpcOpenMemHandle", handle, lazily.value)
        return int(self._pointer)

    def close(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            call("cuIpcCloseMemHandle", pointer)


class _Row:
    """A range of reserved addresses for the chunks of an allocation, and the chunks that are mapped there."""

    def __init__(self, allocation: Allocation, device: int):
        self._allocation = allocation
        self._device = device
        self._start = call("cuMemAddressReserve", allocation.size, 0, 0, 0)
        self.base = int(self._start)
        self._mapped: list[tuple[int, int]] = []

    def map(self, descriptors: Iterator[int]) -> None:
        at = self.base
        for size in self._allocation.chunks:
            self._map_chunk(at, size, next(descriptors))
            at += size
        access = driver().CUmemAccessDesc()
        access.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", self._start, self._allocation.size, [access], 1)

    def unmap(self) -> None:
        while self._mapped:
            call("cuMemUnmap", *self._mapped.pop())

    def close(self) -> None:
        self.unmap()
        call("cuMemAddressFree", self._start, self._allocation.size)

    def _map_chunk(self, address: int, size: int, descriptor: int) -> None:
        try:
            handle = call("cuMemImportFromShareableHandle", descriptor, descriptor_type())
        finally:
            os.close(descriptor)
        try:
            call("cuMemMap", address, size, 0, handle, 0)
        finally:
            # The mapping keeps the memory alive.
            call("cuMemRelease", handle)
        self._mapped.append((address, size))


class ImportedMemory:
    """A peer's allocations, mapped into this process.

    Attributes:
        bases: address of each of the description's allocations.
        opened: how many handles and descriptors of the peer's were opened so far.
    """

    def __init__(self, description: Description, device: torch.device, timeout_s: float):
        """Map them.

        Args:
            description: of the peer.
            device: that will use them.
            timeout_s: limit of waiting for the peer's descriptors.

        Raises:
            TransportUnavailable: they can't be opened from here; says why.
        """
        self.bases: list[int] = []
        self.opened = 0
        self._open: list[_Classic | _Row] = []
        # Memory that sleeps: chunks, each with the number of its first one over all allocations, and how many it has; and what is
        # opened by a handle, with the allocation's number.
        self._sleeping: list[tuple[_Row, tuple[int, int]]] = []
        self._sleeping_handles: list[tuple[_Classic, int]] = []
        self._device = device
        self._timeout = timeout_s
        if description.process == process_name():
            # The peer is a thread of this process, so its memory is mapped already.
            if description.device != device_uuid(device):
                raise TransportUnavailable(
                    "one process drives both GPUs, and ipc joins processes", stage="connect"
                )
            self.bases = [a.base for a in description.allocations]
            return
        with self._opening():
            rows: list[tuple[_Row, tuple[int, int]]] = []
            first = 0
            for number, allocation in enumerate(description.allocations):
                if allocation.handle:
                    classic = _Classic(allocation)
                    self.opened += 1
                    self._open.append(classic)
                    self._sleeping_handles += [(classic, number)] if allocation.sleeps else []
                else:
                    row = _Row(allocation, self._device.index)
                    self._open.append(row)
                    rows.append((row, (first, len(allocation.chunks))))
                    self._sleeping += rows[-1:] if allocation.sleeps else []
                    first += len(allocation.chunks)
                self.bases.append(self._open[-1].base)
            self._fill(rows, description)

    def release(self) -> None:
        """Unmap memory that sleeps. No work on the device may use it until it is mapped again. Its addresses stay reserved."""
        with on_device(self._device):
            for row, _ in self._sleeping:
                row.unmap()
            for classic, _ in self._sleeping_handles:
                classic.close()

    def map_again(self, description: Description) -> bool:
        """After :meth:`release`: map memory that sleeps at the same addresses.

        Args:
            description: of the same places as the first (:meth:`.description.Description.same_places`).

        Returns:
            Whether all of it is there. The driver may open a handle at another address than before; then the caller has to close
            this and map everything anew.

        Raises:
            TransportUnavailable: it can't be mapped; everything is closed then.
        """
        with self._opening():
            for classic, number in self._sleeping_handles:
                self.opened += 1
                if classic.open(description.allocations[number]) != classic.base:
                    return False
            self._fill(self._sleeping, description)
        return True

    def close(self) -> None:
        """Unmap everything. No work on the device may use it any more. Safe to call twice."""
        self._sleeping, self._sleeping_handles = [], []
        opened, self._open = self._open, []
        with on_device(self._device):
            end_all(one.close for one in reversed(opened))

    def _fill(self, rows: Sequence[tuple[_Row, tuple[int, int]]], description: Description) -> None:
        spans = [span for _, span in rows]
        # Descriptors come in batches. Unused ones of the last batch must not stay open.
        with closing(fetch(description.address, description.token, spans, self._timeout)) as descriptors:
            for row, (_, chunks) in rows:
                row.map(descriptors)
                self.opened += chunks

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            with on_device(self._device):
                yield
        except (DriverError, OSError) as error:
            end_all([self.close], error)
            raise TransportUnavailable(
                f"a peer's GPU memory can't be opened ({error}). The processes must share the host, its IPC and network "
                "namespaces and the user, and their GPUs must reach each other",
                stage="connect",
            ) from error


def tensor_at(memory: Strided, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor over memory that is mapped into this process, for kernels that take addresses: torch takes it for memory of
    ``device``, and keeps nothing of it.

    Raises:
        ValueError: its places are no whole elements of ``dtype``.
    """
    if memory.itemsize != dtype.itemsize or any(stride % dtype.itemsize for stride in memory.strides):
        raise ValueError(
            f"items of {memory.itemsize} bytes at strides {memory.strides} are no elements of {dtype}"
        )
    storage = torch._C._construct_storage_from_data_pointer(memory.address, device, memory.extent)
    strides = tuple(stride // dtype.itemsize for stride in memory.strides)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, memory.shape, strides)
