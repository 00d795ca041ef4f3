"""Host-resident memory beside a GPU: what its kernels can read, and the way of what they can't.

Kernels read page-locked host memory through its own address (CUDA's unified addressing), so the segment tables
serve it as they serve the device's own memory. Pageable memory would fault; the host pushes it instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checksum import ChecksumViews


def kernels_read(view: torch.Tensor) -> bool:
    """Whether kernels reach a view through its address: device memory, or page-locked from its first to its last byte."""
    if view.device.type != "cpu" or not view.numel():
        return True
    return view.is_pinned() and view[(-1,) * view.dim()].is_pinned()


class PushedViews:
    """Copies from pageable host memory to a device, one call for each.

    ``launch`` reads the sources before it returns. It may hold up its caller, without a limit of time, until the
    device has done what was enqueued on the current stream before; wait for that first.
    """

    blocks = True

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        self._pairs = list(pairs)
        self.nbytes = sum(source.nbytes for source, _ in pairs)

    def launch(self) -> None:
        """Do the copies, in the order of the current stream."""
        for source, target in self._pairs:
            target.copy_(source, non_blocking=True)


class PushedChecksums:
    """Checksums of pageable host memory, computed by the host and added to sums on a device; it blocks as copies do."""

    def __init__(self, views: Sequence[tuple[torch.Tensor, int]], slots: Sequence[int]):
        self._views = ChecksumViews(views, slots)
        self._rows = max(slots) + 1
        self.nbytes = self._views.nbytes

    def compute(self, out: torch.Tensor) -> None:
        """Set ``out`` (int64, ``[2]`` or ``[slots, 2]``) to the checksums."""
        out.zero_()
        self.add_to(out)

    def add_to(self, out: torch.Tensor) -> None:
        """Add the checksums to ``out``."""
        sums = torch.zeros(self._rows, 2, dtype=torch.int64)
        self._views.add_to(sums)
        out.view(-1, 2)[: self._rows] += sums.to(out.device)
