"""Views that are encoded (cast or quantized) while they are packed: read once, and never stored beside the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from ..layout import Box, Encoding
from .host import copied_by_host
from .strided import Strided

# Elements that ``ipc`` encodes again at a time for its checks; one row of blocks may have more.
CHECKED_AT_ONCE = 16 << 20


class NotComputable(ValueError):
    """A device can't encode from the memory of the source, or into the memory of the target."""


class Encoder(Protocol):
    """Prepared encodings, which write ``nbytes`` altogether."""

    nbytes: int

    def launch(self) -> None:
        """Encode; on a GPU, enqueue that on the current stream."""


class EncodingMethod(Protocol):
    """How several encodings of the same view are computed together; hashable."""

    @property
    def block(self) -> tuple[int, ...]:
        """Extents of the blocks that are encoded together, along a view's last dimensions; 1 along the others."""

    def has_kernel(self, source: torch.dtype) -> bool:
        """Whether GPUs compute this from ``source`` by a kernel, which reads and writes any memory they reach."""

    def prepare(self, pairs: Sequence[EncodedPair], device: torch.device) -> Encoder:
        """Prepare pairs of this method's encodings, so that they share what they read; those without a kernel have tensors
        as their targets."""


class PackedEncoding(Encoding, Protocol):
    """An encoding that packing can do."""

    @property
    def method(self) -> EncodingMethod:
        """How it is computed."""

    @property
    def unit(self) -> tuple[int, ...]:
        """How many elements of a view one encoded element stands for, along the last dimensions; 1 along the others."""


@dataclass(frozen=True, eq=False)
class EncodedView:
    """A window of a tensor's encoding.

    Attributes:
        held: what is read: a whole fragment, since a scale may depend on more of it than the part.
        encoding: how it is encoded.
        window: the part, in the encoded tensor's own coordinates; the encoded ``held`` begins at 0.
    """

    held: torch.Tensor
    encoding: PackedEncoding
    window: Box

    @property
    def blocks(self) -> Box:
        """The whole blocks that the part needs, as a box of ``held``."""
        units, blocks = self._extents
        return tuple(
            (start * unit // b * b, min(-(-stop * unit // b) * b, size))
            for (start, stop), unit, b, size in zip(self.window, units, blocks, self.held.shape, strict=True)
        )

    @property
    def _extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Unit and block in every dimension."""
        unit, block = self.encoding.unit, self.encoding.method.block
        dims = self.held.dim()
        return (1,) * (dims - len(unit)) + unit, (1,) * (dims - len(block)) + block

    @property
    def made_of(self) -> tuple[int, EncodingMethod, Box]:
        """Equal for parts that are best computed together: of the same blocks of the same tensor."""
        return id(self.held), self.encoding.method, self.blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(stop - start for start, stop in self.window)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed."""
        return self.encoding.dtype

    @property
    def nbytes(self) -> int:
        """Of the part."""
        return prod(self.shape) * self.dtype.itemsize

    def strips(self, most: int) -> Iterator[Box]:
        """Ranges of the first dimension that has several blocks, cut where those of all encodings of the same blocks are.

        Args:
            most: elements of ``held`` behind a strip, if a row of blocks has not more.

        Yields:
            Boxes of the part, whose ranges count from its first element.
        """
        whole = [(0, stop - start) for start, stop in self.window]
        units, blocks = self._extents
        dim = next(
            (
                i
                for i, ((start, stop), b) in enumerate(zip(self.blocks, blocks, strict=True))
                if stop - start > b
            ),
            None,
        )
        if dim is None:
            yield tuple(whole)
            return
        start, stop = self.window[dim]
        row = blocks[dim] * prod(last - first for first, last in self.blocks[dim + 1 :])
        step = max(1, most // max(1, row)) * blocks[dim] // units[dim]
        for cut in range(start // step * step, stop, step):
            whole[dim] = max(cut, start) - start, min(cut + step, stop) - start
            yield tuple(whole)

    def slice(self, box: Box) -> EncodedView:
        """The part of the part that ``box`` covers, whose ranges count from the part's first element."""
        moved = tuple((w + start, w + stop) for (w, _), (start, stop) in zip(self.window, box, strict=True))
        return EncodedView(self.held, self.encoding, moved)


# What is encoded, and where it goes: a tensor, or plain memory that a GPU reaches.
EncodedPair = tuple[EncodedView, torch.Tensor | Strided]


class EncodingsByHost:
    """Encodings of host memory that the device has no kernel for: the host computes them and copies them there.

    One held tensor at a time, through one buffer in host memory. Nothing that is read is kept, and ``launch`` may hold up
    its caller, as :class:`.host.CopiesByHost` has it.
    """

    def __init__(self, pairs: Sequence[tuple[EncodedView, torch.Tensor]]):
        by_held: dict[int, list[tuple[EncodedView, torch.Tensor]]] = {}
        for view, target in pairs:
            by_held.setdefault(id(view.held), []).append((view, target))
        needs = [sum(padded(view.nbytes) for view, _ in group) for group in by_held.values()]
        self._buffer = torch.empty(max(needs, default=0), dtype=torch.uint8)
        self._steps: list[tuple[list[Encoder], list[tuple[torch.Tensor, torch.Tensor]]]] = []
        for group in by_held.values():
            computed, copies, cursor = [], [], 0
            for view, target in group:
                raw = self._buffer[cursor : cursor + view.nbytes]
                made = raw.view(view.dtype).view(view.shape)
                cursor += padded(view.nbytes)
                computed.append((view, made))
                copies.append((made, target))
            self._steps.append((make_encoders(computed, torch.device("cpu")), copies))
        self.nbytes = sum(view.nbytes for view, _ in pairs)

    def launch(self) -> None:
        """Compute all, and copy the results in the order of the current stream.

        Raises:
            RefitError: the memory of a source was freed.
        """
        for encoders, copies in self._steps:
            for encoder in encoders:
                encoder.launch()
            for made, target in copies:
                # CUDA has read pageable memory when it returns, so the buffer can be used again.
                target.copy_(made, non_blocking=True)


def padded(nbytes: int) -> int:
    """Rounded up to what any element is aligned to."""
    return -(-nbytes // 16) * 16


def make_encoders(pairs: Iterable[EncodedPair], device: torch.device) -> list[Encoder]:
    """Prepare encodings, one encoder for each method.

    Raises:
        ValueError: a part and its target differ in shape or size of items.
        NotComputable: ``device`` has no kernel for a format and its target is plain memory, or can't read a source.
    """
    groups: dict[EncodingMethod, list[EncodedPair]] = {}
    by_host: list[tuple[EncodedView, torch.Tensor]] = []
    for view, target in pairs:
        itemsize = target.itemsize if isinstance(target, Strided) else target.element_size()
        if tuple(target.shape) != view.shape or itemsize != view.dtype.itemsize:
            raise ValueError(
                f"{view.dtype}{list(view.shape)} can't be written to items of {itemsize} bytes of shape "
                f"{list(target.shape)}"
            )
        on_device = view.held.device.type == device.type
        has_kernel = device.type != "cuda" or view.encoding.method.has_kernel(view.held.dtype)
        if on_device or (has_kernel and not copied_by_host(device, view.held)):
            if not has_kernel and isinstance(target, Strided):
                raise NotComputable(
                    f"there is no kernel that makes {view.dtype} of {view.held.dtype} in a peer's memory; set "
                    "policy.refit.transport to p2p"
                )
            groups.setdefault(view.encoding.method, []).append((view, target))
        elif isinstance(target, torch.Tensor):
            by_host.append((view, target))
        else:
            raise NotComputable(
                f"{view.held.dtype}{list(view.held.shape)} lies in host memory, from where {device} can't make "
                f"{view.dtype}; offload parameters to pinned memory, or set policy.refit.transport to p2p"
            )
    made = [method.prepare(group, device) for method, group in groups.items()]
    return [*made, EncodingsByHost(by_host)] if by_host else made
