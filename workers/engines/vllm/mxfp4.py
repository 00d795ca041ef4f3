"""GPT-OSS's experts, which vLLM holds in MXFP4: what vLLM makes of them after loading.

This was read in vLLM 0.21 (``quantization/mxfp4.py``, ``fused_moe/oracle/mxfp4.py`` and ``utils/marlin_utils_fp4.py``). A checkpoint has
codes, E8M0 scales and biases of all experts together, gate and up rows alternating. vLLM rounds hidden and intermediate size up for its
kernels and leaves zeros in the padding. Of this

- the emulation, and a platform that has no kernel (CPUs), leave all as it is loaded;
- Marlin puts codes, scales and biases in an order of its own, in as many bytes, and changes none of them where inputs have 16 bits.

What :mod:`..common.packed.layers` says holds for these layers. Kernels of other backends join codes and scales in objects of their own, or
swizzle them: what they make takes vLLM's reload, if it is held in parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....integration.errors import RefitError
from ....integration.layout.codes import Bytes, Codes, Letters, Nibbles
from ....integration.layout.rearrangement import NotRearranged
from ..common.packed.making import PutInOrder, Shapes
from .compat import kind_of

# By name: an engine without such layers imports none of these.
_METHOD = "vllm.model_executor.layers.quantization.mxfp4.GptOssMxfp4MoEMethod"
_AS_LOADED, _MARLIN = "as loaded", "marlin"
_BACKENDS = {"NONE": _AS_LOADED, "EMULATION": _AS_LOADED, "MARLIN": _MARLIN}
# E8M0's from 1 on, for all but the zero that stands for none.
_LETTERS = tuple(range(1, 255))


class Mxfp4(PutInOrder):
    """A :class:`~..common.packed.layers.PackedFormat`."""

    def kind(self, live: nn.Module) -> str:
        kind = kind_of(getattr(live, "quant_method", None))
        return kind if kind == _METHOD else ""

    def kernel(self, live: Any) -> str:
        method = live.quant_method
        name = method.mxfp4_backend.name
        known = _BACKENDS.get(name)
        if known is None:
            raise NotRearranged(
                f"what {name} makes of packed experts is not known (start vLLM with moe_backend='marlin')"
            )
        if method.moe.moe_parallel_config.use_all2all_kernels:
            raise NotRearranged("its experts are made with communicators of their own")
        return known

    def asked(
        self, live: Any, loaded: Shapes, kernel: str, device: torch.device
    ) -> tuple[Mapping[str, Codes], frozenset[str]]:
        asked: dict[str, Codes] = {}
        for name, (shape, kind) in loaded.items() if kernel == _MARLIN else ():
            if name.endswith("weight"):
                asked[name] = Nibbles((*shape[:-1], shape[-1] * 2))
            elif name.endswith("scale"):
                asked[name] = Letters(shape, kind, _LETTERS, _LETTERS)
            else:
                asked[name] = Bytes((*shape[:-1], shape[-1] * kind.itemsize), kind)
        return asked, frozenset()

    def computed_with(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        config = live.quant_method.moe_quant_config
        if config is None:
            return {}
        held = {"w13_weight_scale": config.w1_scale, "w2_weight_scale": config.w2_scale}
        if "w13_bias" in live._parameters:
            held |= {"w13_bias": config.w1_bias, "w2_bias": config.w2_bias}
        return held


def check_experts(model: nn.Module) -> None:
    """Refuse experts that a kernel holds in objects which are no parameters: vLLM's reload makes new ones, and CUDA graphs would go on
    with the memory of the old ones.

    Raises:
        RefitError: names the first such module.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if kind_of(method) == _METHOD and "w13_weight" not in module._parameters:
            raise RefitError(
                f"the {method.mxfp4_backend.value} kernel keeps the experts of {name} in objects of its own, which no refit can "
                "write; start vLLM with moe_backend='marlin'",
                stage="trace",
            )
