"""Weights as one tensor at a time: whole tensors between ranks, and the experts of a layer stacked into one tensor.

The bulk path cuts weights into segments and packs those. Libraries that reshard one tensor at a time
(NVIDIA's ``nccl.m2n``, NeMo-RL's ``xferdtensor``) want each weight as one region on each rank, and the
experts of a layer as one tensor with the expert as its first dimension. This module finds those tensors
and regions from the same boxes, and gives a rank's region as one tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..layout import Box, Fragment, local_slice, volume
from ..weights.manifest import TensorSpec

# Boxes that ranks hold or want, by weight and rank.
_Boxes = Mapping[str, Mapping[int, Sequence[Box]]]

_EXPERT = re.compile(r"^(.*\.experts\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class WholeTensor:
    """One tensor that moves as a whole: a weight, or the experts of a layer stacked.

    Attributes:
        label: the weight's name; of stacked experts with ``*`` in place of the number.
        names: the weights along the first dimension if ``stacked``, else the one weight.
        shape: of the whole tensor, with the experts' dimension first if ``stacked``.
        dtype: of the weights.
        stacked: whether ``names`` are stacked.
        sources: rank → regions that it holds, in coordinates of ``shape``; ranks that hold nothing are absent.
        destinations: rank → regions that it wants.
    """

    label: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    stacked: bool
    sources: dict[int, tuple[Box, ...]]
    destinations: dict[int, tuple[Box, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return volume(tuple((0, n) for n in self.shape)) * self.dtype.itemsize


def by_weight(ranks: Mapping[int, Mapping[str, Sequence[Box]]]) -> dict[str, dict[int, Sequence[Box]]]:
    """What ranks hold or want, by weight and then by rank."""
    found: dict[str, dict[int, Sequence[Box]]] = defaultdict(dict)
    for rank, held in ranks.items():
        for name, boxes in held.items():
            found[name][rank] = boxes
    return found


def whole_tensors(specs: Sequence[TensorSpec], sources: _Boxes, destinations: _Boxes) -> list[WholeTensor]:
    """All weights that some destination wants, in the order of ``specs``, experts stacked.

    Args:
        specs: the weights.
        sources: weight → trainer rank → what it holds.
        destinations: weight → generation rank → what it wants.
    """
    rows: dict[tuple[object, ...], list[tuple[int, TensorSpec]]] = defaultdict(list)
    for spec in specs:
        if not any(destinations.get(spec.name, {}).values()):
            continue
        match = _EXPERT.match(spec.name)
        if match is None:
            rows[spec.name,].append((0, spec))
        else:
            rows[f"{match[1]}*{match[3]}", spec.shape, spec.dtype].append((int(match[2]), spec))
    found = []
    # Layers are held alike, and then by one mapping.
    known: dict[tuple[object, ...], dict[int, tuple[Box, ...]]] = {}
    for key, members in rows.items():
        first = members[0][1]
        stacked = _EXPERT.match(first.name) is not None
        names = tuple(spec.name for _, spec in sorted(members, key=lambda member: member[0]))
        found.append(
            WholeTensor(
                label=str(key[0]),
                names=names,
                shape=(len(names), *first.shape) if stacked else tuple(first.shape),
                dtype=first.dtype,
                stacked=stacked,
                sources=_regions(names, stacked, sources, known),
                destinations=_regions(names, stacked, destinations, known),
            )
        )
    return found


def merged(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Join disjoint boxes that together make a larger box, dimension by dimension; ascending."""
    current = sorted(boxes)
    for dim in range(len(current[0]) if current else 0):
        rows: dict[Box, list[tuple[int, int]]] = defaultdict(list)
        for box in current:
            rows[(*box[:dim], *box[dim + 1 :])].append(box[dim])
        current = []
        for rest, ranges in rows.items():
            joined: list[tuple[int, int]] = []
            for start, stop in sorted(ranges):
                if joined and joined[-1][1] == start:
                    joined[-1] = (joined[-1][0], stop)
                else:
                    joined.append((start, stop))
            current.extend((*rest[:dim], r, *rest[dim:]) for r in joined)
    return tuple(sorted(current))


class RegionStorage:
    """One region of a whole tensor on this rank.

    Attributes:
        region: in the whole tensor's coordinates.
        view: live storage that holds exactly the region, if it is one strided view; else None.
    """

    def __init__(self, tensor: WholeTensor, region: Box, fragments: Mapping[str, Sequence[Fragment]]) -> None:
        """Find the region among this rank's fragments.

        Args:
            tensor: the whole tensor.
            region: one of its regions on this rank.
            fragments: this rank's fragments by weight.
        """
        self.region = region
        self.shape = tuple(stop - start for start, stop in region)
        self._dtype = tensor.dtype
        self._index: list[tuple[slice, ...]] = []
        self._live: list[torch.Tensor] = []
        for position, name in enumerate(tensor.names):
            if tensor.stacked and not region[0][0] <= position < region[0][1]:
                continue
            for fragment in fragments.get(name, ()):
                box = ((position, position + 1), *fragment.box) if tensor.stacked else fragment.box
                if all(a <= x and y <= b for (a, b), (x, y) in zip(region, box, strict=True)):
                    self._index.append(local_slice(region, box))
                    self._live.append(fragment.view.unsqueeze(0) if tensor.stacked else fragment.view)
        self.view = self._as_one_view(tensor.stacked)

    def parts(self, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Live storage, piece by piece, and where each piece lies in a tensor of the region's shape."""
        return [(live, buffer[index]) for live, index in zip(self._live, self._index, strict=True)]

    def gather(self) -> torch.Tensor:
        """The region as one tensor: the live view, or a copy of its parts that is made now (stacked experts)."""
        if self.view is not None:
            return self.view
        if self._rows_of_whole():
            return torch.cat(self._live)
        out = torch.empty(self.shape, dtype=self._dtype, device=self._live[0].device)
        torch._foreach_copy_([out[index] for index in self._index], self._live)
        return out

    def receiving(self) -> torch.Tensor:
        """Contiguous memory for the region: the live storage itself if it is contiguous, else new memory."""
        if self.view is not None and self.view.is_contiguous():
            return self.view
        return torch.empty(self.shape, dtype=self._dtype, device=self._live[0].device)

    def scatter(self, received: torch.Tensor) -> None:
        """Copy what :meth:`receiving` gave into live storage, unless it is that storage."""
        if self.view is not None:
            if self.view.data_ptr() != received.data_ptr():
                self.view.copy_(received)
            return
        torch._foreach_copy_(self._live, [received[index] for index in self._index])

    def _rows_of_whole(self) -> bool:
        """Whether the parts, one after another along the first dimension, are the region."""
        return [index[0].start for index in self._index] == sorted(
            index[0].start for index in self._index
        ) and all(tuple(live.shape[1:]) == self.shape[1:] for live in self._live)

    def _as_one_view(self, stacked: bool) -> torch.Tensor | None:
        if len(self._live) == 1:
            return self._live[0]
        first = self._live[0]
        if not stacked or not self._rows_of_whole() or len(self._live) != self.shape[0]:
            return None
        steps = {b.data_ptr() - a.data_ptr() for a, b in zip(self._live, self._live[1:], strict=False)}
        same = {(t.untyped_storage().data_ptr(), t.stride()[1:]) for t in self._live}
        if len(steps) != 1 or len(same) != 1:
            return None
        step = steps.pop() // first.element_size()
        return first.as_strided(self.shape, (step, *first.stride()[1:])) if step > 0 else None


def _regions(
    names: Sequence[str],
    stacked: bool,
    side: _Boxes,
    known: dict[tuple[object, ...], dict[int, tuple[Box, ...]]],
) -> dict[int, tuple[Box, ...]]:
    """Rank → regions; one and the same mapping for tensors that are held by the same ones."""
    key = stacked, *(id(side.get(name)) for name in names)
    if key not in known:
        known[key] = _merged_regions(names, stacked, side)
    return known[key]


def _merged_regions(names: Sequence[str], stacked: bool, side: _Boxes) -> dict[int, tuple[Box, ...]]:
    boxes: dict[int, list[Box]] = defaultdict(list)
    for position, name in enumerate(names):
        for rank, held in side.get(name, {}).items():
            boxes[rank] += [((position, position + 1), *box) if stacked else box for box in held]
    return {rank: merged(held) for rank, held in boxes.items() if held}
