"""Weights that are kept in one floating-point type and travel in another, cast as they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .encoded import EncodedPair, EncodedView, Encoder
from .factory import JoinedCopies
from .strided import Strided
from .tables import CastTable


@dataclass(frozen=True)
class Cast:
    """The encoding of a view in another floating-point type, rounded to nearest even as torch does it.

    Attributes:
        dtype: of what travels.
    """

    dtype: torch.dtype

    @property
    def format(self) -> Cast:
        return self

    @property
    def block(self) -> tuple[int, ...]:
        return ()

    @property
    def unit(self) -> tuple[int, ...]:
        return ()

    def shape(self, view: Sequence[int]) -> tuple[int, ...]:
        return tuple(view)

    def prepare(self, pairs: Sequence[EncodedPair], device: torch.device) -> Encoder:
        if device.type != "cuda":
            return _TorchCasts(pairs)
        by_type: dict[torch.dtype, list[tuple[Strided, Strided]]] = {}
        for view, target in pairs:
            held = _part(view)
            place = target if isinstance(target, Strided) else Strided.of(target)
            by_type.setdefault(held.dtype, []).append((Strided.of(held), place))
        tables = [CastTable.build(found, source, self.dtype, device) for source, found in by_type.items()]
        return tables[0] if len(tables) == 1 else JoinedCopies(tables)


class _TorchCasts:
    """Casts between CPU tensors."""

    def __init__(self, pairs: Sequence[EncodedPair]):
        self._sources = [_part(view) for view, _ in pairs]
        self._targets = [target for _, target in pairs if isinstance(target, torch.Tensor)]
        self.nbytes = sum(view.nbytes for view, _ in pairs)

    def launch(self) -> None:
        """Do the casts."""
        torch._foreach_copy_(self._targets, self._sources)


def _part(view: EncodedView) -> torch.Tensor:
    return view.held.detach()[tuple(slice(start, stop) for start, stop in view.window)]
