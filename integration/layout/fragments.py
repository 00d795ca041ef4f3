"""Fragments: what a rank holds or wants of one Hugging Face tensor.

A fragment joins a box of the full tensor to a strided view of local storage that holds exactly that
box. Everything that trainers and engines do with their storage (fused QKV, gate and up in one
matrix, stacked experts, replicated KV heads) is a list of fragments, so neither side has to know the
other's layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .boxes import Box, intersect, volume


@dataclass(frozen=True)
class Fragment:
    """One box of a Hugging Face tensor and the local view that holds it.

    Attributes:
        name: Hugging Face checkpoint name, e.g. ``model.layers.0.self_attn.q_proj.weight``.
        full_shape: shape of the whole tensor under that name.
        box: the part of it that ``view`` holds.
        view: a view (any strides) of live local storage; its shape is the box's. Sources read it,
            destinations write it, so it must alias the parameter and not be a copy.

    Raises:
        ValueError: the view's shape is not the box's, or the box leaves the full shape.
    """

    name: str
    full_shape: tuple[int, ...]
    box: Box
    view: torch.Tensor

    def __post_init__(self) -> None:
        expected = tuple(stop - start for start, stop in self.box)
        if tuple(self.view.shape) != expected:
            raise ValueError(
                f"fragment of {self.name}: the view has shape {tuple(self.view.shape)} but its box {self.box} "
                f"has shape {expected}; bytes would land in the wrong place. Give the view that holds the box."
            )
        if len(self.box) != len(self.full_shape) or any(
            start < 0 or stop > n for (start, stop), n in zip(self.box, self.full_shape, strict=False)
        ):
            raise ValueError(
                f"fragment of {self.name}: box {self.box} does not lie inside the full shape {self.full_shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that the fragment holds."""
        return volume(self.box) * self.view.element_size()

    def slice(self, part: Box) -> torch.Tensor:
        """The view of ``part``, given in the full tensor's coordinates.

        Raises:
            ValueError: ``part`` is not inside the fragment's box.
        """
        if intersect(self.box, part) != part:
            raise ValueError(f"fragment of {self.name} holds {self.box}, which does not contain {part}")
        return self.view[local_slice(self.box, part)]


def local_slice(box: Box, part: Box) -> tuple[slice, ...]:
    """The index of ``part`` inside a tensor that holds exactly ``box``; both in full coordinates."""
    return tuple(slice(p0 - b0, p1 - b0) for (b0, _), (p0, p1) in zip(box, part, strict=True))
