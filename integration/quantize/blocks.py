"""Blocks that share a scale: their grid, the boxes of scales, maxima, and which blocks a shard cuts.

A block spans the last ``len(block)`` dimensions of a weight and one element of each dimension before
them, so the same arithmetic serves 128×128 blocks, runs of 32 or 16 elements, and stacked experts.
Block ``i`` of a dimension covers its elements ``[i·b, (i+1)·b)``; the last one may be smaller. The grid
is that of the full tensor: a shard says where in the full tensor it begins (``offset``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import RefitError
from ..layout.boxes import Box, subtract, volume

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def scale_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Shape of the scales of a whole weight of ``shape``."""
    return tuple(-(-n // b) for n, b in zip(shape, _full(block, len(shape)), strict=True))


def scale_box(box: Box, block: Sequence[int]) -> Box:
    """The scales that the weight's ``box`` needs, as a box of the full tensor of scales."""
    return tuple(
        (start // b, -(-stop // b) if stop > start else start // b)
        for (start, stop), b in zip(box, _full(block, len(box)), strict=True)
    )


def straddled(box: Box, shape: Sequence[int], block: Sequence[int]) -> list[Box]:
    """The blocks that reach beyond ``box``, as disjoint boxes of the full tensor of scales.

    Whoever holds only ``box`` of the weight of ``shape`` does not know these blocks' maxima. An empty list
    means that the box can be quantized alone, with the same bytes as a slice of the quantized full tensor.
    """
    if not volume(box):
        return []
    whole = tuple(
        (-(-start // b), -(-stop // b) if stop == n else stop // b)
        for (start, stop), n, b in zip(box, shape, _full(block, len(box)), strict=True)
    )
    return subtract(scale_box(box, block), whole)


def block_amax(
    weight: torch.Tensor, block: Sequence[int], offset: Sequence[int] | None = None
) -> torch.Tensor:
    """Largest magnitude of each block that ``weight`` touches: FP32, NaN where the block holds a NaN.

    Args:
        weight: BF16, FP16 or FP32, any strides; a whole weight or a shard of one.
        block: the block's extent in the last dimensions.
        offset: where the shard begins in the full tensor, in the dimensions of ``block``; only its position
            in a block counts. The maximum of a block that others hold parts of is partial: the elementwise
            maximum over the holders is the block's.

    Raises:
        ValueError: the weight's dtype or number of dimensions cannot be quantized.
    """
    check_weight(weight, block)
    head = [o % b for o, b in zip(offset or [0] * len(block), block, strict=True)]
    sizes = weight.shape[weight.dim() - len(block) :]
    tail = [-(h + n) % b for h, n, b in zip(head, sizes, block, strict=True)]
    padding = [p for pair in zip(reversed(head), reversed(tail), strict=True) for p in pair]
    blocks = torch.nn.functional.pad(weight.detach(), padding) if any(padding) else weight.detach()
    for dim, b in zip(range(-1, -1 - len(block), -1), reversed(block), strict=True):
        # The dimensions behind this one have been split in two already.
        at = 2 * dim + 1
        blocks = blocks.unflatten(at, (blocks.shape[at] // b, b))
    return blocks.abs().amax(dim=[-1 - 2 * i for i in range(len(block))]).float()


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Of all elements, read once and without memory of their size: FP32, a scalar; 0 without elements, NaN if one is."""
    return (
        torch.linalg.vector_norm(x.detach(), torch.inf).float()
        if x.numel()
        else x.new_zeros((), dtype=torch.float32)
    )


def spread(
    per_block: torch.Tensor, shape: Sequence[int], block: Sequence[int], offset: Sequence[int] | None = None
) -> torch.Tensor:
    """One value per element of a shard of ``shape`` from one value per block (those that the shard touches).

    Raises:
        ValueError: the number of blocks is not what such a shard touches.
    """
    start = [o % b for o, b in zip(offset or [0] * len(block), block, strict=True)]
    leading = len(shape) - len(block)
    wanted = (
        *shape[:leading],
        *(-(-(o + n) // b) if n else 0 for o, n, b in zip(start, shape[leading:], block, strict=True)),
    )
    if tuple(per_block.shape) != wanted:
        raise ValueError(
            f"{tuple(per_block.shape)} block values do not fit a shard of {tuple(shape)} that begins at {start} "
            f"of its first block: with blocks of {tuple(block)} it touches {wanted}; pass the shard's own scales"
        )
    for dim, b, o in zip(range(leading, len(shape)), block, start, strict=True):
        index = torch.arange(o, o + shape[dim], device=per_block.device) // b
        per_block = per_block.index_select(dim, index)
    return per_block


def require_finite(
    values: torch.Tensor,
    block: Sequence[int],
    name: str,
    offset: Sequence[int] | None = None,
    *,
    rank: int = -1,
) -> None:
    """Refuse NaN and infinities, by name and place. Waits for the device.

    Args:
        values: one of each block: what :func:`block_amax` gave, or scales that were made of it.
        block: the block's extent in the last dimensions.
        name: Hugging Face name of the weight.
        offset: where the shard begins in the full tensor, in the dimensions of ``block``.
        rank: refit-world rank, for the error.

    Raises:
        RefitError: a block holds one.
    """
    bad = (~torch.isfinite(values)).nonzero()
    if not len(bad):
        return
    first = bad[0].tolist()
    leading = len(first) - len(block)
    place = [str(i) for i in first[:leading]]
    for i, b, o in zip(first[leading:], block, offset or [0] * len(block), strict=True):
        i += o // b
        place.append(f"{i * b}:{(i + 1) * b}")
    raise not_finite(
        f"{len(bad)} of {values.numel()} blocks of {' by '.join(map(str, block))} hold NaN or infinity, the first at "
        f"[{', '.join(place)}] of the full tensor",
        name,
        rank,
    )


def not_finite(found: str, name: str, rank: int) -> RefitError:
    """The error of a weight with a block that is not finite: ``found`` says what is known of it."""
    return RefitError(
        f"{found}. Quantized, such a block is NaN as a whole, and so would be what the engine generates, so nothing of it may be served. "
        "Look for a diverged step before this refit, go back to the last good weights, and refit again",
        stage="quantize",
        rank=rank,
        parameter=name,
    )


def check_weight(weight: torch.Tensor, block: Sequence[int]) -> None:
    """Raises ValueError for a weight that has no such blocks."""
    if weight.dtype not in _FLOATS:
        raise ValueError(f"cannot quantize {weight.dtype}; give BF16, FP16 or FP32 weights")
    if weight.dim() < len(block):
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} has no blocks of {tuple(block)}; keep it in BF16"
        )
    if any(b < 1 for b in block):
        raise ValueError(f"blocks of {tuple(block)} are empty; every extent is at least 1")


def _full(block: Sequence[int], dims: int) -> tuple[int, ...]:
    """The block's extent in every dimension of the tensor."""
    if dims < len(block):
        raise ValueError(f"a tensor of {dims} dimensions has no blocks of {tuple(block)}; keep it in BF16")
    return (1,) * (dims - len(block)) + tuple(block)
