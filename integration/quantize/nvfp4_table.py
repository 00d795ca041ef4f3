"""NVFP4 of many parts of weights at a time: on a GPU by one kernel launch for each source dtype and alignment, prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..packing.rows import Table
from ..packing.tables import Launch
from . import nvfp4

_BLOCKS, _WARPS = 256, 4
_UNIT = 16


@dataclass(frozen=True, eq=False)
class Nvfp4Job:
    """A part of a weight that cuts no block of 16 columns.

    Attributes:
        source: ``[rows, columns]`` in BF16, FP16 or FP32; any strides.
        codes: where codes go, contiguous ``[rows, columns / 2]``.
        scales: where block scales go, contiguous ``[rows, columns / 16]``.
    """

    source: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


class Nvfp4Packer(Protocol):
    """Prepared quantizations of parts that stay where they are; the same bytes as :func:`.nvfp4.quantize`."""

    def launch(self, scale_2: torch.Tensor) -> None:
        """Do them all, by each part's global scale: FP32 ``[parts]``. On a GPU, enqueue them on the current stream."""


def make_packer(
    jobs: Sequence[Nvfp4Job], dtype: torch.dtype, device: torch.device, interpret: bool = False
) -> Nvfp4Packer:
    """Of weights that are exported in ``dtype``, to which they are rounded first.

    Args:
        jobs: whose targets are on ``device``.
        dtype: BF16, FP16 or FP32.
        device: that computes.
        interpret: whether Triton interprets the kernel on a CPU, in tests.
    """
    on_device = interpret or (device.type == "cuda" and all(job.source.device == device for job in jobs))
    if on_device and all(dtype in (torch.bfloat16, job.source.dtype) for job in jobs):
        return DevicePacker(jobs, dtype, device)
    return TorchPacker(jobs, dtype)


class TorchPacker:
    """By torch, one part after another: on CPUs, of sources that lie elsewhere, and of rounding that the kernel has not."""

    def __init__(self, jobs: Sequence[Nvfp4Job], dtype: torch.dtype):
        self._jobs, self._dtype = list(jobs), dtype

    @torch.no_grad()
    def launch(self, scale_2: torch.Tensor) -> None:
        """As :meth:`Nvfp4Packer.launch`."""
        for job, own in zip(self._jobs, scale_2.unbind(), strict=True):
            codes, scales, _ = nvfp4.quantize(job.source.to(job.codes.device, self._dtype), own)
            job.codes.copy_(codes)
            job.scales.copy_(scales)


class DevicePacker:
    """By Triton's kernel."""

    def __init__(self, jobs: Sequence[Nvfp4Job], dtype: torch.dtype, device: torch.device):
        from .fp8_kernels import WORDS
        from .nvfp4_kernels import quantize_nvfp4

        most = _most(dtype, device)
        kinds: dict[tuple[torch.dtype, int, bool], list[int]] = {}
        for index, job in enumerate(jobs):
            if job.source.numel():
                kinds.setdefault((job.source.dtype, *_lie(job.source)), []).append(index)
        like = torch.zeros(len(jobs), dtype=torch.float32, device=device)
        self._launches: list[tuple[torch.Tensor | None, Any]] = []
        for (source, unit, flat), chosen in kinds.items():
            constants = (WORDS[str(source)], _BLOCKS, nvfp4.E4M3_TINIEST, dtype != source, unit, flat, most)
            table = _table([jobs[index] for index in chosen])
            launch = Launch(quantize_nvfp4, _WARPS, table, constants, device, (like,))
            which = torch.tensor(chosen, device=device) if len(chosen) < len(jobs) else None
            self._launches.append((which, launch))

    def launch(self, scale_2: torch.Tensor) -> None:
        """As :meth:`Nvfp4Packer.launch`."""
        for which, launch in self._launches:
            launch(scale_2 if which is None else scale_2[which])


def _most(dtype: torch.dtype, device: torch.device) -> float:
    """Up to which global scale no quotient of a weight underflows; 0 where Triton's interpreter rounds products before sums."""
    if device.type != "cuda":
        return 0.0
    return {torch.bfloat16: 2.0**7, torch.float16: 2.0**7}.get(dtype, 2.0**-9)


def _lie(source: torch.Tensor) -> tuple[int, bool]:
    """Elements that one access can move, 16, or 1 where rows are not contiguous or not aligned to that; and if no gaps are in between."""
    wide = _UNIT * source.element_size()
    aligned = source.stride(1) == 1 and source.stride(0) % _UNIT == 0 and source.data_ptr() % wide == 0
    return (_UNIT, source.is_contiguous()) if aligned else (1, False)


def _table(jobs: Sequence[Nvfp4Job]) -> Table:
    rows = np.empty((len(jobs), 8), dtype=np.int64)
    counts = []
    for row, job in zip(rows, jobs, strict=True):
        height, width = job.source.shape
        blocks = height * (width // nvfp4.BLOCK)
        _check(job)
        row[:7] = (
            *(
                job.source.data_ptr(),
                job.codes.data_ptr(),
                job.scales.data_ptr(),
                blocks,
                width // nvfp4.BLOCK,
            ),
            *job.source.stride(),
        )
        counts.append(-(-blocks // _BLOCKS))
    rows[:, 7] = np.cumsum([0, *counts])[:-1]
    return Table(_UNIT, False, rows, np.repeat(np.arange(len(jobs), dtype=np.int32), counts), 0)


def _check(job: Nvfp4Job) -> None:
    height, width = job.source.shape
    for target, part, dtype in ((job.codes, 2, torch.uint8), (job.scales, nvfp4.BLOCK, torch.float8_e4m3fn)):
        if (
            tuple(target.shape) != (height, width // part)
            or target.dtype != dtype
            or not target.is_contiguous()
        ):
            raise ValueError(
                f"{target.dtype}{list(target.shape)} can't hold what is made of a part of shape {[height, width]}"
            )
    if width % nvfp4.BLOCK:
        raise ValueError(f"{width} columns cut blocks of {nvfp4.BLOCK}")
