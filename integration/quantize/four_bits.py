"""Parts of weights that are packed in four bits, many in one kernel launch: what the formats' tables share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..packing.rows import Table

# Elements of an access that the kernels can widen, and the columns of a table's row.
UNIT = 16
COLUMNS = 8


@dataclass(frozen=True, eq=False)
class PackJob:
    """A part of a weight that cuts no block along its columns.

    Attributes:
        source: ``[rows, columns]`` in BF16, FP16 or FP32; any strides.
        codes: where codes go, contiguous ``[rows, columns / 2]``.
        scales: where blocks' scales go, contiguous ``[rows, columns / block]``.
    """

    source: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor

    def check(self, block: int, scale_dtype: torch.dtype) -> None:
        """Refuse targets that can't hold what is made.

        Raises:
            ValueError: says which.
        """
        height, width = self.source.shape
        for target, part, dtype in ((self.codes, 2, torch.uint8), (self.scales, block, scale_dtype)):
            if (
                tuple(target.shape) != (height, width // part)
                or target.dtype != dtype
                or not target.is_contiguous()
            ):
                raise ValueError(
                    f"{target.dtype}{list(target.shape)} can't hold what is made of a part of shape {[height, width]}"
                )
        if width % block:
            raise ValueError(f"{width} columns cut blocks of {block}")


def on_kernel(
    jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device, interpret: bool = False
) -> bool:
    """Whether a kernel packs ``jobs`` of weights that are exported in ``dtype``: all lie on a GPU, and it has their rounding."""
    there = interpret or (device.type == "cuda" and all(job.source.device == device for job in jobs))
    return there and all(dtype in (torch.bfloat16, job.source.dtype) for job in jobs)


def wide(source: torch.Tensor) -> int:
    """Elements that one access can move: 16, or 1 where rows are not contiguous or not aligned to that."""
    nbytes = UNIT * source.element_size()
    aligned = source.stride(1) == 1 and source.stride(0) % UNIT == 0 and source.data_ptr() % nbytes == 0
    return UNIT if aligned else 1


def make_table(
    jobs: Sequence[PackJob], block: int, scale_dtype: torch.dtype, counted: Sequence[int], at_once: int
) -> Table:
    """A row for each job: addresses, a number, blocks of a row of weights, strides in elements, and the first program.

    Args:
        jobs: of it.
        block: elements that share a scale.
        scale_dtype: of the scales.
        counted: the number of each row, which is the format's own.
        at_once: blocks that one program makes.
    """
    rows = np.empty((len(jobs), COLUMNS), dtype=np.int64)
    programs = []
    for row, job, number in zip(rows, jobs, counted, strict=True):
        height, width = job.source.shape
        job.check(block, scale_dtype)
        addresses = job.source.data_ptr(), job.codes.data_ptr(), job.scales.data_ptr()
        row[:7] = (*addresses, number, width // block, *job.source.stride())
        programs.append(-(-height * (width // block) // at_once))
    rows[:, 7] = np.cumsum([0, *programs])[:-1]
    return Table(UNIT, False, rows, np.repeat(np.arange(len(jobs), dtype=np.int32), programs), 0)
