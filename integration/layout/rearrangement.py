"""What an opaque step makes of tensors, where it only puts their elements elsewhere: found out by running it.

Engines rearrange weights for their kernels after loading. Nearly always that is a reshape, a transpose and a padding, in code that
can't be read (C++, CUDA). Run on the numbers of the elements it tells where each goes. BF16 holds whole numbers to 256 exactly, so
numbers travel as digits of base 128, one digit in each run; 0 is left for padding. A run on other values tells that they stay
what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from .boxes import Box

_BITS = 7
_BASE = 1 << _BITS
# Each type's bits as integers, and the lowest of its exponent, without which it is finite.
_FINITE = {
    torch.bfloat16: (torch.int16, 1 << 7),
    torch.float16: (torch.int16, 1 << 10),
    torch.float32: (torch.int32, 1 << 23),
}

# Takes new tensors by name, which it may change, and returns what they have become.
Step = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class NotRearranged(ValueError):
    """The step does more than to put elements elsewhere, or in an order that is no sum over dimensions."""


class NotFoundOut(NotRearranged):
    """The device has too little memory left to find out what the step does; another time it may have more."""


class Digit(NamedTuple):
    """A factor of a dimension: its size, and the distance in memory of neighbours along it, in elements."""

    size: int
    stride: int


@dataclass(frozen=True)
class Rearrangement:
    """Where the elements of a tensor ``[*shape]`` lie in the memory of what was made of it.

    Element ``[i, j, …]`` lies ``first + steps[0][i] + steps[1][j] + …`` elements from the beginning.

    Attributes:
        shape: of the tensor.
        first: place of its first element.
        steps: for each dimension, for each index along it.
    """

    shape: tuple[int, ...]
    first: int
    steps: tuple[tuple[int, ...], ...]

    @property
    def kept(self) -> bool:
        """Whether each element lies where it lay."""
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return not self.first and all(
            steps == tuple(range(0, n * stride, stride))
            for steps, n, stride in zip(self.steps, self.shape, strides, strict=True)
        )

    def boxed(self, box: Box) -> tuple[int, tuple[tuple[Digit, ...], ...]] | None:
        """A box of the tensor, not empty, as strided memory: the place of its first element, and each dimension's digits.

        The slowest digit stands first; a dimension of extent 1 has none. None where indices along a dimension lie in no regular
        order.
        """
        offset = self.first
        found: list[tuple[Digit, ...]] = []
        for (start, stop), steps in zip(box, self.steps, strict=True):
            offset += steps[start]
            digits = _digits_of_part(steps, start, stop)
            if digits is None:
                return None
            found.append(digits)
        return offset, tuple(found)


def recover(
    step: Step,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
) -> dict[str, Rearrangement]:
    """Find out where ``step`` puts the elements of tensors, each of which must stay in memory of its own.

    Args:
        step: the same for whatever values.
        tensors: shape and dtype by name; BF16, FP16 or FP32.
        device: on which the step works.

    Raises:
        NotRearranged: it computes with values, joins tensors, changes a dtype, or has another order.
    """
    for name, (shape, dtype) in tensors.items():
        if dtype not in _FINITE or not prod(shape):
            raise NotRearranged(f"{name} is {dtype}{list(shape)}, which can't hold numbers of elements")
    found = {name: along_dimensions(runs, shape) for name, (shape, _), runs in _lines(step, tensors, device)}
    _prove(step, tensors, found, device)
    return found


def _lines(
    step: Step, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype], list[list[tuple[torch.Tensor, torch.Tensor]]]]]:
    """For each tensor, dimension and digit: the places, and the digits there, of the elements in a line from the first one."""
    runs: dict[str, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {
        name: [[] for _ in shape] for name, (shape, _) in tensors.items()
    }
    for dim in range(max(len(shape) for shape, _ in tensors.values())):
        sizes = [shape[dim] for shape, _ in tensors.values() if dim < len(shape)]
        for power in range(_digits_of(max(sizes))):
            given: dict[str, torch.Tensor] = {}
            for name, (shape, dtype) in tensors.items():
                given[name] = torch.zeros(shape, dtype=dtype, device=device)
                if dim < len(shape):
                    numbers = torch.arange(shape[dim], device=device)
                    line = tuple(slice(None) if d == dim else 0 for d in range(len(shape)))
                    given[name][line] = _digit(numbers, power).to(dtype)
            made = _run(step, tensors, given)
            for name, (shape, _) in tensors.items():
                if dim < len(shape):
                    runs[name][dim].append(told_places(made[name].reshape(-1)))
    for name, kind in tensors.items():
        yield name, kind, runs[name]


def told_places(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of ``flat`` that hold a digit, and the digits there, each of which was written as one more than it is."""
    places = flat.nonzero().reshape(-1)
    return places, flat[places].to(torch.int64) - 1


def along_dimensions(
    runs: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]], shape: tuple[int, ...], base: int = _BASE
) -> Rearrangement:
    """Where the elements of a tensor lie, from where those of the lines through its first element were found.

    Args:
        runs: for each dimension, for each digit from the lowest on, what :func:`told_places` says.
        shape: of the tensor.
        base: of the digits.

    Raises:
        NotRearranged: they tell no order.
    """
    firsts: list[int] = []
    steps: list[tuple[int, ...]] = []
    for n, powers in zip(shape, runs, strict=True):
        places = powers[0][0]
        numbers = torch.zeros_like(places)
        for power, (again, digits) in enumerate(powers):
            if len(again) != n or not torch.equal(again, places):
                raise NotRearranged("elements were lost, doubled, or put where their values say")
            numbers += digits * base**power
        order = numbers.argsort()
        if not torch.equal(numbers[order], torch.arange(n, device=numbers.device)):
            raise NotRearranged("values were changed")
        own = places[order].tolist()
        firsts.append(own[0])
        steps.append(tuple(place - own[0] for place in own))
    if len(set(firsts)) != 1:
        raise NotRearranged("its first element was put where other values say")
    return Rearrangement(tuple(shape), firsts[0], tuple(steps))


def _prove(
    step: Step,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    found: Mapping[str, Rearrangement],
    device: torch.device,
) -> None:
    """All digits of all elements' numbers, and values that have all bits, lie where they should, and nothing beside them.

    Raises:
        NotRearranged: they do not.
    """
    for power in range(_digits_of(sum(prod(shape) for shape, _ in tensors.values()))):
        given = _numbered(tensors, power, device)
        made = _run(step, tensors, given)
        for name, (shape, _) in tensors.items():
            if not _holds(found[name], given[name], made[name]) or int(made[name].count_nonzero()) != prod(
                shape
            ):
                raise NotRearranged(
                    "its elements' order is no sum over its dimensions, or their padding is not 0"
                )
    given = _noise(tensors, device)
    made = _run(step, tensors, given)
    if not all(_holds(found[name], given[name], made[name]) for name in tensors):
        raise NotRearranged("values were changed")


def _run(
    step: Step,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    given: Mapping[str, torch.Tensor],
) -> Mapping[str, torch.Tensor]:
    made = step({name: tensor.clone() for name, tensor in given.items()})
    for name, (shape, dtype) in tensors.items():
        now = made.get(name)
        if now is None:
            raise NotRearranged(f"{name} no longer exists")
        if now.dtype != dtype or not now.is_contiguous() or now.numel() < prod(shape):
            raise NotRearranged(
                f"{name} has become {now.dtype}{list(now.shape)} with strides {list(now.stride())}"
            )
    return made


def _holds(by: Rearrangement, given: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether ``made`` has the bits of ``given`` where they should be. A part at a time: indices are large."""
    bits, _ = _FINITE[given.dtype]
    flat, values = (
        made.reshape(-1).view(bits),
        given.reshape(given.shape[0] if given.dim() else 1, -1).view(bits),
    )
    rows, *others = by.steps or ((0,),)
    inside = torch.zeros((), dtype=torch.int64, device=given.device)
    for steps in others:
        inside = inside.unsqueeze(-1) + torch.tensor(steps, device=given.device)
    inside = inside.reshape(-1) + by.first
    if int(inside.max()) + max(rows) >= flat.numel() or int(inside.min()) + min(rows) < 0:
        return False
    return all(torch.equal(flat[inside + row], part) for row, part in zip(rows, values, strict=True))


def _numbered(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], power: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """A digit of each element's number, counted through all tensors, plus 1."""
    found: dict[str, torch.Tensor] = {}
    number = 0
    for name, (shape, dtype) in tensors.items():
        found[name] = torch.empty(shape, dtype=dtype, device=device)
        for row in found[name].reshape(shape[0] if shape else 1, -1):
            row.copy_(_digit(torch.arange(number, number + len(row), device=device), power))
            number += len(row)
    return found


def _noise(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Finite values of all signs, sizes and fractions, others in each tensor."""
    generator = torch.Generator(device).manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in tensors.items():
        bits, lowest = _FINITE[dtype]
        limits = torch.iinfo(bits)
        made = torch.randint(limits.min, limits.max, shape, dtype=bits, device=device, generator=generator)
        made.bitwise_and_(~lowest)
        found[name] = made.view(dtype)
    return found


def _digit(numbers: torch.Tensor, power: int) -> torch.Tensor:
    return ((numbers >> (_BITS * power)) & (_BASE - 1)) + 1


def _digits_of(count: int) -> int:
    """Digits that tell ``count`` numbers apart."""
    digits = 1
    while _BASE**digits < count:
        digits += 1
    return digits


# Thousands of experts' boxes are of few parts.
@lru_cache(maxsize=512)
def _digits_of_part(steps: tuple[int, ...], start: int, stop: int) -> tuple[Digit, ...] | None:
    return _digits([step - steps[start] for step in steps[start:stop]])


def _digits(steps: Sequence[int]) -> tuple[Digit, ...] | None:
    """Digits of which ``steps``, the first of them 0, are the sums, the slowest first; None if there are none."""
    n = len(steps)
    if n == 1:
        return ()
    stride = steps[1]
    run = next((i for i, step in enumerate(steps) if step != i * stride), n)
    if stride < 1:
        return None
    for count in range(run, 1, -1):
        if n % count or any(
            step != steps[i - i % count] + i % count * stride for i, step in enumerate(steps)
        ):
            continue
        outer = _digits(steps[::count])
        if outer is not None:
            return (*outer, Digit(count, stride))
    return None
