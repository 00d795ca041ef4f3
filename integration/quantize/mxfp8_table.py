"""MXFP8 of many parts of weights in one kernel launch per source dtype and alignment, prepared once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..packing.tables import Launch, Launches
from .fp8_table import COLUMNS, Checked, checked, has_e4m3, make_table, unit_of
from .jobs import QuantizeJob, of_whole_blocks
from .mxfp8 import BLOCK, Rounding

_BLOCKS, _WARPS = 128, 4


class Mxfp8Table(Launches):
    """Quantizations of memory that stays in place; the same bytes as :func:`.mxfp8.quantize`.

    Targets may be a peer's memory that is mapped. No source is kept.
    """

    @staticmethod
    def build(
        jobs: Iterable[QuantizeJob], device: torch.device, rounding: Rounding, round_to_bf16: bool = False
    ) -> Mxfp8Table:
        """Compile the kernel for what the jobs need, and put their addresses on the device.

        Args:
            jobs: of weights in BF16, FP16 or FP32, of whole blocks.
            device: that reads and writes them.
            rounding: which power of two is a block's scale.
            round_to_bf16: weights are exported in BF16, whatever they are kept in.

        Raises:
            ValueError: shapes or dtypes do not fit, a job cuts blocks, or several elements of a result share a place.
        """
        from ..packing.kernels import FLOATS
        from .mxfp8_kernels import quantize_mxfp8

        groups: dict[tuple[torch.dtype, int], list[Checked]] = {}
        nbytes = 0
        for job in of_whole_blocks(jobs, BLOCK):
            found = checked(job, (1, BLOCK), torch.uint8)
            nbytes += job.nbytes
            groups.setdefault((job.source.dtype, unit_of(found)), []).append(found)
        saturates, converts = rounding is Rounding.DOWN, has_e4m3(device)
        launches = []
        for (dtype, unit), group in groups.items():
            constants = (COLUMNS, FLOATS[dtype], _BLOCKS, saturates, round_to_bf16, unit, converts)
            table = make_table(group, unit, _programs)
            launches.append(Launch(quantize_mxfp8, _WARPS, table, constants, device, ()))
        return Mxfp8Table(launches, nbytes)


def _programs(height: int, width: int) -> int:
    return -(-height * (width // BLOCK) // _BLOCKS)
