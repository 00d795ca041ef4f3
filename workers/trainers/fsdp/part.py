"""The part of a parameter that a checkpoint weight is: a box of it, some of its dimensions dropped or reordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....integration.layout import Box, Fragment, intersect, local_slice


@dataclass(frozen=True)
class Part:
    """A weight as a view of a parameter's elements.

    Attributes:
        box: of the parameter; one element wide along the dimensions that the weight does not have.
        dims: for each dimension of the weight the parameter's, or -1 where the weight has one of size 1 of its own.
    """

    box: Box
    dims: tuple[int, ...]

    @staticmethod
    def of_view(view: torch.Tensor, shape: Sequence[int]) -> Part | None:
        """The part that ``view`` shows of a contiguous tensor of ``shape``, told from its strides.

        Returns:
            None if it is no box: steps, repeated elements, dimensions joined or split.
        """
        steps: list[int] = []
        step = 1
        for n in reversed(shape):
            steps.append(step)
            step *= n
        steps.reverse()
        by_step = {step: dim for dim, (n, step) in enumerate(zip(shape, steps, strict=True)) if n > 1}
        offset = view.storage_offset()
        starts = []
        for step in steps:
            start, offset = divmod(offset, step) if step else (0, offset)
            starts.append(start)
        dims: list[int] = []
        stops = [start + 1 for start in starts]
        for n, step in zip(view.shape, view.stride(), strict=True):
            dim = -1 if n == 1 else by_step.get(step, len(shape))
            if dim == len(shape) or (dim in dims and dim >= 0) or starts[dim] + n > shape[dim]:
                return None
            if dim >= 0:
                stops[dim] = starts[dim] + n
            dims.append(dim)
        return Part(tuple(zip(starts, stops, strict=True)), tuple(dims))

    def cut(self, name: str, held: Fragment) -> Fragment | None:
        """What ``held``, a fragment of the parameter, holds of the weight ``name``; None if nothing."""
        common = intersect(self.box, held.box)
        if common is None:
            return None
        view = held.view[local_slice(held.box, common)]
        # Dimensions of the weight in its order, then those that it lacks, each of size 1.
        kept = [dim for dim in self.dims if dim >= 0]
        dropped = [dim for dim in range(view.dim()) if dim not in kept]
        view = view.permute(kept + dropped)
        view = view[(..., *(0 for _ in dropped))]
        box: list[tuple[int, int]] = []
        for position, dim in enumerate(self.dims):
            if dim < 0:
                view = view.unsqueeze(position)
                box.append((0, 1))
            else:
                start = self.box[dim][0]
                box.append((common[dim][0] - start, common[dim][1] - start))
        return Fragment(name, self.shape, tuple(box), view)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return tuple(1 if dim < 0 else self.box[dim][1] - self.box[dim][0] for dim in self.dims)
