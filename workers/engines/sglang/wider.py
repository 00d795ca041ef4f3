"""Parameters of a wider dtype than the weights that come for them, such as biases of experts that SGLang holds in FP32.

Their weights land in tensors of the dtype in which they come. At the end of a refit all are copied into the parameters at once, which
changes no number: it is what SGLang's own loader does with each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..common.loader_trace.trace import Landing

# Of the model's bytes. Biases, sinks and decays stay far below; a whole model in FP32 would take half of its memory once more.
LARGEST_SHARE = 0.05

_Place = tuple[str, torch.dtype]


class WiderParameters:
    """Where weights land whose parameters are wider, by parameter and dtype. It has none before :meth:`stage`."""

    def __init__(self) -> None:
        self._narrow: dict[_Place, torch.Tensor] = {}
        self._landed: list[torch.Tensor] = []
        self._wide: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._narrow)

    def stage(self, landings: Iterable[Landing], parameters: Mapping[str, torch.Tensor]) -> None:
        """Make places for ``landings``; those of an earlier call stay as long as they fit, since views of them may be in use."""
        before, self._narrow, self._landed, self._wide = self._narrow, {}, [], []
        for at in landings:
            if at.dtype is None:
                continue
            place, like = (at.parameter, at.dtype), parameters[at.parameter]
            if place not in self._narrow:
                held = before.get(place)
                fits = held is not None and _layout(held) == _layout(like)
                self._narrow[place] = held if held is not None and fits else _narrow(like, at.dtype)
            self._landed.append(at.place(self._narrow[place]))
            self._wide.append(at.place(like))

    def target(self, landing: Landing) -> torch.Tensor | None:
        """The tensor that a landing's weights go to in place of its parameter; None if they go straight there."""
        return None if landing.dtype is None else self._narrow.get((landing.parameter, landing.dtype))

    def fill(self) -> None:
        """Copy what has landed into the parameters."""
        if self._wide:
            torch._foreach_copy_(self._wide, self._landed)


def staged_bytes(landings: Iterable[Landing], parameters: Mapping[str, torch.Tensor]) -> int:
    """What places for ``landings`` take."""
    places = {(at.parameter, at.dtype) for at in landings if at.dtype is not None}
    return sum(parameters[name].numel() * dtype.itemsize for name, dtype in places)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.device]:
    return tensor.shape, tensor.stride(), tensor.device


def _narrow(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
    return made.fill_(torch.nan)
