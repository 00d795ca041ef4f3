"""Layers of a vLLM model that compressed-tensors' methods hold in INT4 (W4A16): their format, and what vLLM makes of them.

This was read in vLLM 0.21, 0.26 and 0.32 (``compressed_tensors_wNa16.py``, ``compressed_tensors_moe_wna16*.py``,
``kernels/linear/mixed_precision`` and ``utils/marlin_utils.py``). A checkpoint has codes ``weight_packed`` (int32 ``[n, k / 8]``), scales
``weight_scale`` (``[n, k / group]`` in the model's dtype) and the constant ``weight_shape``, with which nothing computes. Experts are
loaded transposed (``[E, k / 8, 2 n]``), but by 0.32. Of these

- Marlin has codes and scales in an order of its own, in as many bytes;
- the CPU's kernel has codes of 16 rows beside each other, and scales transposed; which of its products computes by that, AMX's or
  another one, does not change the order;
- Triton's experts are transposed back.

So all keep their bytes, of which codes and 16-bit scales go elsewhere. What :mod:`..common.packed.layers` says holds for these layers. Kernels
that pad (Marlin from 0.26 on), that change codes (the CPU's of 8-bit inputs from 0.26 on) or that were not read take vLLM's reload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....integration.layout.codes import Codes
from ....integration.layout.rearrangement import NotRearranged
from ....integration.quantize import int4
from ....integration.quantize.formats import Int4
from ..common.packed.int4 import (
    SCALES,
    SCALES_OF_EXPERTS,
    Int4Weights,
    asked_of_int4,
    check_columns,
    int4_format,
)
from ..common.packed.making import PutInOrder, Shapes
from .compat import WNA16_EXPERTS, WNA16_LINEAR, WNA16_MARLIN_EXPERTS, kind_of
from .layouts import known_kernel

_KERNELS = "vllm.model_executor.kernels.linear.mixed_precision"
_MARLIN, _CPU, _TRITON = "marlin", "cpu", "triton"
_MADE_OF = "INT4 codes and scales"
_LINEAR_KERNELS = {
    f"{_KERNELS}.marlin.MarlinLinearKernel": _MARLIN,
    f"{_KERNELS}.cpu.CPUWNA16LinearKernel": _CPU,
}
# vLLM's own choice on Hopper for groups of 64 and 128.
_MACHETE = f"{_KERNELS}.machete.MacheteLinearKernel"
_EXPERT_BACKENDS = {"MARLIN": _MARLIN, "TRITON": _TRITON}
_EXPERTS = (WNA16_EXPERTS, WNA16_MARLIN_EXPERTS)


def int4_modules(model: nn.Module) -> dict[str, Int4Weights]:
    """The modules of ``model`` that hold weights in INT4 as a trainer makes it, by name."""
    found = {}
    for name, module in model.named_modules():
        kind = _kind_of(module)
        if kind and (format := _format_of(module, kind)) is not None:
            found[name] = Int4Weights(SCALES if kind == WNA16_LINEAR else SCALES_OF_EXPERTS, format)
    return found


def check_groups(model: nn.Module, modules: Mapping[str, Int4Weights]) -> None:
    """Refuse experts whose shards cut groups: vLLM 0.21 loads them without an error, with scales of other columns than their own.

    Args:
        model: the live one.
        modules: of it, as :func:`int4_modules` finds them.

    Raises:
        RefitError: names the first such module.
    """
    for name, facts in modules.items():
        module = model.get_submodule(name)
        if _kind_of(module) not in _EXPERTS:
            continue
        config: Any = module.quant_method.moe  # type: ignore[union-attr]
        hidden, shared = config.hidden_dim, config.intermediate_size_per_partition
        remedy = "enable_expert_parallel, another tensor_parallel_size"
        check_columns(name, facts.format, hidden, shared, "vLLM", remedy)


class Int4Layers(PutInOrder):
    """A :class:`~..common.packed.layers.PackedFormat`, of the layers of :func:`int4_modules`."""

    def kind(self, live: nn.Module) -> str:
        kind = _kind_of(live)
        return kind if kind and _format_of(live, kind) is not None else ""

    def kernel(self, live: Any) -> str:
        if _kind_of(live) != WNA16_LINEAR:
            name, experts = _backend(live.quant_method), live.quant_method.moe
            if experts.has_bias:
                raise NotRearranged("its kernel computes with biases of experts, which have not been read")
            return known_kernel(_EXPERT_BACKENDS.get(name), name, _MADE_OF, live, experts=experts)
        kernel = live.scheme.kernel
        if kind_of(kernel) == _MACHETE:
            raise NotRearranged(
                "what Machete makes of INT4 codes and scales is not known (start vLLM with "
                "VLLM_DISABLED_KERNELS=MacheteLinearKernel, by which it takes Marlin, or from groups of 32)"
            )
        known = known_kernel(_LINEAR_KERNELS.get(kind_of(kernel)), type(kernel).__name__, _MADE_OF, live)
        if kernel.config.act_type.itemsize == 1:
            raise NotRearranged("it computes with inputs of 8 bits, for which vLLM changes codes and scales")
        return known

    def asked(
        self, live: Any, loaded: Shapes, kernel: str, device: torch.device
    ) -> tuple[Mapping[str, Codes], frozenset[str]]:
        # Marlin's bias has another order, too.
        return asked_of_int4(loaded, ("bias",) if kernel == _MARLIN else ()), frozenset()

    def computed_with(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        # vLLM 0.21 has no kernel beside the layer, whose parameters the method hands over each time.
        if _kind_of(live) == WNA16_LINEAR or getattr(live.quant_method, "moe_kernel", None) is None:
            return {}
        config = live.quant_method.moe_quant_config
        return {"w13_weight_scale": config.w1_scale, "w2_weight_scale": config.w2_scale}


def _kind_of(module: nn.Module) -> str:
    """The method, or the scheme, by which a module holds integers packed by compressed-tensors; empty if it does not."""
    kinds = kind_of(getattr(module, "quant_method", None)), kind_of(getattr(module, "scheme", None))
    return next((k for k in kinds if k in (WNA16_LINEAR, *_EXPERTS)), "")


def _format_of(module: Any, kind: str) -> Int4 | None:
    """None of other integers than a trainer makes."""
    if kind == WNA16_LINEAR:
        how = module.scheme
        plain = how.pack_factor == int4.PER_ITEM and how.symmetric and not getattr(how, "has_g_idx", False)
    else:
        how = module.quant_method
        plain = how.num_bits == 4 and how.weight_quant.symmetric and how.weight_quant.actorder is None
    # A head of vLLM 0.21 does not tell its dtype.
    return int4_format(plain, how.group_size, getattr(module, "params_dtype", None))


def _backend(method: Any) -> str:
    """What computes with experts, as vLLM calls it from 0.26 on."""
    chosen = getattr(method, "wna16_backend", None)
    if chosen is not None:
        name: str = chosen.name
        return name
    return str(getattr(method, "kernel_backend", _TRITON)).upper()
