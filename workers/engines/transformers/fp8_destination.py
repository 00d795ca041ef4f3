"""A transformers model whose linear layers are held in FP8 blocks, as inference engines hold them.

Codes and scales are what a refit writes. The model computes with what they stand for, in its own dtype: what FP8
weights do to a policy shows in its tokens and log-probabilities, without FP8 kernels and without their speed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ....integration.layout import Fragment
from ....integration.quantize import blocks, fp8_blockwise
from ....integration.quantize.formats import Format, Fp8Blockwise
from ....integration.weights.endpoints import storage_key
from ....integration.weights.manifest import TensorSpec
from .destination import TransformersDestination

_FORMAT = Fp8Blockwise()


class _Held(NamedTuple):
    """A part of a weight: what stands for it, where the model computes with it, and its place in the weight."""

    codes: torch.Tensor
    scales: torch.Tensor
    weight: torch.Tensor
    offset: tuple[int, int]


class TransformersFp8Destination(TransformersDestination):
    """As :class:`.destination.TransformersDestination`, with codes and scales in place of decoder layers' matrices.

    Routers, norms, embeddings and the head stay in the model's dtype, as in block-FP8 checkpoints.
    """

    def __init__(self, model: torch.nn.Module, tp_rank: int, tp_size: int):
        super().__init__(model, tp_rank, tp_size)
        self._held: list[_Held] = []

    @property
    def kept_bytes(self) -> int:
        quantized = sum(held.weight.nbytes for held in self._held)
        return super().kept_bytes - quantized + sum(h.codes.nbytes + h.scales.nbytes for h in self._held)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        """As :meth:`rlrefit.integration.weights.endpoints.StoresQuantized.quantized`."""
        placed = {fragment.name for fragment in super().fragments(specs)[0]}
        return {s.name: _FORMAT for s in specs if s.name in placed and self._is_linear(s)}

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        codes = {spec.name for spec in specs if spec.dtype == torch.float8_e4m3fn}
        scales = {name + _FORMAT.scale_name_end for name in codes}
        placed, _ = super().fragments([spec for spec in specs if spec.name not in scales])
        found: list[Fragment] = []
        self._held = []
        for fragment in placed:
            found += self._stored(fragment) if fragment.name in codes else [fragment]
        self._by_name = {}
        for fragment in found:
            self._by_name.setdefault(fragment.name, []).append(fragment)
        return found, {}

    def finish(self, version: int) -> None:
        for held in self._held:
            weight = fp8_blockwise.dequantize(
                held.codes, held.scales, held.offset, _FORMAT.block, held.weight.dtype
            )
            held.weight.copy_(weight)

    def storage_key(self) -> Hashable:
        stored = (tensor for held in self._held for tensor in (held.codes, held.scales))
        return super().storage_key(), storage_key(stored)

    def _stored(self, fragment: Fragment) -> list[Fragment]:
        """A fragment of codes, and that of the scales of all blocks that it touches."""
        scale_box = blocks.scale_box(fragment.box, _FORMAT.block)
        device = fragment.view.device
        codes = torch.empty(fragment.view.shape, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty([stop - start for start, stop in scale_box], device=device)
        (row, _), (column, _) = fragment.box
        self._held.append(_Held(codes, scales, fragment.view, (row, column)))
        scale_shape = blocks.scale_shape(fragment.full_shape, _FORMAT.block)
        return [
            replace(fragment, view=codes),
            Fragment(fragment.name + _FORMAT.scale_name_end, scale_shape, scale_box, scales),
        ]

    def _is_linear(self, spec: TensorSpec) -> bool:
        """Whether a weight is of a linear layer or an expert of a decoder layer."""
        if len(spec.shape) != 2 or ".layers." not in spec.name:
            return False
        owner = spec.name.rpartition(".")[0]
        module = dict(self._model.named_modules()).get(owner)
        # transformers keeps experts stacked, so a weight of one of them has no module; its routers are no Linear.
        return isinstance(module, torch.nn.Linear) or (module is None and ".experts." in spec.name)
