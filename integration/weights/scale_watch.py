"""Scales that are no numbers, found before a refit commits.

A block that holds NaN or infinity has a scale that is none (:mod:`..quantize.fp8_blockwise`, :mod:`..quantize.mxfp8`), so the scales tell of
all weights that were quantized. Engine ranks look at them as they have arrived: less than a thousandth of the bytes, by three
operations on the device for each dtype of scales. The answer is read where the host has waited for the device anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import torch

from ..layout import Box, Fragment, box_of
from ..packing import Copy, make_copy
from ..quantize import blocks, e8m0, mxfp8
from ..quantize.formats import Format
from .manifest import TensorSpec


@dataclass(frozen=True)
class _Piece:
    """Scales of a weight, as one fragment or as one tensor that is loaded."""

    name: str
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


class ScaleWatch:
    """Looks at all scales that reach an engine rank in a refit.

    Args:
        formats: Hugging Face name of a weight → the format in which it travels.
        rank: refit-world rank, for errors.

    Attributes:
        nbytes: of the copies of scales that it holds.
    """

    def __init__(self, formats: Mapping[str, Format], rank: int):
        self._weights = {name + format.scale_name_end: (name, format) for name, format in formats.items()}
        self._rank = rank
        self._flats: list[tuple[torch.Tensor, list[_Piece]]] = []
        self._copies: list[Copy] = []
        self._slots: dict[str, torch.Tensor] = {}
        self._largest: list[torch.Tensor] = []
        self.nbytes = 0

    def bind(self, placed: Iterable[Fragment], loaded: Iterable[TensorSpec], device: torch.device) -> None:
        """Learn where scales arrive; again whenever storages have moved.

        Args:
            placed: fragments that are written in place, of any weights.
            loaded: what goes through the engine's loader, of any weights.
            device: of the engine.
        """
        views: dict[torch.dtype, list[tuple[_Piece, torch.Tensor | None]]] = {}
        for fragment in placed:
            if fragment.name in self._weights:
                piece = _Piece(fragment.name, fragment.box)
                views.setdefault(fragment.dtype, []).append((piece, fragment.view))
        for spec in loaded:
            if spec.name in self._weights:
                views.setdefault(spec.dtype, []).append((_Piece(spec.name, box_of(spec.shape)), None))
        self._flats, self._copies, self._slots, self._largest = [], [], {}, []
        for dtype, found in views.items():
            sizes = [prod(piece.shape) for piece, _ in found]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            pairs = []
            for (piece, view), part in zip(found, flat.split(sizes), strict=True):
                if view is None:
                    self._slots[piece.name] = part.view(piece.shape)
                else:
                    pairs.append((view, part.view(piece.shape)))
            self._flats.append((flat, [piece for piece, _ in found]))
            self._copies.append(make_copy(pairs, device))
        self.nbytes = sum(flat.nbytes for flat, _ in self._flats)

    @property
    def watches(self) -> bool:
        """Whether any scales reach this rank."""
        return bool(self._flats)

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """``weights`` as they are, noting the scales among them: what a loader makes of them is its own affair."""
        for name, tensor in weights:
            if name in self._slots:
                self._slots[name].copy_(tensor)
            yield name, tensor

    def look(self) -> None:
        """Enqueue the look at all scales of this refit, behind what wrote them."""
        for copy in self._copies:
            copy.launch()
        self._largest = [
            flat.amax().to("cpu", non_blocking=True) if flat.numel() else flat.new_zeros((), device="cpu")
            for flat, _ in self._flats
        ]

    def require_finite(self) -> None:
        """Refuse what :meth:`look` saw, once the device has done it.

        Raises:
            RefitError: a block of a weight holds NaN or infinity; names the first.
        """
        for (flat, pieces), largest in zip(self._flats, self._largest, strict=True):
            of_bytes = largest.dtype == torch.uint8
            fine = int(largest) != mxfp8.NAN_SCALE if of_bytes else isfinite(float(largest))
            if not fine:
                self._refuse(e8m0.from_e8m0(flat) if of_bytes else flat, pieces)

    def _refuse(self, flat: torch.Tensor, pieces: Sequence[_Piece]) -> None:
        for piece, values in zip(pieces, flat.split([prod(piece.shape) for piece in pieces]), strict=True):
            name, format = self._weights[piece.name]
            offset = [start * b for (start, _), b in zip(piece.box, format.block, strict=True)]
            blocks.require_finite(values.view(piece.shape), format.block, name, offset, rank=self._rank)
