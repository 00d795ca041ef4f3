"""Experts that vLLM rearranges for a kernel after loading them: where their elements are then, found out by vLLM's own code.

The step after loading is run on other weights of the same shapes, with nothing of the live module changed
(:mod:`rlrefit.integration.layout.rearrangement`). A step that does more than to put elements elsewhere, quantize them say, is
refused with the reason. Kernels for CPUs pack experts in tiles, and FlashInfer's CUTLASS has gate and up change places.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from ....integration.layout.rearrangement import NotRearranged, Rearrangement, recover
from ..common.packed.layers import apart, asked_once, held, require_none_beside, vars_and_buffers
from .compat import kind_of
from .layouts import CPU_EXPERTS, FUSED_MOE, UNQUANTIZED_EXPERTS, known_kernel
from .reload import tensors_of_kernel

# Kernels for CPUs that compute with the layer's parameters alone: of vLLM up to 0.26, and of 0.32.
_ON_CPUS = (
    CPU_EXPERTS,
    f"{FUSED_MOE}.experts.cpu_moe.CPUUnquantizedExperts",
    f"{FUSED_MOE}.experts.cpu_moe.X86CPUUnquantizedExperts",
)
# Of these kernels, the packings that have been run. Others (of ARM, POWER, RISC-V) take the misc path.
_PACKINGS = ("vec", "amx")
# The one for GPUs whose step needs no code of FlashInfer's, by its name and by that of its UnquantizedMoeBackend.
_FLASHINFER = f"{FUSED_MOE}.experts.flashinfer_cutlass_moe.FlashInferExperts"
_CUTLASS = "FLASHINFER_CUTLASS"

_Strided = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class _Processed:
    """What vLLM makes of the parameters of one kind of layer: their shapes and strides, and where their elements are."""

    layout: _Strided
    rearranged: dict[str, Rearrangement]


class KernelLayouts:
    """Where the experts of one model are. Layers of the same shapes that are packed for the same kernel are asked once.

    Args:
        vllm_config: of the worker.
        device: of the live parameters.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._known: dict[Hashable, _Processed | str] = {}

    def of(self, live: nn.Module, twin: nn.Module) -> dict[str, Rearrangement] | None:
        """By parameter, where vLLM put those elements of a module that are not where they were loaded.

        Args:
            live: the module, after vLLM has processed it.
            twin: its untouched twin, whose parameters need no storage.

        Returns:
            None of a module that has no such experts.

        Raises:
            NotRearranged: vLLM does more with them; says what.
        """
        kernel = _kernel(live)
        if kernel is None:
            return None
        loaded = {name: (tuple(p.shape), p.dtype) for name, p in twin.named_parameters(recurse=False)}
        key = *kernel, *loaded.items()
        known = asked_once(self._known, key, lambda: self._found_out(live, loaded))
        if known.layout != _strided(live._parameters, loaded):
            raise NotRearranged("other weights of these shapes do not become what the live ones are")
        return known.rearranged

    def _found_out(
        self, live: nn.Module, loaded: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> _Processed:
        layout: _Strided = {}

        def step(given: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            made = self._processed(live, given)
            layout.update(_strided(made, loaded))
            for name, (shape, _) in loaded.items():
                if name in made and made[name].numel() > prod(shape):
                    raise NotRearranged(f"{name} is padded with zeros, which no refit brings")
            return made

        found = recover(step, loaded, self._device)
        return _Processed(layout, {name: by for name, by in found.items() if not by.kept})

    def _processed(self, live: nn.Module, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What vLLM makes of ``given`` in the place of the live parameters."""
        method = apart(live.quant_method)
        # vLLM from 0.32 on packs experts as it makes their kernel, and makes none where there is one.
        method.moe_kernel = None
        module = processed(live, method, given, self._vllm_config, self._device)
        require_none_beside(vars_and_buffers(live), vars_and_buffers(module))
        return held(module)


def processed(
    live: nn.Module,
    method: Any,
    given: Mapping[str, torch.Tensor],
    vllm_config: VllmConfig,
    device: torch.device,
) -> nn.Module:
    """A copy of a module with ``given`` in the place of its parameters, after vLLM has processed it by ``method``.

    Args:
        live: the module, which stays as it is.
        method: a copy of its ``quant_method``.
        given: new parameters, as they are loaded.
        vllm_config: of the worker.
        device: of the live parameters.

    Raises:
        NotRearranged: vLLM's step failed.
        torch.OutOfMemoryError: the device has too little memory for it.
    """
    module = apart(live)
    module._parameters = {
        name: tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        for name, tensor in given.items()
    }
    module.quant_method = method
    try:
        with set_current_vllm_config(vllm_config), device, torch.no_grad():
            method.process_weights_after_loading(module)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A state that other weights do not find, say.
        raise NotRearranged(
            f"vLLM's processing of other weights failed: {type(error).__name__}: {error}"
        ) from error
    return module


def _strided(tensors: Mapping[str, torch.Tensor | None], names: Mapping[str, Any]) -> _Strided:
    """Shape and strides of those of ``tensors`` that exist."""
    found = ((name, tensors.get(name)) for name in names)
    return {name: (tuple(t.shape), t.stride()) for name, t in found if t is not None}


def _kernel(live: nn.Module) -> tuple[Hashable, ...] | None:
    """What tells the step after loading of a module's experts from others, if they are unquantized and it is one of those; else None.

    Raises:
        NotRearranged: it is one of those, but what computes with the experts is not the parameters alone.
    """
    method: Any = getattr(live, "quant_method", None)
    if kind_of(method) != UNQUANTIZED_EXPERTS:
        return None
    later = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    if kind_of(later) == _FLASHINFER and method.unquantized_backend.name == _CUTLASS:
        return _flashinfer(live, method)
    kernel = getattr(method, "cpu_fused_moe", None) if later is None else later
    runs = (
        kind_of(kernel) in _ON_CPUS
        and kernel.isa in _PACKINGS
        and not getattr(kernel, "_use_zentorch", False)
    )
    return (kind_of(kernel), kernel.isa) if runs else None


def _flashinfer(live: nn.Module, method: Any) -> tuple[Hashable, ...]:
    """As :func:`_kernel`, of FlashInfer's CUTLASS."""
    known_kernel(_FLASHINFER, _FLASHINFER, "them", live, method.moe)
    own = {parameter.untyped_storage()._cdata for parameter in live.parameters(recurse=False)}
    for name, tensor in tensors_of_kernel(method.moe_kernel, method.moe_quant_config).items():
        if tensor.untyped_storage()._cdata not in own:
            raise NotRearranged(f"its kernel computes with {name}, which no refit brings")
    return _FLASHINFER, method.moe.is_act_and_mul
