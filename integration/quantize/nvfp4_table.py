"""NVFP4 of many parts of weights at a time: on a GPU by one kernel launch for each source dtype and alignment, prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..packing.tables import Launch
from . import nvfp4
from .four_bits import PackJob, make_table, on_kernel, wide

_BLOCKS, _WARPS = 256, 4


class Nvfp4Packer(Protocol):
    """Prepared quantizations of parts that stay where they are; the same bytes as :func:`.nvfp4.quantize`."""

    def launch(self, scale_2: torch.Tensor) -> None:
        """Do them all, by each part's global scale: FP32 ``[parts]``. On a GPU, enqueue them on the current stream."""


def make_packer(
    jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device, interpret: bool = False
) -> Nvfp4Packer:
    """Of weights that are exported in ``dtype``, to which they are rounded first.

    Args:
        jobs: whose targets are on ``device``.
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
    def launch(self, scale_2: torch.Tensor) -> None:
        """As :meth:`Nvfp4Packer.launch`."""
        for job, own in zip(self._jobs, scale_2.unbind(), strict=True):
            codes, scales, _ = nvfp4.quantize(job.source.to(job.codes.device, self._dtype), own)
            job.codes.copy_(codes)
            job.scales.copy_(scales)


class DevicePacker:
    """By Triton's kernel."""

    def __init__(self, jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device):
        from .fp8_kernels import WORDS
        from .nvfp4_kernels import quantize_nvfp4

        most = _most(dtype, device)
        kinds: dict[tuple[torch.dtype, int, bool], list[int]] = {}
        for index, job in enumerate(jobs):
            if job.source.numel():
                unit = wide(job.source)
                flat = unit > 1 and job.source.is_contiguous()
                kinds.setdefault((job.source.dtype, unit, flat), []).append(index)
        like = torch.zeros(len(jobs), dtype=torch.float32, device=device)
        self._launches: list[tuple[torch.Tensor | None, Any]] = []
        for (source, unit, flat), chosen in kinds.items():
            constants = (WORDS[str(source)], _BLOCKS, nvfp4.E4M3_TINIEST, dtype != source, unit, flat, most)
            parts = [jobs[index] for index in chosen]
            counted = [part.source.numel() // nvfp4.BLOCK for part in parts]
            table = make_table(parts, nvfp4.BLOCK, torch.float8_e4m3fn, counted, _BLOCKS)
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
