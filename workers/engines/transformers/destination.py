"""A transformers model as a weight destination."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch

from ....integration.errors import RefitMismatch
from ....integration.layout import Fragment
from ....integration.layout.boxes import box_of
from ....integration.layout.fragments import local_slice
from ....integration.quantize import is_float8
from ....integration.weights.endpoints import storage_key
from ....integration.weights.manifest import TensorSpec
from .placement import TensorParallelPlacement


class TransformersDestination:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightDestination` for a transformers model.

    Its loader takes full tensors and copies this rank's parts: the same placement that the
    shard-to-shard path writes through.
    """

    def __init__(self, model: torch.nn.Module, tp_rank: int, tp_size: int):
        self._model = model
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._by_name: dict[str, list[Fragment]] = {}

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def kept_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        # Anew: what moves a model to another dtype or device gives it new buffers, and some its parameters too.
        placed = TensorParallelPlacement(self._model, self._tp_rank, self._tp_size).place(specs)
        self._by_name = {}
        for fragment in placed:
            self._by_name.setdefault(fragment.name, []).append(fragment)
        return placed, {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full tensors into the local shards.

        Raises:
            RefitMismatch: a tensor of another shape than was agreed on.
        """
        for name, tensor in weights:
            for fragment in self._by_name.get(name, ()):
                if tuple(tensor.shape) != fragment.full_shape:
                    raise RefitMismatch(
                        f"{list(tensor.shape)} came where {list(fragment.full_shape)} was agreed on",
                        stage="misc",
                        parameter=name,
                    )
                if is_float8(tensor.dtype) and fragment.view.dtype != tensor.dtype:
                    raise RefitMismatch(
                        f"codes in {tensor.dtype} came for a weight kept in {fragment.view.dtype}; their scales would be lost",
                        stage="misc",
                        parameter=name,
                    )
                fragment.view.copy_(tensor[local_slice(box_of(tensor.shape), fragment.box)])

    def finish(self, version: int) -> None:
        """Nothing is derived from the weights, and every call of ``generate`` makes its own KV cache."""

    def abandon(self) -> None:
        """The loader keeps no state between weights."""

    def storage_key(self) -> Hashable:
        # Buffers that checkpoints have (a router's correction bias) are placed as parameters are.
        return storage_key((*self._model.parameters(), *self._model.buffers()))
