"""Layers of an SGLang model that compressed-tensors' schemes hold in INT4 (W4A16): their format, and what SGLang makes of them.

This was read in SGLang 0.5.17 and 0.5.23 (``compressed_tensors/schemes/compressed_tensors_wNa16.py`` and ``…_moe.py``). Experts are
loaded transposed (``[E, k / 8, 2 n]``). Of what :mod:`..common.packed.int4` says that a checkpoint has

- Marlin has codes and scales in an order of its own, in as many bytes. SGLang has it for linear layers, and for experts unless
  ``moe_runner_backend`` is ``triton``;
- Triton's experts are transposed back.

SGLang's loader can't write either again: parameters have lost their loaders, or their shapes. What SGLang makes of them after loading is
made by :mod:`..common.packed.layers` from what has landed, on every path. Layers of other kernels (FlashInfer's MXINT4, those of NPUs
and XPUs), activation orders, zero points, scales of whole rows and codes of 8 bits are refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsFusedMoEMethod,
    CompressedTensorsLinearMethod,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsWNA16,
    CompressedTensorsWNA16MoE,
    CompressedTensorsWNA16TritonMoE,
)
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
from ..common.packed.layers import (
    WORKSPACE,
    PackedLayers,
    apart,
    clear_workspaces,
    require_none_beside,
    vars_and_buffers,
)
from ..common.packed.making import PutInOrder, Shapes

_METHODS = {
    CompressedTensorsWNA16: CompressedTensorsLinearMethod,
    CompressedTensorsWNA16MoE: CompressedTensorsFusedMoEMethod,
    CompressedTensorsWNA16TritonMoE: CompressedTensorsFusedMoEMethod,
}
# By which SGLang knows experts that it has processed already.
_PROCESSED = ("is_marlin_converted", "is_triton_converted")
# Parameters that nothing computes with where there is no activation order.
_IDLE = ("weight_shape",)
_IDLE_OF_EXPERTS = tuple(
    f"{stack}_{name}"
    for name in ("weight_shape", "weight_g_idx", "g_idx_sort_indices")
    for stack in ("w13", "w2")
)


def int4_modules(model: nn.Module) -> dict[str, Int4Weights]:
    """The modules of ``model`` that hold weights in INT4 as a trainer makes it, by name."""
    found = {}
    for name, module in model.named_modules():
        format = _format_of(module)
        if format is not None:
            found[name] = Int4Weights(SCALES if _is_linear(module) else SCALES_OF_EXPERTS, format)
    return found


def check_groups(model: nn.Module) -> None:
    """Refuse experts whose shards cut groups.

    Raises:
        RefitError: names the first such module.
    """
    for name, facts in int4_modules(model).items():
        module: Any = model.get_submodule(name)
        if not _is_linear(module):
            hidden, shared = module.hidden_size, module.intermediate_size_per_partition
            check_columns(name, facts.format, hidden, shared, "SGLang", "ep_size, another tp_size")


def idle_parameters(model: nn.Module) -> frozenset[str]:
    """Names of those parameters of INT4 layers that nothing computes with, as they are before SGLang processes them."""
    return frozenset(
        f"{name}.{idle}" for name in int4_modules(model) for idle in _idle_of(model.get_submodule(name))
    )


def clear_locks(modules: Iterable[nn.Module]) -> None:
    """Fill the locks of Marlin's layers with zeros."""
    clear_workspaces(holder for module in modules for holder in (vars(module), vars(module.scheme)))


class Int4Layers(PutInOrder):
    """A :class:`~..common.packed.layers.PackedFormat`, of the layers of :func:`int4_modules`."""

    def kind(self, live: nn.Module) -> str:
        return type(live.scheme).__name__ if _format_of(live) is not None else ""

    def kernel(self, live: Any) -> str:
        # Each scheme computes by one.
        return self.kind(live)

    def asked(
        self, live: Any, loaded: Shapes, kernel: str, device: torch.device
    ) -> tuple[Mapping[str, Codes], frozenset[str]]:
        return asked_of_int4(loaded), frozenset()

    def computed_with(self, live: Any) -> Mapping[str, torch.Tensor | None]:
        return {}


class SglangPackedLayers(PackedLayers):
    """Those of one SGLang model.

    Args:
        device: of the live parameters.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__((Int4Layers(),), device)

    def _stepped(self, live: nn.Module, given: dict[str, nn.Parameter]) -> nn.Module:
        module: Any = apart(live)
        module.scheme = copy.copy(live.scheme)
        module._parameters = dict(given)
        for done in _PROCESSED:
            vars(module).pop(done, None)
        try:
            with self._device, torch.no_grad():
                module.quant_method.process_weights_after_loading(module)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A state that other weights do not find, say.
            raise NotRearranged(
                f"SGLang's processing of other weights failed: {type(error).__name__}: {error}"
            ) from error
        require_none_beside(vars_and_buffers(live), vars_and_buffers(module), WORKSPACE)
        require_none_beside(vars(live.scheme), vars(module.scheme), WORKSPACE)
        return module

    def _unused(self, live: nn.Module) -> Iterator[str]:
        yield from _idle_of(live)


def _is_linear(module: nn.Module) -> bool:
    return type(module.scheme) is CompressedTensorsWNA16


def _idle_of(module: nn.Module) -> tuple[str, ...]:
    return _IDLE if _is_linear(module) else _IDLE_OF_EXPERTS


def _format_of(module: Any) -> Int4 | None:
    """None of what holds no integers by compressed-tensors' schemes, or other ones than a trainer makes."""
    how = getattr(module, "scheme", None)
    if type(getattr(module, "quant_method", None)) is not _METHODS.get(type(how)):
        return None
    if type(how) is CompressedTensorsWNA16:
        plain = how.pack_factor == int4.PER_ITEM and how.symmetric and not how.has_g_idx
    else:
        plain = how.num_bits == 4 and how.sym and how.actorder is None
    # A head of SGLang 0.5.23 does not tell its dtype.
    return int4_format(plain, how.group_size, getattr(module, "params_dtype", None))
