"""Copies and checksums of tensors on any device, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .checksum import ChecksumViews
from .encoded import EncodedView, make_encoders
from .host import CopiesByHost, WeakView, copied_by_host
from .strided import Strided
from .tables import ChecksumTable, CopyTable, MagnitudeTable


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


class Magnitudes(Protocol):
    """The largest magnitudes of some views, prepared."""

    def compute(self) -> torch.Tensor:
        """FP32 ``[views]``; NaN or infinity of a view that holds one."""


class CpuMagnitudes:
    """By torch; views are not kept."""

    def __init__(self, views: Sequence[torch.Tensor]):
        self._views = [WeakView(view) for view in views]

    def compute(self) -> torch.Tensor:
        """As :meth:`Magnitudes.compute`."""
        found = torch.zeros(len(self._views), dtype=torch.float32)
        for slot, one in enumerate(self._views):
            view = one.view()
            found[slot] = (
                view.amax() if view.dtype == torch.uint8 else torch.linalg.vector_norm(view, torch.inf)
            )
        return found


class CpuCopies:
    """Copies between CPU tensors."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        self._sources = [source for source, _ in pairs]
        self._targets = [target for _, target in pairs]
        self.nbytes = sum(source.nbytes for source in self._sources)

    def launch(self) -> None:
        """Do the copies."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


class JoinedCopies:
    """Copies of several kinds, one after another."""

    def __init__(self, copies: Sequence[Copy]):
        self._copies = list(copies)
        self.nbytes = sum(copy.nbytes for copy in copies)

    def launch(self) -> None:
        """Do all of them."""
        for copy in self._copies:
            copy.launch()


def make_copy(pairs: Sequence[tuple[torch.Tensor | EncodedView, torch.Tensor]], device: torch.device) -> Copy:
    """Copies from the first to the second of each pair, in any order; what is encoded is computed on the way.

    On a GPU the first may be host memory: its kernels read what is page-locked, and the host copies the rest
    (:class:`.host.CopiesByHost`, which says when it blocks). The tensors must stay where they are as long as the copies
    are used.

    Raises:
        ValueError: the two of a pair differ in shape or dtype, or the second is host memory and ``device`` a GPU, or what
            is encoded lies where the GPU can't read it.
    """
    for source, target in pairs:
        if tuple(source.shape) != tuple(target.shape) or source.dtype != target.dtype:
            raise ValueError(
                f"{source.dtype}{list(source.shape)} can't be copied to {target.dtype}{list(target.shape)} as bytes"
            )
        if device.type == "cuda" and target.device.type != "cuda":
            raise ValueError(
                f"{target.dtype}{list(target.shape)} lies on {target.device} and can't be written by {device}; bring it "
                "to the GPU first"
            )
    plain = [(source, target) for source, target in pairs if isinstance(source, torch.Tensor)]
    copies: list[Copy] = []
    if len(plain) < len(pairs):
        copies += make_encoders([(s, t) for s, t in pairs if isinstance(s, EncodedView)], device)
    if device.type != "cuda":
        copies.append(CpuCopies(plain))
    else:
        by_host = [pair for pair in plain if copied_by_host(device, pair[0])]
        read = [pair for pair in plain if not copied_by_host(device, pair[0])] if by_host else plain
        if by_host:
            copies.append(CopiesByHost(by_host))
        copies.append(
            CopyTable.build(((Strided.of(source), Strided.of(target)) for source, target in read), device)
        )
    return copies[0] if len(copies) == 1 else JoinedCopies(copies)


def make_checksums(
    views: Sequence[tuple[torch.Tensor, int]], device: torch.device, slots: Sequence[int] | None = None
) -> Checksums:
    """Checksums of messages from the live views of their segments, with the segments' byte offsets.

    Args:
        views: (view, offset of its first element in its message).
        device: where the sums are; that of the views, or views may be page-locked host memory.
        slots: for each view the row of the result that its message has; all 0 if left out.

    Raises:
        ValueError: a view lies in pageable host memory, and ``device`` is a GPU.
    """
    if device.type != "cuda":
        return ChecksumViews(views, slots)
    for view, _ in views:
        if copied_by_host(device, view):
            raise ValueError(
                f"{view.dtype}{list(view.shape)} lies in pageable host memory, which kernels of {device} can't add up; add "
                "up its bytes where the host has copied them to"
            )
    return ChecksumTable.build([(Strided.of(view), offset) for view, offset in views], device, slots)


def make_magnitudes(views: Sequence[torch.Tensor], device: torch.device) -> Magnitudes:
    """The largest magnitudes of views that lie on ``device``, each with some elements, of floating-point numbers or ``uint8``.

    They must stay where they are as long as this is used.
    """
    return MagnitudeTable.build(views, device, None) if device.type == "cuda" else CpuMagnitudes(views)
