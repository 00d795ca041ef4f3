"""Views whose bytes are computed while they are packed: read once, and never stored beside the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from ..layout import Box, Encoding
from .host import pushed_to
from .strided import Strided


class Encoder(Protocol):
    """Prepared computations; ``nbytes`` of results altogether."""

    nbytes: int

    def launch(self) -> None:
        """Compute and write the results; on a GPU, enqueue that on the current stream."""


class PackedEncoding(Encoding, Protocol):
    """An encoding that packing can carry out."""

    @property
    def prepare(self) -> Callable[[Sequence[EncodedPair], torch.device], Encoder]:
        """Prepares pairs of all encodings that have the same ``prepare``, so that they share what they read."""


@dataclass(frozen=True, eq=False)
class EncodedView:
    """A part of what is computed of a held tensor.

    Attributes:
        held: what is read: a whole fragment, since a scale may depend on more of it than the part.
        encoding: what is computed.
        window: the part, in the encoded tensor's own coordinates; the encoded ``held`` begins at 0.
    """

    held: torch.Tensor
    encoding: PackedEncoding
    window: Box

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


# What is computed, and where it goes: a tensor, or plain memory that a GPU reaches.
EncodedPair = tuple[EncodedView, torch.Tensor | Strided]


def make_encoders(pairs: Iterable[EncodedPair], device: torch.device) -> list[Encoder]:
    """Prepare computations, one for each way of computing.

    Raises:
        ValueError: a part and its target differ in shape or size of items, or its source lies where ``device`` can't
            read it.
    """
    groups: dict[object, list[EncodedPair]] = {}
    for view, target in pairs:
        itemsize = target.itemsize if isinstance(target, Strided) else target.element_size()
        if tuple(target.shape) != view.shape or itemsize != view.dtype.itemsize:
            raise ValueError(
                f"{view.dtype}{list(view.shape)} can't be written to items of {itemsize} bytes of shape "
                f"{list(target.shape)}"
            )
        if pushed_to(device, view.held):
            raise ValueError(
                f"{view.held.dtype}{list(view.held.shape)} lies in pageable host memory, where {device} can't quantize it; "
                "offload parameters to pinned memory"
            )
        groups.setdefault(view.encoding.prepare, []).append((view, target))
    return [group[0][0].encoding.prepare(group, device) for group in groups.values()]
