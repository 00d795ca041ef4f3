"""Where an opaque step puts codes of four or eight bits, and the tiles in which they lie there.

Engines put packed weights in an order of their own for their kernels: two elements of a byte may go to different bytes, and a byte
that stands for a number may become another one that stands for it in the kernel. No strided view writes such an order. Run on the
numbers of elements, as :mod:`.rearrangement` does, the step tells where each element goes. An order that repeats from tile to tile
can then be made of loaded codes by one kernel (:mod:`..packing.reordering`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from .fragments import flat_bytes
from .rearrangement import NotRearranged, Rearrangement, Step, along_dimensions, told_places

# Elements of a tile: no smaller than a word of 32 bits, and as many as one program of the kernel can have.
_MOST_OF_TILE = 4096
# Elements of the last dimension that are written for one: whole bytes, and whole numbers of all types.
_COLUMNS = 8
# Bytes in which digits are looked for at a time, which takes some ten times as many.
_LOOKED_AT = 1 << 23


class Codes(Protocol):
    """How digits are written into elements of a tensor, and read where the step has put them.

    Attributes:
        shape: of the tensor, in elements.
        bits: of an element.
        base: how many digits there are.
    """

    shape: tuple[int, ...]
    bits: int
    base: int

    def write(self, digits: torch.Tensor) -> torch.Tensor:
        """A part of the tensor as the step takes it. ``digits``: uint8, each one more than it is; 0 for none, which is memory of zeros."""

    def read(self, made: torch.Tensor) -> torch.Tensor:
        """The digits of all elements in some of the bytes of what was made, in the order of memory; each one more than it is; 0 for none.

        Raises:
            NotRearranged: something else is there.
        """


@dataclass(frozen=True)
class Nibbles:
    """Codes of four bits along the last dimension, two in a byte, the even one in the low half.

    Attributes:
        dtype: of the tensor, whose items may have several bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.uint8
    bits: int = 4
    base: int = 15

    def write(self, digits: torch.Tensor) -> torch.Tensor:
        return (digits[..., 0::2] | (digits[..., 1::2] << 4)).view(self.dtype)

    def read(self, made: torch.Tensor) -> torch.Tensor:
        return torch.stack((made & 0xF, made >> 4), dim=-1).reshape(-1)


@dataclass(frozen=True)
class Letters:
    """Bytes that stand for numbers, of which the step may make other bytes, the same ones of equal bytes.

    Attributes:
        dtype: of the tensor, one byte an element.
        letters: bytes that stand for digits.
        become: what the step makes of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    letters: tuple[int, ...]
    become: tuple[int, ...]
    bits: int = 8

    @property
    def base(self) -> int:
        return len(self.letters)

    def write(self, digits: torch.Tensor) -> torch.Tensor:
        table = torch.tensor((0, *self.letters), dtype=torch.uint8, device=digits.device)
        return table[digits.int()].view(self.dtype)

    def read(self, made: torch.Tensor) -> torch.Tensor:
        table = torch.full((256,), -1, dtype=torch.int64, device=made.device)
        table[0] = 0
        for digit, byte in enumerate(self.become):
            table[byte] = digit + 1
        digits = table[made.int()]
        if bool((digits < 0).any()):
            raise NotRearranged("bytes became others than bytes of their value become")
        return digits


@dataclass(frozen=True)
class Bytes:
    """Numbers of several bytes, which the step leaves as they are: each byte counts as an element.

    Attributes:
        shape: of the tensor, whose last dimension is counted in bytes.
        dtype: of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int = 8
    base: int = 255

    def write(self, digits: torch.Tensor) -> torch.Tensor:
        return digits.view(self.dtype)

    def read(self, made: torch.Tensor) -> torch.Tensor:
        return made


def _bytes(made: torch.Tensor) -> torch.Tensor:
    if not made.is_contiguous():
        raise NotRearranged(
            f"it has become {made.dtype}{list(made.shape)} with strides {list(made.stride())}"
        )
    return flat_bytes(made)


def find_codes(
    step: Step,
    tensors: Mapping[str, Codes],
    beside: Callable[[], Mapping[str, torch.Tensor]],
    device: torch.device,
) -> dict[str, Rearrangement]:
    """Find out where ``step`` puts the elements of packed tensors, each of which stays in memory of its own.

    It is asked about the lines through the first element of each tensor alone. Whoever uses the answer has to compare what he makes
    by it with what the step makes of other values. Beside what the step takes and makes this needs little memory: an engine that asks
    has given most of its device to weights and caches.

    Args:
        step: the same for whatever values.
        tensors: by name.
        beside: new tensors of all other names that the step takes.
        device: on which the step works.

    Raises:
        NotRearranged: it does more than to put elements elsewhere, or in an order that is no sum over dimensions.
    """
    runs: dict[str, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {
        name: [[] for _ in codes.shape] for name, codes in tensors.items()
    }
    for dim in range(max(len(codes.shape) for codes in tensors.values())):
        powers = {n: digits_of(c.shape[dim], c.base) for n, c in tensors.items() if dim < len(c.shape)}
        for power in range(max(powers.values())):
            given = dict(beside())
            for name, codes in tensors.items():
                given[name] = _with_line(codes, dim, power if power < powers.get(name, 0) else None, device)
            made = step(given)
            for name, codes in tensors.items():
                now = made.get(name)
                if now is None:
                    raise NotRearranged(f"{name} no longer exists")
                if now.numel() * now.element_size() * 8 != prod(codes.shape) * codes.bits:
                    raise NotRearranged(f"{name} has become {now.dtype}{list(now.shape)}")
                if power < powers.get(name, 0):
                    runs[name][dim].append(_told(codes, now))
            # Before as much is made once more.
            del given, made, now
    return {name: along_dimensions(runs[name], codes.shape, codes.base) for name, codes in tensors.items()}


def _with_line(codes: Codes, dim: int, power: int | None, device: torch.device) -> torch.Tensor:
    """A tensor with one digit of the number of each element in the line through the first one; with None, without any."""
    *others, width = codes.shape
    last = dim == len(others)
    columns = width if last else min(width, _COLUMNS)
    digits = torch.zeros(
        (*(n if d == dim else 1 for d, n in enumerate(others)), columns), dtype=torch.uint8, device=device
    )
    if power is not None:
        numbers = torch.arange(codes.shape[dim], device=device)
        line = tuple(slice(None) if d == dim else 0 for d in range(len(codes.shape)))
        digits[line] = (numbers // codes.base**power % codes.base + 1).to(torch.uint8)
    part = codes.write(digits)
    whole = torch.zeros((*others, part.shape[-1] * width // columns), dtype=part.dtype, device=device)
    whole[tuple(slice(n) for n in part.shape)] = part
    return whole


def _told(codes: Codes, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`.rearrangement.told_places`, of elements."""
    parts = _bytes(made).split(_LOOKED_AT)
    found = [told_places(codes.read(part)) for part in parts]
    step = _LOOKED_AT * 8 // codes.bits
    places = [own + number * step for number, (own, _) in enumerate(found)]
    return torch.cat(places), torch.cat([digits for _, digits in found])


def digits_of(count: int, base: int) -> int:
    """Digits that tell ``count`` numbers apart."""
    digits = 1
    while base**digits < count:
        digits += 1
    return digits


@dataclass(frozen=True)
class Tiling:
    """An order of a matrix that repeats from tile to tile: each lies in one piece, and alike inside.

    Attributes:
        rows: of a tile of the loaded matrix.
        columns: of it, in elements.
        order: for each place inside a tile's piece the element that lies there, its row times ``columns`` and its column.
        row_starts: for each row of tiles, and
        column_starts: for each column of tiles, in tiles; a tile's piece is the one of the number of their sum.
    """

    rows: int
    columns: int
    order: tuple[int, ...]
    row_starts: tuple[int, ...]
    column_starts: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Of a tile."""
        return self.rows * self.columns


def tiled(by: Rearrangement, bits: int) -> tuple[tuple[int, ...], Tiling]:
    """A rearrangement of matrices as tiles.

    Args:
        by: of a matrix, a row alone, or a stack of matrices along the first dimension.
        bits: of an element.

    Returns:
        For each matrix the place of its first element, and the order of each of them.

    Raises:
        NotRearranged: nothing repeats from tile to tile, or the tiles have no whole words of 32 bits.
    """
    *stack, rows, columns = ((0,), *by.steps) if len(by.steps) == 1 else by.steps
    if len(stack) > 1:
        raise NotRearranged(f"it has {len(by.shape)} dimensions")
    firsts = tuple(by.first + step for step in (stack[0] if stack else (0,)))
    for height in _divisors(len(rows)):
        for width in _divisors(len(columns)):
            size = height * width
            if size > _MOST_OF_TILE or size * bits % 32 or size & (size - 1):
                continue
            found = _tiles(rows, columns, height, width)
            if found is not None and all(first * bits % 32 == 0 for first in firsts):
                return firsts, found
    raise NotRearranged("its elements' order does not repeat from tile to tile")


def _tiles(rows: Sequence[int], columns: Sequence[int], height: int, width: int) -> Tiling | None:
    size = height * width
    order = [-1] * size
    for r in range(height):
        for c in range(width):
            place = rows[r] + columns[c]
            if not 0 <= place < size or order[place] >= 0:
                return None
            order[place] = r * width + c
    row_starts, column_starts = _starts(rows, height, size), _starts(columns, width, size)
    if row_starts is None or column_starts is None:
        return None
    return Tiling(height, width, tuple(order), row_starts, column_starts)


def _starts(steps: Sequence[int], count: int, size: int) -> tuple[int, ...] | None:
    """Where each run of ``count`` begins, in tiles; None if they are not all alike."""
    starts = steps[::count]
    alike = all(step - starts[i // count] == steps[i % count] for i, step in enumerate(steps))
    if not alike or any(start % size or start < 0 for start in starts):
        return None
    return tuple(start // size for start in starts)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, min(n, _MOST_OF_TILE) + 1) if n % d == 0]
