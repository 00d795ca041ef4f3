"""What one rank stores: parameters, and which boxes of Hugging Face weights stand where in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ....integration.layout import Axes, Box

Index = tuple[int | slice | None, ...]


class Weight(NamedTuple):
    """A weight of the checkpoint: name, full shape, and its dtype where that is not the model's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Part:
    """One box of a Hugging Face weight inside a parameter.

    Attributes:
        name: Hugging Face name.
        full_shape: of the whole weight.
        box: the part of it that the parameter holds.
        index: ``parameter[index]`` has the box's shape and holds exactly it.
        axes: by which the box sees the weight, if not as it is.
        turned: ``parameter[index]`` is a matrix that holds it the other way round.
    """

    name: str
    full_shape: tuple[int, ...]
    box: Box
    index: Index
    axes: Axes | None = None
    turned: bool = False


@dataclass(frozen=True)
class Param:
    """A parameter as a trainer or an engine stores it.

    Attributes:
        name: in the storing side's name space.
        shape: local shape, with all padding.
        dtype: of the storage.
        parts: what of it travels shard to shard; nothing else of the parameter is a weight's (padding),
            or no rule places it.
        refused: Hugging Face weights that the parameter holds a part of and no rule places.
        reason: why; empty if ``refused`` is.
        copies: where an engine has a box of ``parts`` once more, which travels once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...] = ()
    refused: tuple[str, ...] = ()
    reason: str = ""
    copies: tuple[Part, ...] = ()

    def under(self, own: str, weights: str) -> Param:
        """The same parameter of another layer: ``own`` is put before its name, ``weights`` before the weights'."""
        parts, copies = (
            tuple(replace(part, name=weights + part.name) for part in found)
            for found in (self.parts, self.copies)
        )
        refused = tuple(weights + name for name in self.refused)
        return replace(self, name=own + self.name, parts=parts, refused=refused, copies=copies)
