"""Casts: weights that are kept in one floating-point type and sent in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .copies import JoinedCopies
from .encoded import EncodedPair, EncodedView, Encoder
from .host import WeakView
from .strided import Strided
from .tables import FLOAT_DTYPES, CastTable


@dataclass(frozen=True)
class Cast:
    """A view in another floating-point type, rounded to nearest even as torch does it: an :class:`..layout.Encoding`.

    Attributes:
        dtype: of what travels.
    """

    dtype: torch.dtype

    @property
    def method(self) -> Cast:
        return self

    @property
    def block(self) -> tuple[int, ...]:
        return ()

    @property
    def unit(self) -> tuple[int, ...]:
        return ()

    def shape(self, view: Sequence[int]) -> tuple[int, ...]:
        return tuple(view)

    def has_kernel(self, source: torch.dtype) -> bool:
        return {source, self.dtype} <= FLOAT_DTYPES

    def prepare(self, pairs: Sequence[EncodedPair], device: torch.device) -> Encoder:
        by_type: dict[torch.dtype, list[tuple[Strided, Strided]]] = {}
        others: list[EncodedPair] = []
        for view, target in pairs:
            if device.type != "cuda" or not self.has_kernel(view.held.dtype):
                others.append((view, target))
                continue
            place = target if isinstance(target, Strided) else Strided.of(target)
            by_type.setdefault(view.held.dtype, []).append((Strided.of(_part(view)), place))
        tables = [CastTable.build(found, source, self.dtype, device) for source, found in by_type.items()]
        return JoinedCopies([*tables, _TorchCasts(others)] if others else tables)


class _TorchCasts:
    """Casts between tensors. Keeps no source."""

    def __init__(self, pairs: Sequence[EncodedPair]):
        self._sources = [WeakView(_part(view)) for view, _ in pairs]
        self._targets = [target for _, target in pairs if isinstance(target, torch.Tensor)]
        self.nbytes = sum(view.nbytes for view, _ in pairs)

    def launch(self) -> None:
        """Do the casts.

        Raises:
            RefitError: the memory of a source was freed.
        """
        if self._targets:
            torch._foreach_copy_(self._targets, [source.view() for source in self._sources])


def _part(view: EncodedView) -> torch.Tensor:
    return view.held.detach()[tuple(slice(start, stop) for start, stop in view.window)]
