"""Blockwise FP8 of many parts of weights in one kernel launch per source dtype and alignment, prepared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from ..packing.rows import Table
from ..packing.strided import Strided
from ..packing.tables import Launch, Launches
from . import blocks
from .fp8_blockwise import AMAX_FLOOR, BLOCK, ScaleFormat
from .jobs import QuantizeJob, Target

COLUMNS = 16
# The fastest on an H200 of 4, 8 and 16, with any limit of registers: 94% of the copy rate for whole experts (8: 80%).
_WARPS = 4
# Elements: 16 bytes of codes.
_UNIT = 16
_NOWHERE = Strided(0, (0, 0), (0, 0), 1)
# A job with the memory of its source, its codes and its scales.
Checked = tuple[QuantizeJob, Strided, Strided, Strided]


def has_kernel(block: tuple[int, int], rounded: torch.dtype | None) -> bool:
    """Whether there is a kernel for such blocks of weights that are ``rounded`` to this type first."""
    return block == BLOCK and rounded in (None, torch.bfloat16)


class Fp8Table(Launches):
    """Quantizations of memory that stays in place; the same bytes as :func:`.fp8_blockwise.quantize`.

    Targets may be a peer's memory that is mapped. No source is kept.
    """

    @staticmethod
    def build(
        jobs: Iterable[QuantizeJob],
        device: torch.device,
        scale: ScaleFormat = ScaleFormat.FP32,
        round_to_bf16: bool = False,
    ) -> Fp8Table:
        """Compile the kernel for what the jobs need, and put their addresses on the device.

        Args:
            jobs: of weights in BF16, FP16 or FP32.
            device: that reads and writes them.
            scale: what scales may be.
            round_to_bf16: weights are exported in BF16, whatever they are kept in.

        Raises:
            ValueError: shapes or dtypes do not fit, or several elements of a result share a place.
        """
        from ..packing.kernels import FLOATS
        from .fp8_kernels import quantize_blocks

        groups: dict[tuple[torch.dtype, int, bool, bool], list[Checked]] = {}
        nbytes = 0
        for job in jobs:
            if not job.source.numel():
                continue
            found = checked(job, BLOCK, torch.float32)
            nbytes += job.nbytes
            key = job.source.dtype, unit_of(found), job.head is not None, job.reads_scales
            groups.setdefault(key, []).append(found)
        converts = has_e4m3(device)
        launches = []
        for (dtype, unit, cut, given), group in groups.items():
            constants = (
                *(COLUMNS, FLOATS[dtype], BLOCK[0], AMAX_FLOOR, scale is ScaleFormat.UE8M0, round_to_bf16),
                *(unit, converts, cut, given),
            )
            table = make_table(group, unit, _programs)
            launches.append(Launch(quantize_blocks, _WARPS, table, constants, device, ()))
        return Fp8Table(launches, nbytes)


def has_e4m3(device: torch.device) -> bool:
    """Whether a device has instructions for E4M3: GPUs from Ada on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def unit_of(found: Checked, packed: int = 1, transposed: bool = False) -> int:
    """Elements that one access can move: 16, or 1 where rows are not contiguous or not aligned to that.

    Args:
        found: a job.
        packed: elements behind one code.
        transposed: the codes' columns are contiguous, and only weights are accessed so.
    """
    job, source, codes, _ = found
    head = job.head or (0, 0)
    aligned = job.source.shape[1] % _UNIT == job.first[1] % (_UNIT // packed) == head[1] % _UNIT == 0
    for memory, unit in ((source, _UNIT), (_NOWHERE if transposed else codes, _UNIT // packed)):
        wide = unit * memory.itemsize
        aligned &= memory.address % wide == 0 and memory.strides[0] % wide == 0
        aligned &= memory is _NOWHERE or memory.strides[1] == memory.itemsize
    return _UNIT if aligned and codes.shape[1] % (_UNIT // packed) == 0 else 1


def _programs(height: int, width: int) -> int:
    return -(-height // BLOCK[0]) * -(-width // BLOCK[1])


def make_table(group: Sequence[Checked], unit: int, programs: Callable[[int, int], int]) -> Table:
    """A row for each job: addresses, sizes, strides in elements, the first program, the codes' part.

    Args:
        group: jobs of one launch.
        unit: elements that an access moves.
        programs: how many a job of some rows and columns takes.
    """
    rows = np.empty((len(group), COLUMNS), dtype=np.int64)
    counts = np.empty(len(group), dtype=np.int64)
    first = 0
    for row, (job, source, codes, scales) in enumerate(group):
        down, right = job.head or (0, 0)
        height, width = _touched(job)
        counts[row] = programs(height, width)
        top, left = job.first[0] + down, job.first[1] + right
        # Where the first block would begin, of which nothing before the job is read.
        begin = source.address - down * source.strides[0] - right * source.strides[1]
        rows[row] = (
            *(begin, codes.address, scales.address, height, width),
            *(stride // memory.itemsize for memory in (source, codes, scales) for stride in memory.strides),
            *(first, top, left, top + codes.shape[0], left + codes.shape[1]),
        )
        first += counts[row]
    tiles = np.repeat(np.arange(len(group), dtype=np.int32), counts)
    return Table(unit, False, rows, tiles, sum(job.nbytes for job, *_ in group))


def checked(
    job: QuantizeJob,
    block: tuple[int, int],
    scale_dtype: torch.dtype,
    code_dtype: torch.dtype = torch.float8_e4m3fn,
    packed: int = 1,
) -> Checked:
    """A job with its memory; what it lacks is at address 0.

    Args:
        job: of a matrix.
        block: rows and columns that share a scale.
        scale_dtype: of the scales.
        code_dtype: of the codes.
        packed: elements of a row behind one code.

    Raises:
        ValueError: shapes or dtypes do not fit, or several elements of a result share a place.
    """
    blocks.check_weight(job.source, block)
    height, width = job.source.shape
    codes = _memory(job.codes, "codes", code_dtype)
    scales = _memory(job.scales, "scales", scale_dtype)
    top, left = job.first
    if top + codes.shape[0] > height or (left + codes.shape[1]) * packed > width:
        raise ValueError(
            f"codes of shape {codes.shape} from {job.first} on do not lie inside a weight of shape {(height, width)}"
        )
    if job.head is not None and (
        job.scales is None or (codes is not _NOWHERE and codes.shape != (height, width))
    ):
        raise ValueError(
            f"a weight of shape {(height, width)} that may cut blocks is quantized as a whole, by scales beside it; codes of "
            f"shape {codes.shape} are wanted"
        )
    wanted = blocks.scale_shape(_touched(job), block)
    if scales is not _NOWHERE and scales.shape != wanted:
        raise ValueError(
            f"the scales of a weight of shape {(height, width)} are of shape {wanted}, not {scales.shape}"
        )
    return job, Strided.of(job.source), codes, scales


def _touched(job: QuantizeJob) -> tuple[int, int]:
    """Rows and columns of the job from the beginning of its first block on."""
    down, right = job.head or (0, 0)
    return job.source.shape[0] + down, job.source.shape[1] + right


def _memory(target: Target | None, what: str, dtype: torch.dtype) -> Strided:
    if target is None:
        return _NOWHERE
    if isinstance(target, torch.Tensor):
        if target.dtype != dtype:
            raise ValueError(f"the {what} are {dtype}, not {target.dtype}")
        target = Strided.of(target)
    if target.repeats:
        raise ValueError(
            f"several elements of the {what} share one place; hand over a tensor that was not expanded"
        )
    if target.itemsize != dtype.itemsize:
        raise ValueError(f"the {what} have items of {dtype.itemsize} bytes, not {target.itemsize}")
    return target
