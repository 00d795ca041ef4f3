"""What a LoRA adapter adds to a weight, and the merge of it into parts of the weight: the same bits in each layout.

A rank merges its shard alone, from the whole factors. What can't be cut is the product: BLAS sums a slice of it in another
order than the whole, and the last bit would depend on the layout. So the product is taken over whole rows and columns, as
peft and Megatron-Bridge take it, and only then cut: each layout sends the bits of their own merge.

A product above :data:`_MOST_PRODUCT` elements is taken in bands that the full shape alone decides. It too has the same
bits in each layout, but may differ from theirs in the last of each element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...integration.layout import Box

# 512 MiB in FP32, the default of a bucket: the largest matrix of Qwen3-32B (5120 x 25600) fits.
_MOST_PRODUCT = 1 << 27
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Delta:
    """What an adapter adds to a weight: its whole factors on the device that computes.

    Attributes:
        a: ``[r, in]``.
        b: ``[out, r]``.
        scaling: ``alpha / r``, or ``alpha / sqrt(r)`` under rsLoRA.
        transposed: whether the weight is stored ``[in, out]``.
        rounded: whether it is rounded to the weight's dtype before it is added, as peft does for embeddings.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    transposed: bool = False
    rounded: bool = False

    def product(self, band: tuple[int, int]) -> torch.Tensor:
        """The product of the factors over the rows ``band`` of the weight, not scaled yet.

        As peft's ``get_delta_weight``: on a CPU, factors of 16 bits are multiplied in FP32.
        """
        a, b = self.a, self.b
        if self._low:
            a, b = a.float(), b.float()
        within = slice(*band)
        return (b @ a[:, within]).T if self.transposed else b[within] @ a

    def scaled(self, part: torch.Tensor) -> torch.Tensor:
        """A part of the product as it is added to the weight."""
        part = part * self.scaling
        return part.to(self.b.dtype) if self._low else part

    @property
    def _low(self) -> bool:
        return self.b.device.type == "cpu" and self.b.dtype in _LOW


class Part(NamedTuple):
    """A part of a weight, and where its merged values go.

    Attributes:
        base: elements of ``box``; not changed.
        box: of the weight, two-dimensional.
        out: of ``base``'s shape, on any device.
    """

    base: torch.Tensor
    box: Box
    out: torch.Tensor


def merge(
    parts: Sequence[Part], shape: Sequence[int], deltas: Sequence[Delta], most_product: int = _MOST_PRODUCT
) -> None:
    """Write parts of one weight plus ``deltas``, rounding as peft does in the weight's dtype and then once more to ``out``'s.

    Args:
        parts: of the weight; on the device that computes where there are no deltas.
        shape: of the full weight, two-dimensional.
        deltas: in the order in which they are added.
        most_product: elements of a product that is taken at once.
    """
    for band in _bands(parts, shape, most_product):
        products = [delta.product(band) for delta in deltas]
        for base, ((top, bottom), columns), out in parts:
            start, stop = max(top, band[0]), min(bottom, band[1])
            if start >= stop:
                continue
            place = slice(start - top, stop - top)
            device = deltas[0].b.device if deltas else base.device
            merged = base[place].to(device, copy=True)
            for delta, product in zip(deltas, products, strict=True):
                part = delta.scaled(product[start - band[0] : stop - band[0], slice(*columns)])
                merged += part.to(merged.dtype) if delta.rounded else part
            out[place].copy_(merged)


def _bands(parts: Sequence[Part], shape: Sequence[int], most_product: int) -> Iterator[tuple[int, int]]:
    """The bands of a weight's rows in which there is a row of a part."""
    step = max(1, most_product // shape[1])
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        if any(top < stop and start < bottom for _, ((top, bottom), _), _ in parts):
            yield start, stop
