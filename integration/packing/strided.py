"""Strided memory by plain addresses: of this process, or of a peer's allocation mapped into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..layout import Box


def repeats(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements surely share their memory, as after ``expand``; such memory can't be written to."""
    return 0 in strides and any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class Strided:
    """Elements at regular places in memory.

    Attributes:
        address: of the first element.
        shape: number of elements along each dimension; empty for a single element.
        strides: distance in bytes between neighbours along each dimension.
        itemsize: bytes of an element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Strided:
        """The memory that a tensor shows; it does not keep the tensor alive.

        Raises:
            ValueError: the tensor has other values than its memory, being a lazy conjugate or negative.
        """
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"a {tensor.dtype} view of shape {list(tensor.shape)} is a lazy conjugate or negative: its memory holds "
                "other values, which would be moved instead; hand over tensor.resolve_conj().resolve_neg()"
            )
        itemsize = tensor.element_size()
        return Strided(
            tensor.data_ptr(), tuple(tensor.shape), tuple(s * itemsize for s in tensor.stride()), itemsize
        )

    @staticmethod
    def packed(address: int, shape: Sequence[int], itemsize: int) -> Strided:
        """Row-major elements without gaps, as they lie in a message."""
        strides: list[int] = []
        step = itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= n
        return Strided(address, tuple(shape), tuple(reversed(strides)), itemsize)

    @staticmethod
    def flat(address: int, nbytes: int) -> Strided:
        """A run of bytes."""
        return Strided(address, (nbytes,), (1,), 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, gaps not counted."""
        return prod(self.shape) * self.itemsize

    @property
    def extent(self) -> int:
        """Bytes from the first to behind the last element."""
        if not prod(self.shape):
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps."""
        step = self.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != step:
                return False
            step *= n
        return True

    @property
    def repeats(self) -> bool:
        """As the function of this name."""
        return repeats(self.shape, self.strides)

    def slice(self, box: Box) -> Strided:
        """The elements of ``box``, whose ranges count from this memory's first element.

        Raises:
            ValueError: the box has another number of dimensions, or reaches beyond the shape.
        """
        if len(box) != len(self.shape) or any(
            start < 0 or stop > n for (start, stop), n in zip(box, self.shape, strict=True)
        ):
            raise ValueError(
                f"box {box} does not lie inside memory of shape {self.shape}; other memory would be touched"
            )
        offset = sum(start * stride for (start, _), stride in zip(box, self.strides, strict=True))
        return Strided(
            self.address + offset, tuple(stop - start for start, stop in box), self.strides, self.itemsize
        )
