"""Parameters in host memory, made readable for a GPU: page-locked as long as a binding lasts."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..packing.host import kernels_read
from .ipc.driver import DriverError, call, driver, missing

logger = logging.getLogger(__name__)

# Memory that a device may read for ever.
_LEFT: list[torch.UntypedStorage] = []


class HostMemory:
    """The host memory that some views lie in.

    Memory that its owner page-locked is left alone and not kept; :meth:`moved` tells when it has been freed. Pageable
    memory is registered with the driver, and kept until :meth:`close`: registered memory that is freed and allocated
    again has other pages at its address than those that the GPU reads.
    """

    def __init__(self, views: Iterable[torch.Tensor], device: torch.device):
        """Register what is pageable; what the driver refuses stays so, and is told in the log.

        Args:
            views: of any memory.
            device: that is to read them; nothing is done for a CPU.
        """
        self._device = device
        self._registered: list[int] = []
        self._kept: list[torch.UntypedStorage] = []
        self._watched: list[StorageWeakRef] = []
        if device.type != "cuda":
            return
        pageable = []
        for storage in _storages(views):
            if kernels_read(_bytes_of(storage)):
                self._watched.append(StorageWeakRef(storage))
            else:
                pageable.append(storage)
        self._register(pageable)

    @property
    def locked_here(self) -> bool:
        """Whether any of it is page-locked only as long as this is open."""
        return bool(self._registered)

    def moved(self) -> bool:
        """Whether page-locked memory has been freed, so that anything may lie at its addresses."""
        return any(reference.expired() for reference in self._watched)

    def close(self, *, idle: bool = True) -> None:
        """Let go of all memory; safe to call twice.

        Args:
            idle: whether nothing on the device reads it any more; otherwise it is kept until the process ends, since
                the device would read other pages, or none.
        """
        if not idle and self._registered:
            logger.warning(
                "a failed refit still reads host memory; it stays page-locked until the process ends"
            )
            _LEFT.extend(self._kept)
            self._registered = []
        if self._registered:
            with torch.cuda.device(self._device):
                while self._registered:
                    _unregister(self._registered.pop())
        self._kept, self._watched = [], []

    def _register(self, storages: Sequence[torch.UntypedStorage]) -> None:
        if not storages:
            return
        ranges = page_ranges([(storage.data_ptr(), storage.nbytes()) for storage in storages])
        reason, refused = missing(), 0
        if reason:
            refused, ranges = sum(stop - start for start, stop in ranges), []
        self._kept = list(storages)
        with torch.cuda.device(self._device):
            for start, stop in ranges:
                try:
                    call("cuMemHostRegister", start, stop - start, driver().CU_MEMHOSTREGISTER_PORTABLE)
                    self._registered.append(start)
                except DriverError as error:
                    reason, refused = str(error), refused + stop - start
        if refused:
            logger.warning(
                "%.1f MB of parameters in host memory can't be page-locked for the GPU (%s); the host copies them to it "
                "in every refit, which is slower. Offload to pinned memory",
                refused / 1e6,
                reason,
            )


def page_ranges(ranges: Iterable[tuple[int, int]], page: int = mmap.PAGESIZE) -> list[tuple[int, int]]:
    """The pages that (address, bytes) ranges lie in, as (start, stop) addresses, ascending; those that share one joined.

    Pages are locked as a whole, and none twice: small parameters share them.
    """
    found: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        start, stop = address // page * page, -(-(address + nbytes) // page) * page
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _storages(views: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The host storages behind views, each once."""
    found = {
        storage.data_ptr(): storage
        for view in views
        if view.device.type == "cpu" and (storage := view.untyped_storage()).nbytes()
    }
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _unregister(start: int) -> None:
    try:
        call("cuMemHostUnregister", start)
    except DriverError as error:
        # The context is lost; what lost it has been raised where it happened.
        logger.warning("host memory was not given back by the driver: %s", error)
