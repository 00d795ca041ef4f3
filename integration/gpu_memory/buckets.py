"""Buckets in GPU memory that a peer maps. They do not depend on the process's allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RefitMismatch, TransportUnavailable
from .description import Description, Place
from .driver import call, on_device
from .mapping import ImportedMemory
from .memory import ExportedMemory, device_uuid, process_name

# The driver cuts smaller allocations out of a common block, and a peer would map the whole block.
_BLOCK_BYTES = 2 << 20


@dataclass(frozen=True)
class ToldBuckets:
    """What a peer needs to map :class:`OwnBuckets`: the memory, by :class:`.description.Description`, and their place in it.

    ``refused``: why there are none; empty if there are.
    """

    memory: object
    offset: int
    refused: str = ""

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ValueError(f"buckets at byte {self.offset} of their memory")


class OwnBuckets:
    """Memory of this process that one peer fills.

    The driver allocates it: torch's allocator may give memory of a pool whose chunks can't be exported.

    Attributes:
        address: of the first byte.
        told: to the peer.
    """

    def __init__(self, nbytes: int, device: torch.device, timeout_s: float):
        """
        Args:
            nbytes: at least.
            device: a CUDA device.
            timeout_s: told to the peer.

        Raises:
            DriverError: no memory is left.
            TransportUnavailable: the device's memory can't be exported.
        """
        self._device = device
        with on_device(device):
            self._pointer: Any = call("cuMemAlloc", -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        self.address = int(self._pointer)
        try:
            exported = ExportedMemory([(self.address, nbytes)], device)
        except BaseException:
            self.close()
            raise
        memory = Description(process_name(), device_uuid(device), timeout_s, exported.allocations)
        self.told = ToldBuckets(memory.to_json(), exported.place(self.address).offset)

    def close(self) -> None:
        """Free the memory, which no work on the device may use any more. Safe to call twice."""
        if self._pointer is not None:
            with on_device(self._device):
                call("cuMemFree", self._pointer)
            self._pointer = None


class PeerBuckets:
    """A peer's :class:`OwnBuckets`, mapped into this process.

    Attributes:
        address: of the first byte.
    """

    def __init__(self, told: ToldBuckets, nbytes: int, peer: int, device: torch.device, timeout_s: float):
        """
        Args:
            told: by the peer; nothing in it is trusted.
            nbytes: that this rank will use.
            peer: of the group.
            device: that will use them.
            timeout_s: limit of waiting for the peer.

        Raises:
            RefitMismatch: the peer told something else.
            TransportUnavailable: they can't be opened from here, or there are none.
        """
        if told.refused:
            raise TransportUnavailable(told.refused)
        description = Description.from_json(told.memory, peer)
        self._mapped = ImportedMemory(description, device, timeout_s)
        try:
            if len(description.allocations) != 1:
                raise ValueError("not one piece of memory")
            self.address = description.region(Place(0, told.offset), nbytes, self._mapped.bases)
        except ValueError as error:
            self._mapped.close()
            raise RefitMismatch(
                f"group rank {peer} shares other memory than this rank needs ({error}); nothing was written. Do all ranks "
                "run the same rlrefit?",
                stage="process group",
            ) from error

    def close(self) -> None:
        """Unmap them. No work on the device may use them any more. Safe to call twice."""
        self._mapped.close()
