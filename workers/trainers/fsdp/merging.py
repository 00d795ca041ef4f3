"""Shards of weights with their LoRA adapters merged in, beside the shards that are trained.

peft's ``merge_and_unload`` computes ``W += transpose(B @ A) * scaling`` for one adapter after the other. A rank does that
for its shard alone, from the whole factors. What can't be cut is the product: BLAS sums a slice of it in another order
than the whole, and the last bit would depend on the layout. So the product is taken over whole rows and columns, as
peft takes it, and only then cut: each layout sends the bits of peft's own merge.

A product above :data:`_MOST_PRODUCT` elements is taken in bands that the full shape alone decides. It too has the same
bits in each layout, but may differ from peft's in the last of each element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ....integration.layout import Box, box_of
from .adapters import LoraTarget
from .parameters import KeptTensors

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
    transposed: bool
    rounded: bool = False

    def of(self, band: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
        """Rows and columns of the delta, the product being taken over the rows ``band`` of the weight.

        As peft's ``get_delta_weight``: on a CPU, factors of 16 bits are multiplied in FP32.
        """
        a, b = self.a, self.b
        dtype = b.dtype
        low = b.device.type == "cpu" and dtype in _LOW
        if low:
            a, b = a.float(), b.float()
        within = slice(*band)
        product = (b @ a[:, within]).T if self.transposed else b[within] @ a
        part = product[rows[0] - band[0] : rows[1] - band[0], slice(*columns)] * self.scaling
        return part.to(dtype) if low else part


def merge(
    base: torch.Tensor,
    box: Box,
    shape: Sequence[int],
    deltas: Sequence[Delta],
    out: torch.Tensor,
    most_product: int = _MOST_PRODUCT,
) -> None:
    """Write ``base`` plus ``deltas`` to ``out``, rounding as peft does in ``base``'s dtype and then once more to ``out``'s.

    Args:
        base: elements of ``box`` of a weight of ``shape``; not changed.
        box: of the weight.
        shape: of the full weight, two-dimensional.
        deltas: in peft's order.
        out: of ``base``'s shape, on any device.
        most_product: elements of a product that is taken at once.
    """
    (top, bottom), columns = box
    step = max(1, most_product // shape[1])
    for start in range(top // step * step, bottom, step):
        band = start, min(start + step, shape[0])
        rows = max(top, start), min(bottom, band[1])
        place = slice(rows[0] - top, rows[1] - top)
        device = deltas[0].b.device if deltas else base.device
        merged = base[place].to(device, copy=True)
        for delta in deltas:
            part = delta.of(band, rows, columns)
            merged += part.to(merged.dtype) if delta.rounded else part
        out[place].copy_(merged)


class MergedShards:
    """Copies of local shards with their adapters merged in, made anew for every refit.

    They take the elements of all weights under adapters in the dtype of the export, for as long as the source lives:
    with BF16 base weights, as much as these themselves. The factors are gathered one weight at a time, and the widest
    product comes on top for a moment.

    Args:
        kept: the base weights.
        factors: of the adapters.
        targets: the weights under adapters, by name; the same on all ranks.
        device: that computes.
    """

    def __init__(
        self,
        kept: KeptTensors,
        factors: KeptTensors,
        targets: Mapping[str, LoraTarget],
        device: torch.device,
    ):
        self._kept = kept
        self._factors = factors
        self._targets = targets
        self._device = device
        self._copies: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def of(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The copy of a weight's local shard, which is merged after the next :meth:`refresh`."""
        local = self._kept.local(name)
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (local.shape, dtype, local.device):
            copy = self._copies[name] = torch.empty_like(local, dtype=dtype)
        return copy

    @property
    def copies(self) -> Collection[torch.Tensor]:
        """All that :meth:`of` has given and :meth:`refresh` writes."""
        return self._copies.values()

    def refresh(self) -> None:
        """Merge what the shards and the factors hold now; a collective of the ranks that share the model."""
        for name, copy in self._copies.items():
            deltas = self._deltas(name)
            base, merged = self._kept.held(name, self._kept.local(name)), self._kept.held(name, copy)
            assert isinstance(base, list), f"{name} has a copy only if its layout is known"
            assert isinstance(merged, list)
            with torch.no_grad():
                for part, out in zip(base, merged, strict=True):
                    merge(part.view, part.box, part.full_shape, deltas, out.view)

    def whole(self, name: str) -> torch.Tensor:
        """A full weight, merged, in the dtype that it is kept in; a collective as :meth:`refresh`."""
        weight = self._kept.whole(name, self._device)
        out = torch.empty_like(weight)
        with torch.no_grad():
            merge(weight, box_of(weight.shape), weight.shape, self._deltas(name), out)
        return out

    def _deltas(self, name: str) -> list[Delta]:
        target = self._targets[name]
        found = []
        with torch.no_grad():
            for adapter in target.applied():
                names = target.factors[adapter]
                a, b = (self._factors.whole(factor, self._device) for factor in (names.a, names.b))
                scaling = target.layer.scaling[adapter]
                found.append(Delta(a, b, scaling, target.transposed, target.rounded))
        return found
