"""Fragments: what a rank holds or wants of one Hugging Face tensor.

A fragment joins a box of the full tensor to a strided view of local storage that holds exactly that
box. Everything that trainers and engines do with their storage (fused QKV, gate and up in one
matrix, stacked experts, replicated KV heads) is a list of fragments, so neither side has to know the
other's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .axes import Axes
from .boxes import Box, box_of, volume


class Encoding(Protocol):
    """How a view is encoded while it is packed: cast to another type, or quantized to codes or scales."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what travels."""

    def shape(self, view: Sequence[int]) -> tuple[int, ...]:
        """Of what travels of a view of this shape."""


class Misfit(ValueError):
    """A view that is not of its box's shape, or a box that leaves its tensor.

    Attributes:
        name: of the tensor.
    """

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"fragment of {name}: {what}")
        self.name = name


@dataclass(frozen=True)
class Fragment:
    """One box of a Hugging Face tensor and the local view that holds it.

    Attributes:
        name: Hugging Face checkpoint name, e.g. ``model.layers.0.self_attn.q_proj.weight``.
        full_shape: shape of the whole tensor under that name.
        box: the part of it that ``view`` holds.
        view: a view (any strides) of live local storage; its shape is the box's. Sources read it,
            destinations write it, so it must alias the parameter and not be a copy.
        encoding: of a source, if not the view's own bytes travel; the box is then that of what travels.
        axes: by which the box and the view see the tensor, if not as it is; of ``full_shape``.

    Raises:
        Misfit: the view's shape is not the box's, the box leaves the tensor, or the axes are another tensor's.
    """

    name: str
    full_shape: tuple[int, ...]
    box: Box
    view: torch.Tensor
    encoding: Encoding | None = None
    axes: Axes | None = None

    def __post_init__(self) -> None:
        expected = tuple(stop - start for start, stop in self.box)
        found = tuple(self.view.shape)
        if self.encoding is not None:
            found = self.encoding.shape(found)
        if found != expected:
            raise Misfit(
                self.name,
                f"the view has shape {found} but its box {self.box} has shape {expected}; bytes would land in the wrong "
                "place. Give the view that holds the box.",
            )
        if self.axes is not None and self.axes.full_shape != self.full_shape:
            raise Misfit(
                self.name,
                f"its axes are those of a tensor of shape {self.axes.full_shape}, and the full shape is {self.full_shape}",
            )
        shape = self.full_shape if self.axes is None else self.axes.shape
        if len(self.box) != len(shape) or any(
            start < 0 or stop > n for (start, stop), n in zip(self.box, shape, strict=False)
        ):
            raise Misfit(self.name, f"box {self.box} does not lie inside the full shape {shape}")

    @property
    def dtype(self) -> torch.dtype:
        """Of the bytes that travel."""
        return self.view.dtype if self.encoding is None else self.encoding.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the fragment holds, as they travel."""
        return volume(self.box) * self.dtype.itemsize

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor ``[*full_shape]`` that the fragment holds, as a view of the box's shape."""
        seen = whole if self.axes is None else self.axes.see(whole)
        return seen[local_slice(box_of(seen.shape), self.box)]

    def seen_by(self, axes: Axes) -> list[Fragment]:
        """The same elements seen by ``axes``, which have the factors of the fragment's own: one fragment, unless its box cuts a
        factor.
        """
        own = self.axes or Axes.of(self.full_shape)
        if own == axes:
            return [self]
        return [
            Fragment(self.name, self.full_shape, box, own.recast(self.view[index], axes), self.encoding, axes)
            for box, index in own.cut(self.box, axes)
        ]


def local_slice(box: Box, part: Box) -> tuple[slice, ...]:
    """The index of ``part`` inside a tensor that holds exactly ``box``; both in full coordinates."""
    return tuple(slice(p0 - b0, p1 - b0) for (b0, _), (p0, p1) in zip(box, part, strict=True))


def flat_bytes(view: torch.Tensor) -> torch.Tensor:
    """A contiguous view as uint8 ``[n]``, on the same storage. Torch raises a RuntimeError for another one."""
    # One element or none counts as contiguous whatever its strides are, and could not be seen as bytes.
    flat = view.as_strided((view.numel(),), (1,)) if view.numel() < 2 else view.view(-1)
    return flat.view(torch.uint8)
