"""Host-resident memory beside a GPU: what its kernels can read, and the way of what they can't.

Kernels read page-locked host memory through its own address (CUDA's unified addressing), so the segment tables
serve it as they serve the device's own memory. Pageable memory would fault; the host pushes it instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import RefitError


def kernels_read(view: torch.Tensor) -> bool:
    """Whether kernels reach a view through its address: device memory, or page-locked from its first to its last byte."""
    if view.device.type != "cpu" or not view.numel():
        return True
    return view.is_pinned() and view[(-1,) * view.dim()].is_pinned()


def pushed_to(device: torch.device, view: torch.Tensor) -> bool:
    """Whether the host has to push a view to ``device``, whose kernels don't reach it."""
    return device.type == "cuda" and not kernels_read(view)


class _Push(NamedTuple):
    """A view of a storage that is not kept, and where it goes."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    strides: tuple[int, ...]
    target: torch.Tensor


class PushedViews:
    """Copies from pageable host memory to a device, one call for each.

    The sources are not kept: parameters that are loaded and offloaded anew would else have their old memory beside
    the new one. ``launch`` reads them before it returns. It may hold up its caller, without a limit of time, until
    the device has done what was enqueued on the current stream before; wait for that first.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        self._pushes = [
            _Push(
                StorageWeakRef(source.untyped_storage()),
                source.dtype,
                source.storage_offset(),
                source.shape,
                source.stride(),
                target,
            )
            for source, target in pairs
        ]
        self.nbytes = sum(source.nbytes for source, _ in pairs)

    def launch(self) -> None:
        """Do the copies, in the order of the current stream.

        Raises:
            RefitError: the memory of a source was freed.
        """
        for push in self._pushes:
            storage = torch.UntypedStorage._new_with_weak_ptr(push.storage.cdata)
            if storage is None:
                raise RefitError(
                    f"host memory of a {push.dtype}{list(push.shape)} weight was freed after the refit had begun; it can't "
                    "be sent. Leave offloaded parameters where they are until the refit has returned",
                    stage="pack",
                )
            source = torch.empty(0, dtype=push.dtype).set_(storage, push.offset, push.shape, push.strides)
            push.target.copy_(source, non_blocking=True)
