"""Memory that an engine gives back between refits, at the same addresses: as vLLM's sleep mode does it.

By the driver's virtual-memory interface, in chunks as torch's allocator would ask for: a large tensor has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...integration.gpu_memory.driver import call, driver, on_device

# Of torch's allocator: chunks are multiples of this, tensors below LARGE share chunks of SHARED bytes.
_GRANULE = 2 << 20
_LARGE = 10 << 20
_SHARED = 20 << 20
_ALIGNED = 512


class SleepingMemory:
    """Memory for tensors, mapped or not.

    Args:
        sizes: bytes of each tensor.
        device: a CUDA device.
        shareable: whether other processes can map it. torch_memory_saver's they can't.

    Attributes:
        addresses: of each tensor; they never change.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, *, shareable: bool = True):
        self._device = device
        self._shareable = shareable
        chunks, places = arrange(sizes)
        # One reservation: chunks that follow each other in it can be mapped by peers in one row.
        with on_device(device):
            start = int(call("cuMemAddressReserve", sum(chunks), 0, 0, 0))
        self._chunks: list[tuple[int, int]] = []
        at = start
        for size in chunks:
            self._chunks.append((at, size))
            at += size
        self.addresses = [self._chunks[chunk][0] + offset for chunk, offset in places]
        self.wake()

    def sleep(self) -> None:
        """Give the memory back; nothing on the device may use it any more."""
        with on_device(self._device):
            for address, size in self._chunks:
                call("cuMemUnmap", address, size)

    def wake(self) -> None:
        """Have memory again, with whatever it holds."""
        wanted = driver().CUmemAllocationProp()
        wanted.type = driver().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self._device.index
        if self._shareable:
            wanted.requestedHandleTypes = (
                driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            )
        access = driver().CUmemAccessDesc()
        access.location = wanted.location
        access.flags = driver().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with on_device(self._device):
            for address, size in self._chunks:
                handle = call("cuMemCreate", size, wanted, 0)
                call("cuMemMap", address, size, 0, handle, 0)
                call("cuMemSetAccess", address, size, [access], 1)
                # The mapping keeps the memory.
                call("cuMemRelease", handle)

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The memory of tensor ``index``; it stays this object's."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        flat = torch.as_tensor(_Bytes(self.addresses[index], nbytes), device=self._device)
        return flat.view(dtype).view(*shape)


@dataclass(frozen=True)
class _Bytes:
    """GPU memory as other libraries are told of it."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def arrange(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Chunks for tensors of some sizes in bytes, and each tensor's chunk and offset in it."""
    chunks: list[int] = []
    places: list[tuple[int, int]] = []
    shared, used = -1, _SHARED
    for size in sizes:
        if size >= _LARGE:
            places.append((len(chunks), 0))
            chunks.append(-(-size // _GRANULE) * _GRANULE)
            continue
        if used + size > _SHARED:
            shared, used = len(chunks), 0
            chunks.append(_SHARED)
        places.append((shared, used))
        used += -(-size // _ALIGNED) * _ALIGNED
    return chunks, places
