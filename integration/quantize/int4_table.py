"""INT4 of many parts of weights in one kernel launch per source dtype and alignment, prepared once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from ..packing.tables import Launch, Launches
from .fp8_table import COLUMNS, Checked, checked, make_table, unit_of
from .int4 import BY_HALF_RANGE, BY_LARGEST, PER_ITEM, check_group
from .jobs import QuantizeJob, of_whole_blocks

_ELEMENTS, _WARPS = 4096, 4
# Rows whose codes lie beside each other, of one program: 256 bytes of codes, 128 of scales.
_DOWN = 64


class Int4Table(Launches):
    """Quantizations of memory that stays in place; the same bytes as :func:`.int4.quantize`.

    Targets may be a peer's memory that is mapped. No source is kept.
    """

    @staticmethod
    def build(
        jobs: Iterable[QuantizeJob],
        device: torch.device,
        group: int,
        round_to_bf16: bool = False,
        scale_rule: str = BY_HALF_RANGE,
    ) -> Int4Table:
        """Compile the kernel for what the jobs need, and put their addresses on the device.

        Args:
            jobs: of weights in BF16, FP16 or FP32, of whole groups.
            device: that reads and writes them.
            group: elements of a row that share a scale, one of :data:`.int4.GROUPS`.
            round_to_bf16: weights are exported in BF16, whatever they are kept in.
            scale_rule: for scales, one of :data:`..config.INT4_SCALES`.

        Raises:
            ValueError: shapes or dtypes do not fit, a job cuts groups, or several elements of a result share a place.
        """
        from ..packing.kernels import FLOATS
        from .int4_kernels import quantize_int4

        check_group(group)
        groups: dict[tuple[torch.dtype, int, int], list[Checked]] = {}
        nbytes = 0
        for job in of_whole_blocks(jobs, group):
            kind = torch.bfloat16 if round_to_bf16 else job.source.dtype
            found = checked(job, (1, group), kind, torch.int32, PER_ITEM)
            nbytes += job.nbytes
            down = min(_DOWN, _ELEMENTS // group) if _transposed(found) else 0
            groups.setdefault((job.source.dtype, unit_of(found, PER_ITEM, down > 0), down), []).append(found)
        launches = []
        for (dtype, unit, down), chosen in groups.items():
            kind = torch.bfloat16 if round_to_bf16 else dtype
            constants = (
                *(COLUMNS, FLOATS[dtype], _ELEMENTS // group, group),
                *(
                    FLOATS[kind],
                    torch.finfo(kind).eps,
                    scale_rule == BY_LARGEST,
                    dtype != kind,
                    unit,
                    down,
                ),
            )
            table = make_table(chosen, unit, partial(_programs, group, down))
            launches.append(Launch(quantize_int4, _WARPS, table, constants, device, ()))
        return Int4Table(launches, nbytes)


def _transposed(found: Checked) -> bool:
    """Whether the codes of a column lie beside each other, as in the memory of vLLM's and SGLang's experts."""
    codes = found[2]
    return codes.strides[0] == codes.itemsize < codes.strides[1]


def _programs(group: int, down: int, height: int, width: int) -> int:
    across = width // group
    if not down:
        return -(-height * across * group // _ELEMENTS)
    return -(-height // down) * -(-across * group * down // _ELEMENTS)
