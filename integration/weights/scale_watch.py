"""Scales that are no numbers, found before a refit commits.

A block that holds NaN or infinity has a scale that is none (:mod:`..quantize.fp8_blockwise`, :mod:`..quantize.mxfp8`,
:mod:`..quantize.mxfp4`, :mod:`..quantize.int4`), so the scales tell of all weights that were quantized. Engine ranks look at them as they have
arrived, where they lie: scales of FP8 blocks are less than a thousandth of the bytes, those of MXFP8 and MXFP4 a thirtieth and a
seventeenth, those of INT4 up to a ninth. The answer is read where the host has waited for the device anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..layout import Axes, Box, Fragment, box_of
from ..packing import Magnitudes, make_magnitudes
from ..packing.host import WeakView
from ..quantize import blocks, e8m0, mxfp8
from ..quantize.formats import Format, wire_names
from .manifest import TensorSpec


@dataclass(frozen=True)
class _Piece:
    """Scales of a weight, as one fragment or as one tensor that is loaded; ``axes`` by which the box sees them, if any."""

    name: str
    box: Box
    axes: Axes | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


class ScaleWatch:
    """Looks at all scales that reach an engine rank in a refit.

    Args:
        formats: Hugging Face name of a weight → the format in which it travels.
        rank: refit-world rank, for errors.
        packed: of weights that travel packed, whatever packs them: name of their scales → their own, and the block in all dimensions.

    Attributes:
        nbytes: of the memory in which it looks at scales.
    """

    def __init__(
        self,
        formats: Mapping[str, Format],
        rank: int,
        packed: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    ):
        self._weights: dict[str, tuple[str, tuple[int, ...]]] = {
            wire_names(name, format)[1]: (name, format.block) for name, format in formats.items()
        }
        self._weights.update(packed or {})
        self._rank = rank
        self._placed: list[tuple[_Piece, WeakView]] = []
        self._magnitudes: Magnitudes | None = None
        self._rewritten: frozenset[str] = frozenset()
        # Of each the largest number that it can hold.
        self._most = torch.zeros(0)
        # By dtype of what is loaded.
        self._loaded: dict[torch.dtype, _Loaded] = {}
        self._wrong = self._some_wrong = torch.zeros(0, dtype=torch.bool)
        self.nbytes = 0

    def bind(
        self,
        placed: Iterable[Fragment],
        loaded: Iterable[TensorSpec],
        device: torch.device,
        rewritten: Collection[str] = (),
    ) -> None:
        """Learn where scales arrive; again whenever storages have moved.

        Args:
            placed: fragments that are written in place, of any weights.
            loaded: what goes through the engine's loader, of any weights.
            device: of the engine.
            rewritten: names of what does not stay as it lands.
        """
        self._rewritten = frozenset(rewritten)
        found = [one for one in placed if one.name in self._weights and one.view.numel()]
        views = [one.view for one in found]
        self._placed = [(_Piece(one.name, one.box, one.axes), WeakView(one.view)) for one in found]
        self._magnitudes = make_magnitudes(views, device) if found else None
        self._most = torch.tensor([_largest_number(view.dtype) for view in views], device=device)
        by_dtype: dict[torch.dtype, list[_Piece]] = {}
        for spec in loaded:
            if spec.name in self._weights and spec.nbytes:
                by_dtype.setdefault(spec.dtype, []).append(_Piece(spec.name, box_of(spec.shape)))
        self._loaded = {dtype: _Loaded(dtype, pieces, device) for dtype, pieces in by_dtype.items()}
        self.nbytes = sum(one.nbytes for one in self._loaded.values())

    @property
    def watches(self) -> bool:
        """Whether any scales reach this rank."""
        return bool(self._placed or self._loaded)

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """``weights`` as they are, noting the scales among them: what a loader makes of them is its own affair."""
        for name, tensor in weights:
            if name in self._weights:
                for one in self._loaded.values():
                    one.note(name, tensor)
            yield name, tensor

    def look(self) -> None:
        """Enqueue the look at all scales of this refit, behind what wrote them, and have the host told of it."""
        if self._magnitudes is not None:
            self._wrong = ~(self._magnitudes.compute() <= self._most)
            self._some_wrong = self._wrong.any().to("cpu", non_blocking=True)
        for one in self._loaded.values():
            one.tell()

    def require_finite(self) -> None:
        """Refuse what :meth:`look` saw, once the device has done it.

        Raises:
            RefitError: a block of a weight holds NaN or infinity; names one.
        """
        if self._placed and self._some_wrong:
            piece, view = self._placed[int(self._wrong.nonzero()[0])]
            if piece.name not in self._rewritten and not view.expired():
                self._require(piece, view.view())
            name, _ = self._weights[piece.name]
            raise blocks.not_finite(
                "blocks held NaN or infinity as they arrived; which ones is not known any more, since the engine has put them elsewhere",
                name,
                self._rank,
            )
        for one in self._loaded.values():
            for piece, values in one.wrong():
                self._require(piece, values)

    def _require(self, piece: _Piece, values: torch.Tensor) -> None:
        name, block = self._weights[piece.name]
        if values.dtype == torch.uint8:
            values = e8m0.from_e8m0(values)
        box, values = _by_own_dimensions(piece, values)
        offset = [start * b for (start, _), b in zip(box, block, strict=True)]
        blocks.require_finite(values, block, name, offset, rank=self._rank)


class _Loaded:
    """Scales of one dtype that are loaded.

    Args:
        dtype: floating point, or ``uint8`` of E8M0.
        pieces: what :meth:`note` is given.
        device: of it.
    """

    def __init__(self, dtype: torch.dtype, pieces: Sequence[_Piece], device: torch.device):
        self._pieces = pieces
        self._slots = {piece.name: number for number, piece in enumerate(pieces)}
        self._now = torch.zeros(max(prod(piece.shape) for piece in pieces), dtype=dtype, device=device)
        # What was wrong last, since others take its place.
        self._kept = torch.zeros_like(self._now)
        self.nbytes = self._now.nbytes + self._kept.nbytes
        self._largest = torch.zeros(len(pieces), dtype=dtype, device=device)
        self._told = self._largest.cpu()

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Look at what is loaded."""
        number = self._slots.get(name)
        if number is None:
            return
        seen, kept = (self._part(memory, number) for memory in (self._now, self._kept))
        seen.copy_(tensor)
        largest = self._largest[number]
        torch.amax(seen.view(-1), 0, out=largest)
        torch.where(~(largest.float() <= _largest_number(seen.dtype)), seen, kept, out=kept)

    def tell(self) -> None:
        """Have the host told of all."""
        self._told = self._largest.to("cpu", non_blocking=True)

    def wrong(self) -> Iterator[tuple[_Piece, torch.Tensor]]:
        """What was wrong last."""
        bad = (~(self._told.float() <= _largest_number(self._told.dtype))).nonzero().flatten().tolist()
        if bad:
            yield self._pieces[bad[-1]], self._part(self._kept, bad[-1])

    def _part(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        shape = self._pieces[number].shape
        return flat[: prod(shape)].view(shape)


def _largest_number(dtype: torch.dtype) -> float:
    """Of scales; of E8M0 by its code. What holds NaN has no largest magnitude up to it."""
    return float(mxfp8.NAN_SCALE - 1) if dtype == torch.uint8 else torch.finfo(dtype).max


def _by_own_dimensions(piece: _Piece, values: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """A piece and its values in the dimensions of its tensor; the first that is no number alone where it is seen by others."""
    if piece.axes is None:
        return piece.box, values
    bad = (~torch.isfinite(values)).nonzero()
    at = bad[0].tolist() if len(bad) else [0] * values.dim()
    box = piece.axes.bounds(
        tuple((start + i, start + i + 1) for (start, _), i in zip(piece.box, at, strict=True))
    )
    return box, values[tuple(at)].view(tuple(stop - start for start, stop in box))
