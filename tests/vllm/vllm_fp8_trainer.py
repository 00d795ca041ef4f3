"""A trainer rank in BF16 for tests of engines in FP8 blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from vllm_checkpoints import manifest_of

from rlrefit.integration.layout import Fragment
from rlrefit.integration.weights.manifest import TensorSpec

Tensors = dict[str, torch.Tensor]


class Halves:
    """A trainer rank that has a half of each weight's rows in BF16 where both halves are whole blocks, else all."""

    def __init__(self, rank: int, checkpoints: Sequence[Tensors]) -> None:
        self.device = torch.device("cpu")
        self._rank, self._checkpoints = rank, checkpoints
        self._now = checkpoints[0]
        self._held = {name: self._part(tensor).clone() for name, tensor in self._now.items()}

    def take_on(self, index: int) -> None:
        self._now = self._checkpoints[index]
        for name, tensor in self._now.items():
            self._held[name].copy_(self._part(tensor))

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(*entry) for entry in manifest_of(self._now)]

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        found = []
        for name, part in self._held.items():
            shape = tuple(self._now[name].shape)
            start = self._rank * part.shape[0] if part.shape[0] < shape[0] else 0
            box = ((start, start + part.shape[0]), *((0, n) for n in shape[1:]))
            found.append(Fragment(name, shape, box, part))
        return found, {}

    def settle(self) -> None:
        pass

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._now[name]) for name in names)

    def storage_key(self) -> Hashable:
        return tuple(part.data_ptr() for part in self._held.values())

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        half, rest = divmod(tensor.shape[0], 2)
        return tensor if rest or half % 128 else tensor[self._rank * half : (self._rank + 1) * half]
