"""Parts of weights that are packed in four bits, many in one kernel launch, prepared once: what the formats' tables share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..packing.rows import Table
from ..packing.tables import Launch

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


class Packer(Protocol):
    """Prepared quantizations of parts that stay where they are; the same bytes as the format's ``quantize``."""

    def launch(self, *scales: torch.Tensor) -> None:
        """Do them all; on a GPU, enqueue them on the current stream.

        Args:
            scales: what the format's ``quantize`` takes beside a weight, by part: NVFP4's global scales, FP32 ``[parts]``.
        """


@dataclass(frozen=True)
class Packing:
    """How weights are packed in one format.

    Attributes:
        quantize: by torch: codes and blocks' scales of a weight.
        launches: of its kernel, for jobs that are exported in a dtype and all lie on the device; each with the places of its jobs among
            them, None for all.
    """

    quantize: Callable[..., tuple[torch.Tensor, ...]]
    launches: Callable[
        [Sequence[PackJob], torch.dtype, torch.device], list[tuple[torch.Tensor | None, Launch]]
    ]


def make_packer(
    packing: Packing,
    jobs: Sequence[PackJob],
    dtype: torch.dtype,
    device: torch.device,
    interpret: bool = False,
) -> Packer:
    """Of weights that are exported in ``dtype``, to which they are rounded first.

    Args:
        packing: of the format.
        jobs: whose targets are on ``device``.
        dtype: BF16, FP16 or FP32.
        device: that computes.
        interpret: whether Triton interprets the kernel on a CPU, in tests.
    """
    there = interpret or (device.type == "cuda" and all(job.source.device == device for job in jobs))
    if there and all(dtype in (torch.bfloat16, job.source.dtype) for job in jobs):
        return DevicePacker(packing.launches(jobs, dtype, device))
    return TorchPacker(packing.quantize, jobs, dtype)


class TorchPacker:
    """By torch, one part after another: on CPUs, of sources that lie elsewhere, and of rounding that the kernel has not."""

    def __init__(
        self, quantize: Callable[..., tuple[torch.Tensor, ...]], jobs: Sequence[PackJob], dtype: torch.dtype
    ):
        self._quantize, self._jobs, self._dtype = quantize, list(jobs), dtype

    @torch.no_grad()
    def launch(self, *scales: torch.Tensor) -> None:
        """As :meth:`Packer.launch`."""
        for job, *own in zip(self._jobs, *(each.unbind() for each in scales), strict=True):
            codes, made, *_ = self._quantize(job.source.to(job.codes.device, self._dtype), *own)
            job.codes.copy_(codes)
            job.scales.copy_(made)


class DevicePacker:
    """By the format's kernel."""

    def __init__(self, launches: Sequence[tuple[torch.Tensor | None, Launch]]):
        self._launches = launches

    def launch(self, *scales: torch.Tensor) -> None:
        """As :meth:`Packer.launch`."""
        for which, launch in self._launches:
            launch(*(each if which is None else each[which] for each in scales))


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
