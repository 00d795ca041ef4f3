"""Copies and checksums of tensors on any device, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .checksum import ChecksumViews
from .strided import Strided
from .tables import ChecksumTable, CopyTable


class Copy(Protocol):
    """Prepared copies; ``nbytes`` of them altogether."""

    nbytes: int

    def launch(self) -> None:
        """Do the copies; on a GPU, enqueue them on the current stream."""


class Checksums(Protocol):
    """Prepared checksums of ``nbytes`` altogether."""

    nbytes: int

    def compute(self, out: torch.Tensor) -> None:
        """Set ``out`` (int64, ``[2]`` or ``[slots, 2]``) to the checksums."""

    def add_to(self, out: torch.Tensor) -> None:
        """Add the checksums to ``out``, modulo 2^64."""


class PairedViews:
    """Copies between CPU tensors."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        self._sources = [source for source, _ in pairs]
        self._targets = [target for _, target in pairs]
        self.nbytes = sum(source.nbytes for source in self._sources)

    def launch(self) -> None:
        """Do the copies."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def make_copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> Copy:
    """Copies from the first to the second tensor of each pair, in any order.

    The tensors must stay where they are as long as the copies are used.

    Raises:
        ValueError: the tensors of a pair differ in shape or dtype.
    """
    for source, target in pairs:
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(
                f"{source.dtype}{list(source.shape)} can't be copied to {target.dtype}{list(target.shape)} as bytes"
            )
    if device.type == "cuda":
        return CopyTable.build(((Strided.of(source), Strided.of(target)) for source, target in pairs), device)
    return PairedViews(pairs)


def make_checksums(
    views: Sequence[tuple[torch.Tensor, int]], device: torch.device, slots: Sequence[int] | None = None
) -> Checksums:
    """Checksums of messages from the live views of their segments, with the segments' byte offsets.

    Args:
        views: (view, offset of its first element in its message).
        device: of the views.
        slots: for each view the row of the result that its message has; all 0 if left out.
    """
    if device.type == "cuda":
        return ChecksumTable.build([(Strided.of(view), offset) for view, offset in views], device, slots)
    return ChecksumViews(views, slots)
