"""Blockwise FP8 of many weights in one kernel launch per source dtype and alignment, prepared once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from . import blocks
from .fp8_blockwise import AMAX_FLOOR, BLOCK, ScaleFormat

_COLUMNS = 12
# 128×128 FP32 values are 64 registers a thread.
_WARPS = 8
# Elements: 16 bytes of codes.
_UNIT = 16


@dataclass(frozen=True, eq=False)
class Quantization:
    """A weight or a shard that cuts no block, and where its codes and scales go; any strides.

    Attributes:
        weight: ``[..., rows, columns]``, BF16, FP16 or FP32.
        codes: ``float8_e4m3fn``, of the same shape.
        scales: FP32, ``[..., ceil(rows / 128), ceil(columns / 128)]``.
    """

    weight: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


class Fp8Table:
    """Quantizations of memory that stays in place; the same bytes as :func:`.fp8_blockwise.quantize`."""

    def __init__(self, launches: list[Any], kept: list[Quantization]):
        self._launches = launches
        self._kept = kept

    @staticmethod
    def build(
        items: Iterable[Quantization], device: torch.device, scale: ScaleFormat = ScaleFormat.FP32
    ) -> Fp8Table:
        """Compile the kernel for what the items need, and put their addresses on the device.

        Raises:
            ValueError: an item's shapes or dtypes do not fit, or several elements of its result share a place.
        """
        from .fp8_kernels import WORDS, quantize_blocks

        kept = [item for item in items if _checked(item).weight.numel()]
        groups: dict[tuple[str, int], list[Quantization]] = {}
        for item in kept:
            groups.setdefault((str(item.weight.dtype), _unit(item)), []).append(item)
        launches = []
        for (dtype, unit), group in groups.items():
            tiles, rows = _table(group)
            arguments = (
                torch.tensor(tiles, dtype=torch.int32, device=device),
                torch.tensor(rows, dtype=torch.int64, device=device),
                *(_COLUMNS, WORDS[dtype], BLOCK[0], AMAX_FLOOR, scale is ScaleFormat.UE8M0, unit),
            )
            if device.type == "cuda":
                with torch.cuda.device(device):
                    compiled = quantize_blocks.warmup(*arguments, grid=(len(tiles),), num_warps=_WARPS)
                    launches.append(partial(compiled[(len(tiles), 1, 1)], *arguments))
            else:  # Triton's interpreter, in tests
                launches.append(partial(quantize_blocks[(len(tiles),)], *arguments))
        return Fp8Table(launches, kept)

    def launch(self) -> None:
        """Enqueue the quantizations on the current stream."""
        for launch in self._launches:
            launch()


def _unit(item: Quantization) -> int:
    """Elements that one access can move: 16, or 1 where rows are not contiguous or not aligned to that."""
    aligned = item.weight.shape[-1] % _UNIT == 0
    for tensor in (item.weight, item.codes):
        aligned &= tensor.stride(-1) == 1 and tensor.data_ptr() % (_UNIT * tensor.element_size()) == 0
        aligned &= all(stride % _UNIT == 0 for stride in tensor.stride()[:-1])
    return _UNIT if aligned else 1


def _table(items: Iterable[Quantization]) -> tuple[list[int], list[list[int]]]:
    """The row of each program, and the rows: addresses, sizes, strides, and the row's first program."""
    tiles: list[int] = []
    rows: list[list[int]] = []
    for item in items:
        for index in product(*map(range, item.weight.shape[:-2])):
            w, q, s = (t[index] for t in (item.weight, item.codes, item.scales))
            at = [w.data_ptr(), q.data_ptr(), s.data_ptr(), *w.shape, *w.stride(), *q.stride(), *s.stride()]
            tiles += [len(rows)] * s.numel()
            rows.append([*at, len(tiles) - s.numel()])
    return tiles, rows


def _checked(item: Quantization) -> Quantization:
    blocks.check_weight(item.weight, BLOCK)
    wanted = (
        ("codes", item.codes, torch.float8_e4m3fn, tuple(item.weight.shape)),
        ("scales", item.scales, torch.float32, blocks.scale_shape(item.weight.shape, BLOCK)),
    )
    for what, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"the {what} of a weight of shape {tuple(item.weight.shape)} are {dtype} of shape {shape}, not "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if tensor.device != item.weight.device:
            raise ValueError(f"the {what} are on {tensor.device} and the weight on {item.weight.device}")
        if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"several elements of the {what} share one place; hand over a tensor that was not expanded"
            )
    return item
