"""Parameters in host memory beside a GPU: what kernels can read, and copies of what they can't.

Kernels read page-locked host memory through its own address (CUDA's unified addressing), so the segment tables
serve it as they serve the device's own memory. A kernel that reads pageable memory faults, so the host copies
that to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import RefitError


def kernels_read(view: torch.Tensor) -> bool:
    """Whether kernels reach a view through its address: device memory, or page-locked from its first to its last byte."""
    if view.device.type != "cpu" or not view.numel():
        return True
    return view.is_pinned() and view[(-1,) * view.dim()].is_pinned()


def copied_by_host(device: torch.device, view: torch.Tensor) -> bool:
    """Whether the host has to copy a view to ``device``, whose kernels don't reach it."""
    return device.type == "cuda" and not kernels_read(view)


class WeakView:
    """A view of a storage that is not kept: its owner may free it, or move a parameter elsewhere."""

    def __init__(self, view: torch.Tensor):
        self._storage = StorageWeakRef(view.untyped_storage())
        self._place = view.dtype, view.storage_offset(), view.shape, view.stride()
        self._device = view.device

    def expired(self) -> bool:
        """Whether the storage is gone."""
        return bool(self._storage.expired())

    def view(self) -> torch.Tensor:
        """The view, for as long as the caller needs it.

        Raises:
            RefitError: the memory was freed.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        dtype, offset, shape, strides = self._place
        if storage is None:
            raise RefitError(
                f"memory of a {dtype}{list(shape)} weight was freed after the refit had begun; it can't be sent. Leave "
                "parameters where they are until the refit has returned",
                stage="pack",
            )
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, offset, shape, strides)


class CopiesByHost:
    """Copies from pageable host memory to a device, one call for each.

    The sources are not kept. Otherwise parameters that are loaded and offloaded again would keep their old memory beside
    the new one. ``launch`` reads them before it returns. It may hold up its caller, without a limit of time, until
    the device has done what was enqueued on the current stream before; wait for that first.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        self._copies = [(WeakView(source), target) for source, target in pairs]
        self.nbytes = sum(source.nbytes for source, _ in pairs)

    def launch(self) -> None:
        """Do the copies, in the order of the current stream.

        Raises:
            RefitError: the memory of a source was freed.
        """
        for source, target in self._copies:
            target.copy_(source.view(), non_blocking=True)
