"""Holdings: what one rank holds or wants of all weights, as compact plain data that every rank reads.

Weights are spoken of by their position in the agreed, ordered list of specs. Thousands of weights
(the experts of all layers) are held as the same boxes, so a rank's holdings are a few groups of
positions: DeepSeek-V3's 45,000 weights are some kilobytes a rank.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RefitMismatch
from ..layout import Axes, Box, Fragment, volume
from .manifest import TensorSpec, dtype_name, dtype_of

Positions = npt.NDArray[np.int64]


class SpecTable:
    """The agreed, ordered weights, and what is looked up in them.

    Attributes:
        specs: in the trainer's export order.
        positions: Hugging Face name → position.
        shapes: distinct shapes; ``shape_ids[i]`` is the index of weight ``i``'s shape, int64.
    """

    def __init__(self, specs: Sequence[TensorSpec]):
        self.specs = list(specs)
        self.positions = {spec.name: i for i, spec in enumerate(self.specs)}
        ids: dict[tuple[int, ...], int] = {}
        self.shape_ids: Positions = np.array(
            [ids.setdefault(tuple(spec.shape), len(ids)) for spec in self.specs], dtype=np.int64
        )
        self.shapes = list(ids)


@dataclass(frozen=True)
class HoldingGroup:
    """Weights that a rank holds as exactly the same boxes.

    Attributes:
        boxes: disjoint, none of them empty.
        dtype: of the local storage.
        indices: ascending positions in the list of specs, int64.
        axes: by which the boxes see the weights, if not as they are; of the weights' one shape.
    """

    boxes: tuple[Box, ...]
    dtype: torch.dtype
    indices: Positions
    axes: Axes | None = None


@dataclass(frozen=True)
class Holdings:
    """What one rank holds (a trainer) or wants (an engine).

    Attributes:
        rank: the rank in the refit world.
        groups: each weight stands in at most one group.
        refused: reason why weights must not go shard to shard on this rank → their ascending positions.
    """

    rank: int
    groups: tuple[HoldingGroup, ...] = ()
    refused: dict[str, Positions] = field(default_factory=dict)

    @staticmethod
    def from_fragments(
        rank: int, fragments: Sequence[Fragment], refused: Mapping[str, str], positions: Mapping[str, int]
    ) -> Holdings:
        """Describe a rank's fragments.

        Args:
            rank: of the refit world.
            fragments: all of the rank's; those without elements are left out.
            refused: Hugging Face name → reason; such a weight is not among the groups.
            positions: Hugging Face name → position in the list of specs.

        Raises:
            RefitMismatch: a name that is not among the specs, or a weight in two dtypes or seen by two axes.
        """
        boxes: dict[str, list[Box]] = defaultdict(list)
        dtypes: dict[str, torch.dtype] = {}
        axes: dict[str, Axes | None] = {}
        for fragment in fragments:
            name, dtype = fragment.name, fragment.dtype
            if name in refused or not volume(fragment.box):
                continue
            boxes[name].append(fragment.box)
            if dtypes.setdefault(name, dtype) != dtype:
                raise RefitMismatch(
                    f"its fragments are {dtype_name(dtypes[name])} and {dtype_name(dtype)}; one weight has one dtype",
                    stage="handshake",
                    rank=rank,
                    parameter=name,
                )
            if axes.setdefault(name, fragment.axes) != fragment.axes:
                raise RefitMismatch(
                    f"its fragments are seen by {axes[name]} and {fragment.axes}; one rank sees a weight in one way",
                    stage="handshake",
                    rank=rank,
                    parameter=name,
                )
        grouped: dict[tuple[tuple[Box, ...], torch.dtype, Axes | None], list[int]] = defaultdict(list)
        for name, held in boxes.items():
            grouped[tuple(held), dtypes[name], axes[name]].append(_position(name, positions, rank))
        reasons: dict[str, list[int]] = defaultdict(list)
        for name, reason in refused.items():
            reasons[reason].append(_position(name, positions, rank))
        return Holdings(
            rank,
            tuple(
                HoldingGroup(held, dtype, _ascending(found), seen)
                for (held, dtype, seen), found in grouped.items()
            ),
            {reason: _ascending(found) for reason, found in reasons.items()},
        )

    def to_parts(self) -> list[object]:
        """Plain data for the rendezvous: what is refused, and each group, which many ranks may have alike."""
        refused = {reason: encode_positions(indices) for reason, indices in self.refused.items()}
        groups: list[list[object]] = []
        for g in self.groups:
            groups.append([g.boxes, dtype_name(g.dtype), encode_positions(g.indices)])
            if g.axes is not None:
                groups[-1].append([g.axes.splits, g.axes.order])
        return [refused, *groups]


class HoldingsReader:
    """Reads what :meth:`Holdings.to_parts` gave on all ranks.

    Args:
        table: of the agreed specs that positions point into.
    """

    def __init__(self, table: SpecTable):
        self._table = table
        # By identity, with what was read to keep it alive.
        self._groups: dict[int, tuple[object, HoldingGroup]] = {}

    def holdings(self, rank: int, parts: Sequence[object]) -> Holdings:
        """What ``rank`` holds.

        Args:
            rank: of the refit world.
            parts: as read from a peer; nothing in it is trusted. A part that is the same object as one of another rank
                is read once.

        Raises:
            RefitMismatch: the data is not of the form that ``to_parts`` gives, or points outside of the specs.
        """
        try:
            refused, *groups = parts
            if not isinstance(refused, dict):
                raise TypeError("what is refused is of another type")
            read = tuple(self._group(group, rank) for group in groups)
            count = len(self._table.specs)
            reasons = {str(reason): decode_positions(text, count) for reason, text in refused.items()}
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise RefitMismatch(
                f"malformed holdings ({error}); nothing was written. Do both sides run the same rlrefit?",
                stage="handshake",
                blamed=rank,
            ) from error
        _check_disjoint(read, self._table, rank)
        return Holdings(rank, read, reasons)

    def _group(self, data: Any, rank: int) -> HoldingGroup:
        known = self._groups.get(id(data))
        if known is not None:
            return known[1]
        boxes, dtype, text, *seen = data
        group = HoldingGroup(
            tuple(tuple((int(a), int(b)) for a, b in box) for box in boxes),
            dtype_of(dtype),
            decode_positions(text, len(self._table.specs)),
            _axes(*seen) if seen else None,
        )
        _check_inside(group, self._table, rank)
        self._groups[id(data)] = data, group
        return group


def check_shapes(fragments: Sequence[Fragment], table: SpecTable, rank: int, who: str) -> None:
    """Check that fragments cut the tensors that the trainer exports.

    Raises:
        RefitMismatch: a fragment of a tensor of another full shape; names the first.
    """
    for fragment in fragments:
        position = table.positions.get(fragment.name)
        if position is None:
            continue
        shape = table.specs[position].shape
        if tuple(fragment.full_shape) != tuple(shape):
            raise RefitMismatch(
                f"{who} holds a part of a tensor of shape {list(fragment.full_shape)}, but the trainer exports "
                f"{list(shape)}; bytes would land in the wrong rows. Both sides must be built from the same checkpoint.",
                stage="handshake",
                rank=rank,
                parameter=fragment.name,
            )


def _axes(data: Any) -> Axes:
    splits, order = data
    return Axes(tuple(tuple(int(n) for n in factors) for factors in splits), tuple(int(i) for i in order))


def _check_inside(group: HoldingGroup, table: SpecTable, rank: int) -> None:
    """Boxes of one group may belong to weights of different shapes: each must lie inside of all."""
    for shape_id in np.flatnonzero(np.bincount(table.shape_ids[group.indices])).tolist():
        shape = table.shapes[shape_id]
        seen = shape if group.axes is None else group.axes.shape
        fits = group.axes is None or group.axes.full_shape == tuple(shape)
        for box in group.boxes:
            if (
                not fits
                or len(box) != len(seen)
                or any(not 0 <= a < b <= n for (a, b), n in zip(box, seen, strict=True))
            ):
                position = int(group.indices[table.shape_ids[group.indices] == shape_id][0])
                raise RefitMismatch(
                    f"a peer's box {box} does not lie inside the shape {list(seen if fits else shape)}; nothing was written. "
                    "Both sides must be built from the same checkpoint.",
                    stage="handshake",
                    rank=rank,
                    parameter=table.specs[position].name,
                )


def _check_disjoint(groups: Sequence[HoldingGroup], table: SpecTable, rank: int) -> None:
    """A weight that stood in two groups would get the bytes of one alone."""
    counts = np.zeros(len(table.specs), dtype=np.int64)
    for group in groups:
        counts[group.indices] += 1
    if counts.max(initial=0) > 1:
        raise RefitMismatch(
            "a peer names this weight in two groups of its holdings; nothing was written. Do both sides run the same "
            "rlrefit?",
            stage="handshake",
            rank=rank,
            parameter=table.specs[int(counts.argmax())].name,
        )


def _position(name: str, positions: Mapping[str, int], rank: int) -> int:
    try:
        return positions[name]
    except KeyError:
        raise RefitMismatch(
            "this rank holds a part of a weight that the trainer's export does not know; its bytes could never be "
            "refitted. Both sides must be built from the same checkpoint.",
            stage="handshake",
            rank=rank,
            parameter=name,
        ) from None


def _ascending(found: list[int]) -> Positions:
    return np.array(sorted(found), dtype=np.int64)


def encode_positions(indices: Positions) -> str:
    """Positions as text: their differences (the first counted from 0) as 32-bit words, deflated, in base 64.

    Experts repeat the same differences thousands of times, so this is a few hundred characters.
    """
    deltas = np.diff(indices, prepend=0).astype("<u4")
    return base64.b64encode(zlib.compress(deltas.tobytes(), 6)).decode()


# Ranks with the same data send the same text.
@lru_cache(maxsize=4096)
def decode_positions(text: object, size: int) -> Positions:
    """Inverse of :func:`encode_positions`, for a list of ``size`` specs; the result is not to be written.

    Raises:
        TypeError, ValueError: malformed text, or positions outside of the list.
    """
    if not isinstance(text, str):
        raise TypeError("positions are no text")
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.b64decode(text, validate=True), 4 * size)
    except zlib.error as error:
        raise ValueError(f"positions can't be inflated: {error}") from error
    if not inflate.eof or len(raw) % 4:
        raise ValueError(f"positions do not end within a list of {size} weights")
    deltas = np.frombuffer(raw, dtype="<u4")
    found: Positions = np.cumsum(deltas, dtype=np.int64)
    if found.size and (found[-1] >= size or not bool((deltas[1:] > 0).all())):
        raise ValueError(f"positions do not ascend within a list of {size} weights")
    found.flags.writeable = False
    return found
