"""MXFP4 of many parts of weights at a time, prepared once: on a GPU by one kernel launch for each source dtype and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..packing.rows import Table
from ..packing.tables import Launch, Launches
from . import mxfp4

_BLOCKS, _WARPS = 128, 4
# Elements of an access that the kernel can widen, and the columns of a table's row.
_UNIT = 16
_COLUMNS = 8


@dataclass(frozen=True, eq=False)
class PackJob:
    """A part of a weight that cuts no block along its columns.

    Attributes:
        source: ``[rows, columns]`` in BF16, FP16 or FP32; any strides.
        codes: where codes go, ``uint8``, contiguous ``[rows, columns / 2]``.
        scales: where blocks' scales go, ``uint8``, contiguous ``[rows, columns / 32]``.
    """

    source: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor

    def check(self) -> None:
        """Refuse targets that can't hold what is made.

        Raises:
            ValueError: says which.
        """
        height, width = self.source.shape
        for target, part in ((self.codes, 2), (self.scales, mxfp4.BLOCK)):
            if (
                tuple(target.shape) != (height, width // part)
                or target.dtype != torch.uint8
                or not target.is_contiguous()
            ):
                raise ValueError(
                    f"{target.dtype}{list(target.shape)} can't hold what is made of a part of shape {[height, width]}"
                )
        if width % mxfp4.BLOCK:
            raise ValueError(f"{width} columns cut blocks of {mxfp4.BLOCK}")


class Packer(Protocol):
    """Prepared quantizations of parts that stay where they are; the same bytes as :func:`.mxfp4.quantize`."""

    def launch(self) -> None:
        """Do them all; on a GPU, enqueue them on the current stream."""


def make_packer(
    jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device, interpret: bool = False
) -> Packer:
    """Of weights that are exported in ``dtype``, to which they are rounded first.

    Args:
        jobs: whose targets are on ``device``.
        dtype: BF16, FP16 or FP32.
        device: that computes.
        interpret: whether Triton interprets the kernel on a CPU, in tests.
    """
    there = interpret or (device.type == "cuda" and all(job.source.device == device for job in jobs))
    if there and all(dtype in (torch.bfloat16, job.source.dtype) for job in jobs):
        return Mxfp4Table.build(jobs, dtype, device)
    return TorchPacker(jobs, dtype)


class TorchPacker:
    """By torch, one part after another: on CPUs, of sources that lie elsewhere, and of rounding that the kernel has not."""

    def __init__(self, jobs: Sequence[PackJob], dtype: torch.dtype):
        self._jobs, self._dtype = list(jobs), dtype

    @torch.no_grad()
    def launch(self) -> None:
        """As :meth:`Packer.launch`."""
        for job in self._jobs:
            codes, scales = mxfp4.quantize(job.source.to(job.codes.device, self._dtype))
            job.codes.copy_(codes)
            job.scales.copy_(scales)


class Mxfp4Table(Launches):
    """By the kernel."""

    @staticmethod
    def build(jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device) -> Mxfp4Table:
        """Compile the kernel for what the jobs need, and put their addresses on the device.

        Args:
            jobs: on the device.
            dtype: in which weights are exported: their own, or BF16.
            device: that reads and writes them.

        Raises:
            ValueError: a target can't hold what is made.
        """
        from ..packing.kernels import FLOATS
        from .mxfp4_kernels import quantize_mxfp4

        kinds: dict[tuple[torch.dtype, bool, int], list[PackJob]] = {}
        for job in jobs:
            if job.source.numel():
                down = job.source.stride(0) < job.source.stride(1)
                kinds.setdefault((job.source.dtype, down, _wide(job.source)), []).append(job)
        launches = []
        for (source, down, unit), chosen in kinds.items():
            constants = FLOATS[source], _BLOCKS, dtype != source, down, unit
            launches.append(Launch(quantize_mxfp4, _WARPS, _make_table(chosen), constants, device, ()))
        return Mxfp4Table(launches, sum(job.codes.nbytes + job.scales.nbytes for job in jobs))


def _wide(source: torch.Tensor) -> int:
    """Elements that one access can move: 16, or 1 where rows are not contiguous or not aligned to that."""
    nbytes = _UNIT * source.element_size()
    aligned = source.stride(1) == 1 and source.stride(0) % _UNIT == 0 and source.data_ptr() % nbytes == 0
    return _UNIT if aligned else 1


def _make_table(jobs: Sequence[PackJob]) -> Table:
    """A row for each job: addresses, rows of weights, blocks of a row, strides in elements, and the first program."""
    rows = np.empty((len(jobs), _COLUMNS), dtype=np.int64)
    programs = []
    for row, job in zip(rows, jobs, strict=True):
        height, width = job.source.shape
        job.check()
        addresses = job.source.data_ptr(), job.codes.data_ptr(), job.scales.data_ptr()
        row[:7] = (*addresses, height, width // mxfp4.BLOCK, *job.source.stride())
        programs.append(-(-height * (width // mxfp4.BLOCK) // _BLOCKS))
    rows[:, 7] = np.cumsum([0, *programs])[:-1]
    return Table(_UNIT, False, rows, np.repeat(np.arange(len(jobs), dtype=np.int32), programs), 0)
