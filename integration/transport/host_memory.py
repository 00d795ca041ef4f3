"""Whether the memory is still there that parameters were bound in: the host's beside a GPU, and the GPU's own.

Parameters in host memory are page-locked, and a GPU's kernels read them at their own addresses, or pageable. Pageable memory is not registered with the driver to the same end: pages are locked as a whole, the first and last ones
hold other tensors' bytes as well, and CUDA refuses to copy a tensor that lies in registered memory only in part. The
host pushes it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..packing.host import kernels_read

logger = logging.getLogger(__name__)


class HostMemory:
    """Watches the host memory that some views lie in beside a GPU; it stays its owner's and is not kept."""

    def __init__(self, views: Iterable[torch.Tensor], device: torch.device):
        """
        Args:
            views: of any memory.
            device: that is to read them; nothing is watched for a CPU.
        """
        self._watched: list[StorageWeakRef] = []
        if device.type != "cuda":
            return
        pageable = 0
        for storage in _storages(views):
            self._watched.append(StorageWeakRef(storage))
            if not kernels_read(torch.empty(0, dtype=torch.uint8).set_(storage)):
                pageable += storage.nbytes()
        if pageable:
            logger.info(
                "%.1f MB of parameters lie in pageable host memory: the host copies them to the GPU bucket by bucket; "
                "pinned memory is read by the GPU itself",
                pageable / 1e6,
            )

    def moved(self) -> bool:
        """Whether some of it has been freed, so that anything may lie at its addresses, or nothing."""
        return any(reference.expired() for reference in self._watched)


class DeviceMemory:
    """Tells whether a GPU's memory is mapped still where it was, without keeping it.

    torch's allocator keeps what is freed, mapped as it was, until it gives it back to the driver, and it counts what it
    has given back. While that count stands still, whatever lay in its memory can be read where it lay.
    """

    def __init__(self, device: torch.device, ranges: Callable[[], Iterable[tuple[int, int]]]):
        """
        Args:
            device: a CUDA device.
            ranges: gives (address, bytes) of what lies there from now on; called once at most, and later.
        """
        self._device = device
        self._ranges = ranges
        self._seen = self._returned = self._bytes_returned()
        self._is_torchs: bool | None = None

    def still_mapped(self) -> bool:
        """Whether it surely is. No, where memory is not of torch's own allocator, or may have been given back."""
        self._seen = self._bytes_returned()
        if self._seen != self._returned:
            return False
        if self._is_torchs is None:
            self._is_torchs = self._held_by_torch(self._ranges())
        return self._is_torchs

    def found_again(self) -> None:
        """A look at it has told that it is where it was, after :meth:`still_mapped` could not."""
        self._returned = self._seen

    def _bytes_returned(self) -> int:
        found: int = torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]["freed"]
        return found

    def _held_by_torch(self, ranges: Iterable[tuple[int, int]]) -> bool:
        if torch.cuda.get_allocator_backend() != "native":
            return False
        held = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(include_traces=False)
            if segment["device"] == self._device.index
        )
        starts = [start for start, _ in held]

        def inside(address: int, nbytes: int) -> bool:
            place = bisect_right(starts, address) - 1
            return place >= 0 and address + nbytes <= held[place][1]

        return all(inside(address, nbytes) for address, nbytes in ranges if nbytes)


def _storages(views: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The host storages behind views, each once."""
    found = {
        storage.data_ptr(): storage
        for view in views
        if view.device.type == "cpu" and (storage := view.untyped_storage()).nbytes()
    }
    return list(found.values())
