"""Scales of blocks that several parts of a weight share, made by all trainer ranks before each refit's packing.

Which blocks are cut is known from the plan. Each has a slot in one row of numbers, the same on all trainer ranks: whoever
holds a part of a block puts there the scale that the part would have, and the maximum over the ranks is the block's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..comm.group import Group, members
from ..comm.opening import GroupChoice, open_group
from ..control.channel import Channel
from ..errors import PlanError, closed_on_error
from ..layout import Box, Fragment, box_of, coverage_gap, intersect, subtract_all, volume
from ..packing.encoded import EncodedPair, EncodedView, Encoder, make_encoders
from ..plan.classes import TensorClass
from ..quantize import blocks
from ..quantize.formats import Codes, Format, part_head
from ..quantize.partial_blocks import PartialBlocks, PartialCodes, PartialScales
from ..weights.manifest import TensorSpec

# The sign, which a NaN may have.
_SIZE = 0x7FFFFFFF


@dataclass(frozen=True)
class CutSlots:
    """The slots of all cut blocks.

    Attributes:
        count: of slots.
        of: name of a weight → its first slot, and disjoint boxes of its scales, which follow one another from there.
        formats: of these weights.
    """

    count: int
    of: Mapping[str, tuple[int, tuple[Box, ...]]]
    formats: Mapping[str, Format]

    @staticmethod
    def find(
        classes: Sequence[TensorClass], specs: Sequence[TensorSpec], formats: Mapping[str, Format]
    ) -> CutSlots:
        """Look through the bulk weights for blocks that some trainer rank holds in part.

        Args:
            classes: of the bulk weights.
            specs: what travels, into which the classes point.
            formats: of the weights that travel as codes.

        Raises:
            PlanError: a block of which no trainer rank holds some elements.
        """
        count = 0
        found: dict[str, tuple[int, tuple[Box, ...]]] = {}
        for tensor_class in classes:
            held = tuple(box for box, _ in tensor_class.held)
            cut: dict[tuple[int, int], tuple[Box, ...]] = {}
            for position in tensor_class.members.tolist():
                name = specs[position].name
                if name not in formats:
                    continue
                block = formats[name].block
                if block not in cut:
                    cut[block] = _cut(held, tensor_class.shape, block, name)
                if cut[block]:
                    found[name] = count, cut[block]
                    count += sum(map(volume, cut[block]))
        return CutSlots(count, found, {name: formats[name] for name in found})


class SharedScales:
    """One trainer rank's part in making the scales of cut blocks."""

    def __init__(self, slots: CutSlots, device: torch.device, group: Group | None):
        """
        Args:
            slots: the same on all trainer ranks.
            device: of this rank's parameters.
            group: of all trainer ranks; None if there is only this one.
        """
        self._slots = slots
        self._device = device
        self._group = group
        # Sizes of FP32 numbers have the order of their bits, NaN above all.
        self._row = torch.zeros(slots.count, dtype=torch.int32, device=device)

    @staticmethod
    def open(
        channel: Channel, choice: GroupChoice, slots: CutSlots, device: torch.device
    ) -> SharedScales | None:
        """With a group of all trainer ranks; None where no blocks are cut, and on generation ranks.

        Raises:
            PeerLost, RefitTimeout: a trainer rank does not take part.
        """
        world = channel.world
        place = members(world.sources, world.rank)
        if not slots.count or place is None:
            return None
        if world.train_ranks == 1:
            return SharedScales(slots, device, None)
        group = open_group(
            channel, choice, "scales", place, device, 1, slots.count * 4 * (world.train_ranks - 1)
        )
        with closed_on_error(group):
            scales = SharedScales(slots, device, group)
            scales.connect()
        return scales

    def connect(self) -> None:
        """Connect to the other trainer ranks; all of them at the same time.

        Raises:
            PeerLost, RefitTimeout: a trainer rank does not take part.
        """
        if self._group is not None:
            self._group.connect_maximum(self._row)

    def bind(self, fragments: Sequence[Fragment]) -> None:
        """Prepare for this rank's fragments; again whenever they have moved. Keeps their scales, but no weight.

        Raises:
            PlanError: this rank keeps a weight quantized whose blocks others cut.
        """
        pairs: list[EncodedPair] = []
        self._scales: list[torch.Tensor] = []
        places: list[npt.NDArray[np.int64]] = []
        slots: list[npt.NDArray[np.int64]] = []
        for fragment in fragments:
            touched = self._touched(fragment)
            if not touched:
                continue
            box = blocks.scale_box(fragment.box, self._slots.formats[fragment.name].block)
            encoding, scales = self._own(fragment, box)
            pairs.append((EncodedView(fragment.view, encoding, box_of(scales.shape)), scales))
            base = sum(one.numel() for one in self._scales)
            self._scales.append(scales)
            for first, whole, common in touched:
                places.append(base + _positions(box, common))
                slots.append(first + _positions(whole, common))
        self._encoders: list[Encoder] = make_encoders(pairs, self._device)
        self._places, self._at = (_indices(found, self._device) for found in (places, slots))

    def make(self) -> None:
        """Make all scales of this refit's weights; all trainer ranks at the same time.

        Raises:
            RefitError: the memory of a weight was freed.
            PeerLost, RefitTimeout: a trainer rank does not take part.
        """
        for encoder in self._encoders:
            encoder.launch()
        self._row.zero_()
        bits = [scales.view(torch.int32).view(-1) for scales in self._scales]
        if bits:
            flat = torch.cat(bits).bitwise_and_(_SIZE)
            # Several parts on one rank may touch a block, too.
            self._row.scatter_reduce_(0, self._at, flat[self._places], "amax")
        if self._group is not None:
            self._group.maximum(self._row, "export")
        if bits:
            flat[self._places] = self._row[self._at]
            torch._foreach_copy_(bits, list(flat.split([one.numel() for one in bits])))

    def close(self, *, failed: bool = False) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close(failed=failed)

    def _touched(self, fragment: Fragment) -> list[tuple[int, Box, Box]]:
        """First slot and box of each run of cut blocks that a fragment of codes touches, with the common part."""
        found: list[tuple[int, Box, Box]] = []
        if fragment.name not in self._slots.of or not volume(fragment.box):
            return found
        box = blocks.scale_box(fragment.box, self._slots.formats[fragment.name].block)
        first, boxes = self._slots.of[fragment.name]
        for whole in boxes:
            common = intersect(whole, box)
            if common is not None:
                found.append((first, whole, common))
            first += volume(whole)
        return found

    def _own(self, fragment: Fragment, box: Box) -> tuple[PartialScales, torch.Tensor]:
        """How the scales of a fragment's own elements are made, and where they go."""
        encoding: object = fragment.encoding
        if isinstance(encoding, PartialCodes):
            return PartialScales(encoding.method, encoding.head), encoding.scales
        format = self._slots.formats[fragment.name]
        cut: PartialBlocks | None = None
        if isinstance(encoding, Codes):
            cut = format.partial_blocks(encoding.method.rounded)
        if cut is None:
            raise PlanError(
                f"this rank keeps {fragment.box} of it quantized, and another holds parts of the same blocks unquantized, so "
                "that nobody knows their maxima; nothing was written. Let all trainer ranks keep it alike, or set "
                "policy.refit.trainer_quantize_fp8 to false",
                stage="bind",
                parameter=fragment.name,
            )
        # Whole blocks here, parts of which lie on other ranks as well: these need all of their elements.
        scales = torch.full([b - a for a, b in box], float("nan"), dtype=torch.float32, device=self._device)
        return PartialScales(cut, part_head(fragment.box, format)), scales


def _cut(held: Sequence[Box], shape: Sequence[int], block: tuple[int, int], name: str) -> tuple[Box, ...]:
    """Disjoint boxes of the scales whose blocks some held box cuts."""
    found: list[Box] = []
    for box in held:
        for cut in blocks.straddled(box, shape, block):
            found += subtract_all(cut, found)
    for box in found:
        elements = tuple((a * b, min(e * b, n)) for (a, e), b, n in zip(box, block, shape, strict=True))
        gap = coverage_gap(elements, held)
        if gap is not None:
            raise PlanError(
                f"no trainer rank holds {gap}, so the maxima of blocks in {elements} are not known; nothing was written. A "
                "shard rule leaves a hole: refuse the weight in the source so that it takes the misc path",
                stage="plan",
                parameter=name,
            )
    return tuple(found)


def _positions(box: Box, part: Box) -> npt.NDArray[np.int64]:
    """Places of ``part`` in a contiguous matrix that holds ``box``, row by row."""
    (top, _), (left, right) = box
    (first, last), (begin, end) = part
    rows = np.arange(first - top, last - top, dtype=np.int64)[:, None]
    return (rows * (right - left) + np.arange(begin - left, end - left, dtype=np.int64)).reshape(-1)


def _indices(found: Sequence[npt.NDArray[np.int64]], device: torch.device) -> torch.Tensor:
    joined = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    return torch.from_numpy(joined).to(device)
