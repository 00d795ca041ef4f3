"""NVFP4 of many parts of weights in one kernel launch per source dtype and alignment, prepared once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import numpy as np
import torch

from ..packing.strided import Strided
from ..packing.tables import Launch, Launches
from . import nvfp4
from .fp8_table import COLUMNS, Checked, checked, make_table, unit_of
from .jobs import QuantizeJob, of_whole_blocks
from .nvfp4 import BLOCK, PER_BYTE

_BLOCKS, _WARPS = 256, 4
# Elements of a row, which the kernel counts in 32 bits.
_LONGEST = (1 << 31) - _BLOCKS * BLOCK


class Nvfp4Table(Launches):
    """Quantizations of memory that stays in place; the same bytes as :func:`.nvfp4.quantize` of weights.

    Targets may be a peer's memory that is mapped. No source is kept, nor a global scale.
    """

    @staticmethod
    def build(jobs: Iterable[QuantizeJob], device: torch.device, round_to_bf16: bool = False) -> Nvfp4Table:
        """Compile the kernel for what the jobs need, and put their addresses on the device.

        Args:
            jobs: of weights in BF16, FP16 or FP32, of whole blocks, with global scales.
            device: that reads and writes them, global scales too.
            round_to_bf16: weights are exported in BF16, whatever they are kept in.

        Raises:
            ValueError: shapes or dtypes do not fit, a job cuts blocks or has no global scale, or several elements of a result share a
                place.
        """
        from ..packing.kernels import FLOATS
        from .nvfp4_kernels import most_global_scale, quantize_nvfp4

        groups: dict[tuple[torch.dtype, int, bool], list[Checked]] = {}
        nbytes = 0
        for job in of_whole_blocks(jobs, BLOCK):
            found = checked(job, (1, BLOCK), torch.float8_e4m3fn, torch.uint8, PER_BYTE)
            nbytes += job.nbytes
            in_one_row = _in_one_row(found)
            found = in_one_row or found
            unit = unit_of(found, PER_BYTE)
            # Without columns' strides only where they are known to be 1.
            groups.setdefault((job.source.dtype, unit, in_one_row is not None and unit > 1), []).append(found)
        launches = []
        for (dtype, unit, flat), group in groups.items():
            rounds = round_to_bf16 and dtype != torch.bfloat16
            most = most_global_scale(torch.bfloat16 if round_to_bf16 else dtype, device)
            constants = (
                COLUMNS + 2,
                FLOATS[dtype],
                _BLOCKS,
                nvfp4.E4M3_TINIEST,
                rounds,
                unit,
                flat,
                most,
            )
            table = make_table(group, unit, _programs)
            addresses = np.array([_scalars(job) for job, *_ in group], dtype=np.int64)
            table = table._replace(rows=np.column_stack([table.rows, addresses]))
            launches.append(Launch(quantize_nvfp4, _WARPS, table, constants, device, ()))
        return Nvfp4Table(launches, nbytes)


def _programs(height: int, width: int) -> int:
    return -(-height * (width // BLOCK) // _BLOCKS)


def _scalars(job: QuantizeJob) -> tuple[int, int]:
    """The addresses of the global scale, and of where the largest magnitude is noted, or 0."""
    if job.global_scale is None:
        raise ValueError("a part of a weight has no global scale, by which NVFP4 is made")
    found = job.global_scale.found
    return job.global_scale.value.data_ptr(), 0 if found is None else found.data_ptr()


def _in_one_row(found: Checked) -> Checked | None:
    """The same with one row of weights behind the other, if they lie so, and so does all that is made of them."""
    job, *memory = found
    source, codes, _ = memory
    height, width = source.shape
    whole = codes.shape in ((0, 0), (height, width // PER_BYTE))
    if not whole or height * width > _LONGEST or not all(one.contiguous for one in memory if one.nbytes):
        return None
    in_a_row = [Strided.packed(one.address, (1, prod(one.shape)), one.itemsize) for one in memory]
    source, codes, scales = in_a_row
    return replace(job, source=job.source.reshape(1, -1)), source, codes, scales
