"""Parameters in host memory: page-locked, which a GPU's kernels read at its own address, or pageable.

Pageable memory is not registered with the driver to the same end: pages are locked as a whole, the first and last ones
hold other tensors' bytes as well, and CUDA refuses to copy a tensor that lies in registered memory only in part. The
host pushes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

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


def _storages(views: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The host storages behind views, each once."""
    found = {
        storage.data_ptr(): storage
        for view in views
        if view.device.type == "cpu" and (storage := view.untyped_storage()).nbytes()
    }
    return list(found.values())
