"""Scales that are no numbers, found before a refit commits.

A block that holds NaN or infinity has a scale that is none (:mod:`..quantize.fp8_blockwise`, :mod:`..quantize.mxfp8`,
:mod:`..quantize.mxfp4`, :mod:`..quantize.int4`), so the scales tell of all weights that were quantized. Engine ranks look at them as they have arrived, some
at a time in the same memory: scales of FP8 blocks are less than a thousandth of the bytes, those of MXFP8 and MXFP4 a thirtieth and a
seventeenth, those of INT4 up to a ninth. The answer is read where the host has waited for the device anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..layout import Axes, Box, Fragment, box_of
from ..packing import make_copy
from ..quantize import blocks, e8m0, mxfp8
from ..quantize.formats import Format, wire_names
from .manifest import TensorSpec

# Of scales that are looked at at a time, unless a single tensor has more.
AT_ONCE_BYTES = 32 << 20


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
        self._looks: list[_Look] = []
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
            if fragment.name in self._weights and fragment.view.numel():
                piece = _Piece(fragment.name, fragment.box, fragment.axes)
                views.setdefault(fragment.dtype, []).append((piece, fragment.view))
        for spec in loaded:
            if spec.name in self._weights and spec.nbytes:
                views.setdefault(spec.dtype, []).append((_Piece(spec.name, box_of(spec.shape)), None))
        self._looks = [_Look(dtype, found, device) for dtype, found in views.items()]
        self.nbytes = sum(look.nbytes for look in self._looks)

    @property
    def watches(self) -> bool:
        """Whether any scales reach this rank."""
        return bool(self._looks)

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """``weights`` as they are, noting the scales among them: what a loader makes of them is its own affair."""
        for name, tensor in weights:
            if name in self._weights:
                for look in self._looks:
                    look.note(name, tensor)
            yield name, tensor

    def look(self) -> None:
        """Enqueue the look at all scales of this refit, behind what wrote them."""
        for look in self._looks:
            look.launch()

    def require_finite(self) -> None:
        """Refuse what :meth:`look` saw, once the device has done it.

        Raises:
            RefitError: a block of a weight holds NaN or infinity; names one.
        """
        for look in self._looks:
            for piece, values in look.wrong():
                name, block = self._weights[piece.name]
                box, values = _by_own_dimensions(piece, values)
                offset = [start * b for (start, _), b in zip(box, block, strict=True)]
                blocks.require_finite(values, block, name, offset, rank=self._rank)


class _Look:
    """At scales of one dtype.

    Args:
        dtype: floating point, or ``uint8`` of E8M0.
        found: what is looked at, with where it lies; None of what :meth:`note` is given.
        device: of it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        found: Sequence[tuple[_Piece, torch.Tensor | None]],
        device: torch.device,
    ):
        loaded = [piece for piece, view in found if view is None]
        groups = list(_groups([(piece, view) for piece, view in found if view is not None], dtype.itemsize))
        self._pieces = [[piece for piece, _ in group] for group in groups] + [[piece] for piece in loaded]
        self._sizes = [sum(prod(piece.shape) for piece in pieces) for pieces in self._pieces]
        self._slots = {piece.name: number for number, piece in enumerate(loaded, start=len(groups))}
        self._now = torch.zeros(max(self._sizes), dtype=dtype, device=device)
        # What was wrong last, since others take its place.
        self._kept = self._now if len(self._pieces) == 1 else torch.zeros_like(self._now)
        self.nbytes = self._now.nbytes + (self._kept.nbytes if self._kept is not self._now else 0)
        self._largest = torch.zeros(len(self._pieces), dtype=dtype, device=device)
        self._told = self._largest.cpu()
        self._copies = []
        for group in groups:
            parts = self._parts(self._now, [piece for piece, _ in group])
            pairs = [(view, part) for (_, view), (_, part) in zip(group, parts, strict=True)]
            self._copies.append(make_copy(pairs, device))

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Look at what is loaded."""
        number = self._slots.get(name)
        if number is not None:
            [(_, part)] = self._parts(self._now, self._pieces[number])
            part.copy_(tensor)
            self._look_at(number)

    def launch(self) -> None:
        """Look at what lies in place, and have the host told of all."""
        for number, copy in enumerate(self._copies):
            copy.launch()
            self._look_at(number)
        self._told = self._largest.to("cpu", non_blocking=True)

    def wrong(self) -> Iterator[tuple[_Piece, torch.Tensor]]:
        """If something is wrong, what was wrong last and what lay beside it, as numbers."""
        bad = _no_numbers(self._told).nonzero().flatten().tolist()
        if bad:
            # What is loaded comes before what lies in place is looked at.
            in_place = [number for number in bad if number < len(self._copies)]
            for piece, values in self._parts(self._kept, self._pieces[(in_place or bad)[-1]]):
                yield piece, e8m0.from_e8m0(values) if values.dtype == torch.uint8 else values

    def _look_at(self, number: int) -> None:
        seen = self._now[: self._sizes[number]]
        largest = self._largest[number]
        torch.amax(seen, 0, out=largest)
        if self._kept is not self._now:
            kept = self._kept[: self._sizes[number]]
            torch.where(_no_numbers(largest), seen, kept, out=kept)

    def _parts(self, flat: torch.Tensor, pieces: Sequence[_Piece]) -> list[tuple[_Piece, torch.Tensor]]:
        sizes = [prod(piece.shape) for piece in pieces]
        parts = flat[: sum(sizes)].split(sizes)
        return [(piece, part.view(piece.shape)) for piece, part in zip(pieces, parts, strict=True)]


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


def _no_numbers(scales: torch.Tensor) -> torch.Tensor:
    return scales == mxfp8.NAN_SCALE if scales.dtype == torch.uint8 else ~torch.isfinite(scales)


def _groups(
    found: Sequence[tuple[_Piece, torch.Tensor]], itemsize: int
) -> Iterator[list[tuple[_Piece, torch.Tensor]]]:
    group: list[tuple[_Piece, torch.Tensor]] = []
    held = 0
    for piece, view in found:
        nbytes = view.numel() * itemsize
        if group and held + nbytes > AT_ONCE_BYTES:
            yield group
            group, held = [], 0
        group.append((piece, view))
        held += nbytes
    if group:
        yield group
