"""Layers of a vLLM model that hold weights in MXFP8: their format, and what vLLM makes of them after loading.

This was read in vLLM 0.21: ModelOpt's method for linear layers (``quantization/modelopt.py``), compressed-tensors' scheme for linear
layers and its method for experts (``compressed_tensors_w8a8_mxfp8.py``, ``compressed_tensors_moe_w8a8_mxfp8.py``),
``kernels/linear/mxfp8`` and ``utils/marlin_utils_fp8.py``. A checkpoint has codes ``weight`` (E4M3 ``[n, k]``) and scales
``weight_scale`` (E8M0 as ``uint8`` ``[n, k / 32]``). Of these

- the emulation makes new parameters with the same bytes in the same places;
- FlashInfer's CUTLASS (Blackwell) keeps the codes, and has the scales in tiles of 128 rows and 4 columns. It fills tiles up that are
  not whole, which no refit brings, so such layers take vLLM's reload;
- Marlin (before Blackwell; linear layers and experts) has both in an order of its own, in as many bytes. It takes scales through the
  model's dtype, which BF16 does without loss.

ModelOpt's method for experts computes with FlashInfer's TRT-LLM kernels alone, which shuffle rows: it takes the misc path. So do layers
that vLLM itself quantizes as it loads them (``quantization="mxfp8"``), whose loader takes no codes. What :mod:`..common.packed.layers` says
holds for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ....integration.layout.codes import Codes, Letters
from ....integration.layout.rearrangement import NotRearranged
from ....integration.quantize.formats import Mxfp8
from ..common.packed.making import PutInOrder, Shapes
from .compat import MXFP8_LINEAR, kind_of, method_of
from .layouts import known_kernel

# By name: an engine without such layers imports none of these.
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors"
_SCHEME = f"{_COMPRESSED}.schemes.compressed_tensors_w8a8_mxfp8.CompressedTensorsW8A8Mxfp8"
_EXPERTS = (
    f"{_COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w8a8_mxfp8."
    "CompressedTensorsW8A8Mxfp8MoEMethod"
)
_MODELOPT_EXPERTS = f"{_QUANTIZATION}.modelopt.ModelOptMxFp8FusedMoE"
_KERNELS = "vllm.model_executor.kernels.linear.mxfp8"
_MARLIN = "marlin"
_MADE_OF = "codes and scales"
_LINEAR_KERNELS = {
    f"{_KERNELS}.emulation.EmulationMxfp8LinearKernel": "emulation",
    f"{_KERNELS}.flashinfer.FlashInferCutlassMxfp8LinearKernel": "flashinfer",
    f"{_KERNELS}.marlin.MarlinMxfp8LinearKernel": _MARLIN,
}
# Of vLLM's Fp8MoeBackend.
_EXPERT_BACKENDS = {"MARLIN": _MARLIN}
_SCALES = {"weight": "weight_scale"}
_SCALES_OF_EXPERTS = {"w13_weight": "w13_weight_scale", "w2_weight": "w2_weight_scale"}
# Of what lies in another place every byte stays what it is; 0 stands for no number.
_LETTERS = tuple(range(1, 256))


@dataclass(frozen=True)
class Mxfp8Weights:
    """How one module holds its weights.

    Attributes:
        scales: name of a parameter of codes → name of the parameter of its scales.
        format: in which the trainer has to send them.
    """

    scales: Mapping[str, str]
    format: Mxfp8 = field(default_factory=Mxfp8)


def mxfp8_modules(model: nn.Module) -> dict[str, Mxfp8Weights]:
    """The modules of ``model`` that hold weights in MXFP8 as a checkpoint has them, by name."""
    found = {}
    for name, module in model.named_modules():
        kind = _kind_of(module)
        if kind:
            found[name] = Mxfp8Weights(_SCALES if kind in (MXFP8_LINEAR, _SCHEME) else _SCALES_OF_EXPERTS)
    return found


class Mxfp8Layers(PutInOrder):
    """A :class:`~..common.packed.layers.PackedFormat`, of the layers of :func:`mxfp8_modules`."""

    def kind(self, live: nn.Module) -> str:
        return _kind_of(live)

    def kernel(self, live: Any) -> str:
        kind = _kind_of(live)
        if kind == _MODELOPT_EXPERTS:
            raise NotRearranged("what FlashInfer's TRT-LLM kernels make of experts is not known")
        if kind == _EXPERTS:
            name = live.quant_method.fp8_backend.name
            return known_kernel(
                _EXPERT_BACKENDS.get(name), name, _MADE_OF, live, experts=live.quant_method.moe
            )
        kernel = (live.quant_method if kind == MXFP8_LINEAR else live.scheme).kernel
        return known_kernel(_LINEAR_KERNELS.get(kind_of(kernel)), type(kernel).__name__, _MADE_OF, live)

    def asked(
        self, live: Any, loaded: Shapes, kernel: str, device: torch.device
    ) -> tuple[Mapping[str, Codes], frozenset[str]]:
        if kernel == _MARLIN and any(name.endswith("bias") for name in loaded):
            raise NotRearranged("it has a bias, which Marlin puts in another order, too")
        asked = {
            name: Letters(shape, kind, _LETTERS, _LETTERS)
            for name, (shape, kind) in loaded.items()
            if kind.itemsize == 1
        }
        return asked, frozenset()

    def computed_with(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        if _kind_of(live) != _EXPERTS:
            return {}
        config = live.quant_method.moe_quant_config
        return {"w13_weight_scale": config.w1_scale, "w2_weight_scale": config.w2_scale}


def _kind_of(module: nn.Module) -> str:
    """The method, or the scheme, by which a module holds MXFP8; empty if it does not."""
    kinds = method_of(getattr(module, "quant_method", None)), kind_of(getattr(module, "scheme", None))
    return next((k for k in kinds if k in (MXFP8_LINEAR, _SCHEME, _EXPERTS, _MODELOPT_EXPERTS)), "")
