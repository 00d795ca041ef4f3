"""NVFP4 of many parts of weights at a time: on a GPU by one kernel launch for each source dtype and alignment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..packing.tables import Launch
from . import nvfp4
from .four_bits import Packing, PackJob, make_table, wide

_BLOCKS, _WARPS = 256, 4


def _launches(
    jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor | None, Launch]]:
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
    launches: list[tuple[torch.Tensor | None, Launch]] = []
    for (source, unit, flat), chosen in kinds.items():
        constants = (WORDS[str(source)], _BLOCKS, nvfp4.E4M3_TINIEST, dtype != source, unit, flat, most)
        parts = [jobs[index] for index in chosen]
        counted = [part.source.numel() // nvfp4.BLOCK for part in parts]
        table = make_table(parts, nvfp4.BLOCK, torch.float8_e4m3fn, counted, _BLOCKS)
        launch = Launch(quantize_nvfp4, _WARPS, table, constants, device, (like,))
        which = torch.tensor(chosen, device=device) if len(chosen) < len(jobs) else None
        launches.append((which, launch))
    return launches


def _most(dtype: torch.dtype, device: torch.device) -> float:
    """Up to which global scale no quotient of a weight underflows; 0 where Triton's interpreter rounds products before sums."""
    if device.type != "cuda":
        return 0.0
    return {torch.bfloat16: 2.0**7, torch.float16: 2.0**7}.get(dtype, 2.0**-9)


# Scales of its jobs are ``float8_e4m3fn``, and :meth:`.four_bits.Packer.launch` takes the global scales.
NVFP4 = Packing(nvfp4.quantize, _launches)
