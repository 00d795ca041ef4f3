"""MXFP4 of many parts of weights at a time: on a GPU by one kernel launch for each source dtype and layout, prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..packing.tables import Launch
from . import mxfp4
from .four_bits import PackJob, make_table, on_kernel, wide

_BLOCKS, _WARPS = 128, 4


class Mxfp4Packer(Protocol):
    """Prepared quantizations of parts that stay where they are; the same bytes as :func:`.mxfp4.quantize`."""

    def launch(self) -> None:
        """Do them all; on a GPU, enqueue them on the current stream."""


def make_packer(
    jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device, interpret: bool = False
) -> Mxfp4Packer:
    """Of weights that are exported in ``dtype``, to which they are rounded first.

    Args:
        jobs: whose targets are on ``device``; scales are ``uint8``.
        dtype: BF16, FP16 or FP32.
        device: that computes.
        interpret: whether Triton interprets the kernel on a CPU, in tests.
    """
    if on_kernel(jobs, dtype, device, interpret):
        return DevicePacker(jobs, dtype, device)
    return TorchPacker(jobs, dtype)


class TorchPacker:
    """By torch, one part after another: on CPUs, of sources that lie elsewhere, and of rounding that the kernel has not."""

    def __init__(self, jobs: Sequence[PackJob], dtype: torch.dtype):
        self._jobs, self._dtype = list(jobs), dtype

    @torch.no_grad()
    def launch(self) -> None:
        """As :meth:`Mxfp4Packer.launch`."""
        for job in self._jobs:
            codes, scales = mxfp4.quantize(job.source.to(job.codes.device, self._dtype))
            job.codes.copy_(codes)
            job.scales.copy_(scales)


class DevicePacker:
    """By Triton's kernel."""

    def __init__(self, jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device):
        from .fp8_kernels import WORDS
        from .mxfp4_kernels import quantize_mxfp4

        kinds: dict[tuple[torch.dtype, bool, int], list[PackJob]] = {}
        for job in jobs:
            if job.source.numel():
                down = job.source.stride(0) < job.source.stride(1)
                kinds.setdefault((job.source.dtype, down, wide(job.source)), []).append(job)
        self._launches = []
        for (source, down, unit), chosen in kinds.items():
            heights = [job.source.shape[0] for job in chosen]
            table = make_table(chosen, mxfp4.BLOCK, torch.uint8, heights, _BLOCKS)
            constants = WORDS[str(source)], _BLOCKS, dtype != source, down, unit
            self._launches.append(Launch(quantize_mxfp4, _WARPS, table, constants, device, ()))

    def launch(self) -> None:
        """As :meth:`Mxfp4Packer.launch`."""
        for launch in self._launches:
            launch()
