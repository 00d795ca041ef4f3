"""Parts of weights that cut FP8 blocks: the scales that the parts would have, and codes by scales that are known.

Who holds a part of a block does not know its scale. But the largest of the scales that its parts would have is the block's
(:mod:`.fp8_blockwise`), and :mod:`..engine.shared_scales` has all holders take that maximum before codes are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..layout import Box, box_of
from ..packing.encoded import EncodedPair, EncodedView, Encoder
from ..packing.host import WeakView
from . import blocks, fp8_blockwise
from .fp8_table import Fp8Table, has_kernel
from .jobs import QuantizeJob, Target, as_tensor


@dataclass(frozen=True)
class PartialBlocks:
    """How parts of weights are quantized: a :class:`..packing.encoded.EncodingMethod`.

    Attributes:
        grid: rows and columns of a block.
        scale: what scales may be.
        rounded: the type in which weights are exported, if they are kept in another.
    """

    grid: tuple[int, int]
    scale: fp8_blockwise.ScaleFormat
    rounded: torch.dtype | None

    @property
    def block(self) -> tuple[int, ...]:
        """None: elements are computed one by one where scales are known."""
        return ()

    def has_kernel(self, source: torch.dtype) -> bool:
        return has_kernel(self.grid, self.rounded)

    def prepare(self, pairs: Sequence[EncodedPair], device: torch.device) -> Encoder:
        jobs = []
        for view, target in pairs:
            assert isinstance(view.encoding, PartialCodes | PartialScales), (
                "pairs come grouped by their method"
            )
            if view.nbytes:
                jobs.append(view.encoding.job(view, target))
        if device.type == "cuda" and has_kernel(self.grid, self.rounded):
            return Fp8Table.build(jobs, device, self.scale, self.rounded is not None)
        return _TorchEncoder(jobs, self)


@dataclass(frozen=True, eq=False)
class PartialCodes:
    """The codes of a part by scales in memory: an :class:`..layout.Encoding`.

    Attributes:
        method: how they are made.
        head: row and column at which the part begins in its first block.
        scales: FP32, of the blocks that the part touches; they are there before anything is packed.
    """

    method: PartialBlocks
    head: tuple[int, int]
    scales: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    @property
    def unit(self) -> tuple[int, ...]:
        return ()

    def shape(self, view: Sequence[int]) -> tuple[int, ...]:
        return tuple(view)

    def job(self, view: EncodedView, target: Target) -> QuantizeJob:
        """The part of a view that is read, with the scales of the blocks that it touches."""
        from_block = tuple((a + h, b + h) for (a, b), h in zip(view.window, self.head, strict=True))
        touched = blocks.scale_box(from_block, self.method.grid)
        (top, _), (left, _) = from_block
        down, right = self.method.grid
        return QuantizeJob(
            view.held[_index(view.window)],
            target,
            scales=self.scales[_index(touched)],
            head=(top % down, left % right),
        )


@dataclass(frozen=True)
class PartialScales:
    """The scales that a part would have if the blocks were no larger: an :class:`..layout.Encoding`.

    Attributes:
        method: how they are made.
        head: row and column at which the part begins in its first block.
    """

    method: PartialBlocks
    head: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def unit(self) -> tuple[int, ...]:
        return self.method.grid

    def shape(self, view: Sequence[int]) -> tuple[int, ...]:
        return blocks.scale_shape([n + h for n, h in zip(view, self.head, strict=True)], self.method.grid)

    def job(self, view: EncodedView, target: Target) -> QuantizeJob:
        """All of a view is read: its scales are always made at once."""
        assert view.window == box_of(self.shape(view.held.shape)), "scales of parts are made at once"
        return QuantizeJob(view.held, scales=target, head=self.head)


class _TorchEncoder:
    """Computes jobs that may cut blocks with torch, one after another. Keeps no source."""

    def __init__(self, jobs: Sequence[QuantizeJob], how: PartialBlocks):
        self._todo = [
            (WeakView(j.source), j.head or (0, 0), as_tensor(j.codes), as_tensor(j.scales)) for j in jobs
        ]
        self._how = how
        self.nbytes = sum(job.nbytes for job in jobs)

    def launch(self) -> None:
        """Compute and write all.

        Raises:
            RefitError: the memory of a source was freed.
        """
        how = self._how
        with torch.no_grad():
            for source, head, codes, scales in self._todo:
                assert scales is not None, "jobs that may cut blocks have scales beside them"
                weight = source.view() if how.rounded is None else source.view().to(how.rounded)
                if codes is None:
                    amax = fp8_blockwise.block_amax(weight, head, how.grid)
                    scales.copy_(fp8_blockwise.scales_of(amax, how.scale))
                else:
                    # What lies in host memory is computed there, with scales that ranks exchanged on their GPUs.
                    known = scales.to(weight.device)
                    codes.copy_(fp8_blockwise.codes_of(weight, known, head, how.grid))


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
