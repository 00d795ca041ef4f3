"""MXFP4 of many parts of weights at a time: on a GPU by one kernel launch for each source dtype and layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..packing.tables import Launch
from . import mxfp4
from .four_bits import Packing, PackJob, make_table, wide

_BLOCKS, _WARPS = 128, 4


def _launches(
    jobs: Sequence[PackJob], dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor | None, Launch]]:
    from .fp8_kernels import WORDS
    from .mxfp4_kernels import quantize_mxfp4

    kinds: dict[tuple[torch.dtype, bool, int], list[PackJob]] = {}
    for job in jobs:
        if job.source.numel():
            down = job.source.stride(0) < job.source.stride(1)
            kinds.setdefault((job.source.dtype, down, wide(job.source)), []).append(job)
    launches: list[tuple[torch.Tensor | None, Launch]] = []
    for (source, down, unit), chosen in kinds.items():
        heights = [job.source.shape[0] for job in chosen]
        table = make_table(chosen, mxfp4.BLOCK, torch.uint8, heights, _BLOCKS)
        constants = WORDS[str(source)], _BLOCKS, dtype != source, down, unit
        launches.append((None, Launch(quantize_mxfp4, _WARPS, table, constants, device, ())))
    return launches


# Scales of its jobs are ``uint8``, and :meth:`.four_bits.Packer.launch` takes none.
MXFP4 = Packing(mxfp4.quantize, _launches)
