"""True values of weights: any box of any weight in any version, computed anew without a trainer.

The benchmark compares what landed with them. A value depends on the weight's name, the element's place in the full
tensor and the version, so that bytes of another weight, place or refit differ. Both sides compute it and share nothing.
Values are finite, below 2 in size, and never the poison. The largest value of a block of 128 by 128 depends on the
block, over sixteen powers of two, so that scales of other blocks, weights and refits differ too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...integration.layout import Box, Fragment

# The integer type in which bits of each item size are made and compared.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# Elements computed at once; bounds the temporary memory at 512 MiB.
_CHUNK = 1 << 26
# Where the lower bits of the exponent lie, by item size: BF16's and FP32's.
_BINADE_AT = {2: 7, 4: 23}
_BINADES = 16
_BLOCK = 128
_CIRCLE = 1 << 31
_MULTIPLIER = -1640531535  # 2654435761, Knuth's multiplicative hash, as a signed 32-bit number


@dataclass(frozen=True)
class Change:
    """Steps in each of which a share of all elements has its lowest bit flipped, others in each step until all have been.

    Attributes:
        share: between 0 and 1.
        steps: that have been taken.
    """

    share: float
    steps: int = 0


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage as integers.

    Raises:
        ValueError: the dtype's size is not 1, 2 or 4 bytes.
    """
    size = tensor.element_size()
    if size not in _BITS:
        raise ValueError(f"the benchmark has no values for {tensor.dtype}; use a dtype of 1, 2 or 4 bytes")
    return tensor.view(_BITS[size])


def write(fragments: Iterable[Fragment], version: int) -> None:
    """Give every fragment its true values of ``version``."""
    for fragment in fragments:
        target = bits(fragment.view)
        for part, expected in _expected(fragment, version):
            target[part].copy_(expected)


def stacked(
    names: Sequence[str],
    full_shape: Sequence[int],
    box: Box,
    dtype: torch.dtype,
    device: torch.device,
    version: int,
    changes: Sequence[Change] = (),
) -> torch.Tensor:
    """True values of the same box of several weights of one shape, as :func:`wrong` has them: ``[len(names), *box]``."""
    if dtype.itemsize not in _BITS:
        raise ValueError(f"the benchmark has no values for {dtype}; use a dtype of 1, 2 or 4 bytes")
    return _box_bits(names, box, full_shape, dtype.itemsize, device, version, changes).view(dtype)


def change(fragments: Iterable[Fragment], taken: Change) -> None:
    """Take the last step of ``taken`` in place."""
    for fragment in fragments:
        target = bits(fragment.view)
        for part, box in _pieces(fragment):
            raw = _raw([fragment.name], box, fragment.full_shape or (1,), fragment.view.device)[0]
            flips = _flips(raw, taken.share, taken.steps - 1, 1)
            target[part].bitwise_xor_(flips.to(target.dtype).reshape(target[part].shape))


def advance(tensors: Iterable[torch.Tensor], old: int, new: int) -> None:
    """Turn values of version ``old`` into those of ``new``, in place: one cheap pass over each storage."""
    for tensor in tensors:
        raw = bits(tensor)
        raw.bitwise_xor_(_mask(old, tensor.element_size()) ^ _mask(new, tensor.element_size()))


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill storages with NaN (all bits set), which no true value is."""
    for tensor in tensors:
        bits(tensor).fill_(-1)


def wrong(fragments: Sequence[Fragment], version: int, changes: Sequence[Change] = ()) -> list[Fragment]:
    """The fragments that differ in any bit from their true values of a version, which ``changes`` were made to."""
    flags: list[torch.Tensor] = []
    owners: list[Fragment] = []
    for fragment in fragments:
        held = bits(fragment.view)
        for part, expected in _expected(fragment, version, changes):
            flags.append((held[part] != expected).any())
            owners.append(fragment)
    if not flags:
        return []
    found = torch.stack(flags).nonzero().flatten().tolist()
    return list({id(owners[i]): owners[i] for i in found}.values())


def poisoned(tensor: torch.Tensor) -> int:
    """Elements of a storage that still are poison."""
    return int((bits(tensor) == -1).sum())


def _expected(
    fragment: Fragment, version: int, changes: Sequence[Change] = ()
) -> Iterable[tuple[tuple[slice, ...], torch.Tensor]]:
    """True bits of a fragment in pieces along its first dimension: (index into the view, bits)."""
    place = fragment.view.element_size(), fragment.view.device, version, changes
    for index, piece in _pieces(fragment):
        found = _box_bits([fragment.name], piece, fragment.full_shape or (1,), *place)[0]
        yield index, found if fragment.box else found.reshape(())


def _pieces(fragment: Fragment) -> Iterable[tuple[tuple[slice, ...], Box]]:
    """A fragment in pieces along its first dimension: (index into the view, box; a scalar as a vector of one element)."""
    if not fragment.view.numel():
        return
    box = fragment.box
    if not box:
        yield (), ((0, 1),)
        return
    rows = box[0][1] - box[0][0]
    step = max(1, _CHUNK * rows // fragment.view.numel())
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        piece = ((box[0][0] + start, box[0][0] + stop), *box[1:])
        index = (slice(start, stop), *(slice(None),) * (len(box) - 1))
        yield index, piece


def _box_bits(
    names: Sequence[str],
    box: Box,
    full_shape: Sequence[int],
    itemsize: int,
    device: torch.device,
    version: int,
    changes: Sequence[Change] = (),
) -> torch.Tensor:
    values = _raw(names, box, full_shape, device)
    flips = [_flips(values, taken.share, 0, taken.steps) for taken in changes]
    (low, high) = box[-1]
    rows = _row_numbers(device, box[:-1], full_shape[:-1])
    # The upper bits are the well mixed ones. The top bit of the exponent stays clear.
    if itemsize < 4:
        values >>= 32 - 8 * itemsize
    if itemsize in _BINADE_AT:
        at = _BINADE_AT[itemsize]
        over = torch.arange(low, high, device=device) // _BLOCK
        across = _seeded(_hashes(device, -(-full_shape[-1] // _BLOCK), 3)[over], names, rows.dim())
        down = _hashes(device, -(-math.prod(full_shape[:-1]) // _BLOCK), 4)[rows // _BLOCK].unsqueeze(-1)
        binades = (down + across).mul_(_MULTIPLIER)
        binades.bitwise_right_shift_(28).bitwise_and_(_BINADES - 1).bitwise_left_shift_(at)
        values = values.bitwise_and_(~((_BINADES - 1) << at)).bitwise_or_(binades)
    values = values.bitwise_and_(~(1 << (8 * itemsize - 2))).bitwise_xor_(_mask(version, itemsize))
    made = values.to(_BITS[itemsize])
    for flip in flips:
        made.bitwise_xor_(flip.to(made.dtype))
    return made


def _raw(names: Sequence[str], box: Box, full_shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Hashes of elements by weight and place, int32 ``[len(names), *box]``; the upper bits are the well mixed ones."""
    (low, high) = box[-1]
    rows = _row_numbers(device, box[:-1], full_shape[:-1])
    columns = _seeded(_hashes(device, full_shape[-1], 1)[low:high], names, rows.dim())
    return (_hashes(device, math.prod(full_shape[:-1]), 2)[rows].unsqueeze(-1) + columns).mul_(_MULTIPLIER)


def _seeded(columns: torch.Tensor, names: Sequence[str], dims: int) -> torch.Tensor:
    seeds = [zlib.crc32(name.encode()) - (1 << 31) for name in names]
    shape = len(names), *(1,) * dims, len(columns)
    if len(seeds) == 1:  # without a copy to the device
        return (columns ^ seeds[0]).view(shape)
    return (columns ^ torch.tensor(seeds, dtype=torch.int32, device=columns.device).unsqueeze(-1)).view(shape)


def _flips(raw: torch.Tensor, share: float, first: int, steps: int) -> torch.Tensor:
    """Which elements ``steps`` steps flip, an odd number of times, from step ``first`` on, counted from 0.

    Each element has a place on a circle of 2^31, around which the steps go, each over the next ``share`` of it. In 32 bits,
    since this runs over all weights before each timed refit.
    """
    width = round(share * _CIRCLE)
    turns, rest = divmod(steps * width, _CIRCLE)
    ahead = raw * _MULTIPLIER
    inside = ahead.sub_(first * width % _CIRCLE).bitwise_and_(_CIRCLE - 1) < rest
    return inside.logical_not_() if turns % 2 else inside


def _row_numbers(device: torch.device, box: Box, shape: Sequence[int]) -> torch.Tensor:
    """The number of each row, counted over the leading dimensions, of the box's leading shape."""
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), size in zip(box, shape, strict=True):
        rows = rows.unsqueeze(-1) * size + torch.arange(start, stop, device=device)
    return rows


@lru_cache(maxsize=32)
def _hash_table(device: torch.device, size: int, salt: int) -> torch.Tensor:
    x = torch.arange(size, dtype=torch.int64, device=device)
    x = (x + salt * 0x51ED2701) * 0x2545F4914F6CDD1D
    x ^= (x >> 29) & ((1 << 35) - 1)
    x *= 0x369DEA0F31A53F85
    return ((x >> 32) & 0xFFFFFFFF).sub_(1 << 31).to(torch.int32)


def _hashes(device: torch.device, size: int, salt: int) -> torch.Tensor:
    # Powers of two, so that a few tables serve all shapes.
    return _hash_table(device, max(1 << 12, 1 << (size - 1).bit_length()), salt)[:size]


def _mask(version: int, itemsize: int) -> int:
    """Bits that tell a version from others, as a signed number of ``itemsize`` bytes."""
    width = 8 * itemsize
    mixed = (version + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    mixed ^= mixed >> 31
    value = (mixed >> (64 - width)) & ~(1 << (width - 2))
    return value - (1 << width) if value >> (width - 1) else value
