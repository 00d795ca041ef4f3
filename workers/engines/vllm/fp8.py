"""Modules of a vLLM model that hold weights in FP8 blocks: their format, and what vLLM does with them after loading.

This was read in vLLM 0.21, 0.26 and 0.32. Their method for FP8 checkpoints (``quantization/fp8.py``) leaves block-quantized weights and
scales as they were loaded. What happens then depends on the kernel of the module:

- Linear layers. The base class of the block kernels makes new parameters of both (``process_fp8_weight_block_strategy``).
  On ROCm it also pads or changes the dtype; such a change is detected. Triton and CUTLASS change nothing more. DeepGEMM's
  ``transform_sf_into_required_layout`` keeps FP32 scales of 128×128 blocks on Hopper. On Blackwell it packs them into int32;
  that is detected too. Before that, unless ``VLLM_USE_DEEP_GEMM_E8M0=0``, vLLM quantizes the quantized weights again,
  with powers of two as scales. If the scales are powers of two already, no value changes: a block whose largest code is 224
  gets codes twice as large and half the scale, and all others keep their bytes. FlashInfer's dynamic kernel does as DeepGEMM.
- Experts. Triton and CUTLASS use them as loaded, DeepGEMM as above. For FlashInfer's CUTLASS the halves of ``w13`` and of its
  scales change places, and scales below 1e-10 are raised to 1e-10; :mod:`rlrefit.integration.quantize.fp8_blockwise` makes
  none that small. All other backends rearrange them (``convert_to_fp8_moe_kernel_format``).

Some libraries replace vLLM's ``process_weights_after_loading`` on these classes, as NeMo-RL does with ``precision: fp8``.
Nothing is known of such functions, so their modules take vLLM's reload, which calls them. verl's function, for vLLM 0.20 and
later, wraps vLLM's own. It changes no byte and no layout: it notes the earlier shapes, and gives new parameters the loader's
attributes. That was read in verl 0.9.1, and holds for this version alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from inspect import getclosurevars
from typing import Any

import vllm
from torch import nn

from ....integration.quantize.formats import Fp8Blockwise
from ...frameworks.verl import contract as verl_contract
from ..common.loader_trace.quantized import FLOAT8
from .compat import kind_of

logger = logging.getLogger(__name__)

# By name, so that an engine without FP8 imports none of them. What a later vLLM calls otherwise takes the misc path.
_LINEAR = "vllm.model_executor.layers.quantization.fp8.Fp8LinearMethod"
_EXPERTS = "vllm.model_executor.layers.quantization.fp8.Fp8MoEMethod"
_KERNELS = "vllm.model_executor.kernels.linear.scaled_mm"
_PLAIN_KERNELS = (
    f"{_KERNELS}.cutlass.CutlassFp8BlockScaledMMKernel",
    f"{_KERNELS}.triton.TritonFp8BlockScaledMMKernel",
)
_DEEP_GEMM_KERNEL = f"{_KERNELS}.deep_gemm.DeepGemmFp8BlockScaledMMKernel"
_FLASHINFER_KERNEL = f"{_KERNELS}.flashinfer.FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
# Of vLLM's Fp8MoeBackend.
_PLAIN_BACKENDS = ("TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS")
_DEEP_GEMM_BACKENDS = ("DEEPGEMM", "BATCHED_DEEPGEMM")
_REQUANTIZED = (
    "vLLM quantizes loaded FP8 weights once more for DeepGEMM, with powers of two as scales (with "
    "policy.refit.trainer_quantize_fp8 the trainer makes such scales, and nothing has to be done)"
)
_CLAMPED = (
    "vLLM raises the smallest scales for FlashInfer's CUTLASS experts (those that the trainer makes with "
    "policy.refit.trainer_quantize_fp8 are none of them)"
)
# verl's function around vLLM's own, and the variable that holds that one.
_VERLS_WRAPPER = (
    "verl.utils.vllm.vllm_fp8_utils",
    "_make_process_weights_after_loading_for_vllm20.<locals>._patched_process_weights_after_loading",
)
_WRAPPED = "original_fn"


@dataclass(frozen=True)
class BlockFp8:
    """How one module holds its weights.

    Attributes:
        format: in which the trainer has to send them.
        scales: name of a parameter of codes → name of the parameter of its scales.
        effect: why vLLM does not use codes and scales as they were loaded; empty if it does.
        unless_promised: the same for codes and scales that may have another format than :attr:`format`.
        swapped: parameters in which vLLM swaps the two halves of the rows (of each expert).
    """

    format: Fp8Blockwise
    scales: Mapping[str, str]
    effect: str = ""
    unless_promised: str = ""
    swapped: frozenset[str] = frozenset()

    def post_load_effect(self, promised: bool) -> str:
        """Why direct writes would differ from what vLLM makes of loaded bytes; empty if they do not.

        Args:
            promised: whether all codes and scales come in :attr:`format`, and not from another quantizer.
        """
        return self.effect or ("" if promised else self.unless_promised)


def block_fp8(module: nn.Module) -> BlockFp8 | None:
    """How a module of a live model, or of its twin, holds its weights; None if not in FP8 blocks.

    vLLM's own method for FP8 checkpoints alone: others name or compute their scales otherwise.
    """
    method: Any = getattr(module, "quant_method", None)
    make = {_LINEAR: _linear, _EXPERTS: _experts}.get(kind_of(method))
    return make(method) if make is not None and method.block_quant else None


def uses_fp8(model: nn.Module) -> bool:
    """Whether vLLM's own method for FP8 checkpoints made a module of ``model``."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(kind_of(method) in (_LINEAR, _EXPERTS) for method in methods)


def block_modules(model: nn.Module) -> dict[str, BlockFp8]:
    """The modules of ``model`` that hold weights in FP8 blocks, by name."""
    return {name: facts for name, module in model.named_modules() if (facts := block_fp8(module))}


def tell_of_own_quantizers(model: nn.Module, served: Collection[str]) -> None:
    """Log, once for each method, that modules hold FP8 which the trainer does not make; ``served`` are those of which it does."""
    modules: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        method = "" if name in served else _own_quantizer(module)
        if method:
            modules.setdefault(method, []).append(name)
    for method, names in modules.items():
        logger.warning(
            "policy.refit.trainer_quantize_fp8 does not serve %d modules of this engine, %s first: %s makes or takes "
            "another FP8 than blocks, or MXFP8, with the names of a checkpoint, so they get the trainer's own dtype. Start "
            "vLLM with load_format='dummy' and hf_overrides={'quantization_config': {'quant_method': 'fp8', "
            "'activation_scheme': 'dynamic', 'weight_block_size': [128, 128]}} for the trainer to quantize",
            len(names),
            names[0],
            method,
        )


def _own_quantizer(module: nn.Module) -> str:
    """The method by which a live module quantizes weights to FP8 itself, or holds FP8 in another format than a trainer makes; empty
    if there is none."""
    method = getattr(module, "quant_method", None)
    if method is None:
        return ""
    held = any(parameter.dtype in FLOAT8 for parameter in module.parameters(recurse=False))
    return type(method).__name__ if held else ""


def _linear(method: Any) -> BlockFp8:
    kernel: Any = method.fp8_linear
    effect, ue8m0 = "", False
    if kind_of(kernel) == _FLASHINFER_KERNEL:
        kernel = kernel.fallback
    if kind_of(kernel) == _DEEP_GEMM_KERNEL:
        ue8m0 = kernel.use_deep_gemm_e8m0
    elif kind_of(kernel) not in _PLAIN_KERNELS:
        effect = f"process_weights_after_loading of {type(kernel).__name__} may rewrite the layout"
    unless_promised = _REQUANTIZED if ue8m0 else ""
    effect = effect or _replaced(method) or _replaced(kernel)
    return BlockFp8(_format(method, ue8m0), {"weight": "weight_scale_inv"}, effect, unless_promised)


def _experts(method: Any) -> BlockFp8:
    backend = method.fp8_backend.name
    effect, unless_promised, ue8m0 = "", "", False
    swapped: frozenset[str] = frozenset()
    if backend in _DEEP_GEMM_BACKENDS:
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        ue8m0 = is_deep_gemm_e8m0_used()
        unless_promised = _REQUANTIZED if ue8m0 else ""
    elif backend == "FLASHINFER_CUTLASS":
        unless_promised = _CLAMPED
        if method.moe.is_act_and_mul:
            swapped = frozenset({"w13_weight", "w13_weight_scale_inv"})
    elif backend not in _PLAIN_BACKENDS:
        effect = (
            f"process_weights_after_loading of the {method.fp8_backend.value} experts backend rewrites the layout (start vLLM with "
            "moe_backend='triton', which computes with the experts as they are loaded)"
        )
    effect = effect or _replaced(method)
    scales = {"w13_weight": "w13_weight_scale_inv", "w2_weight": "w2_weight_scale_inv"}
    return BlockFp8(_format(method, ue8m0), scales, effect, unless_promised, swapped)


def _replaced(owner: object) -> str:
    """Why the rules of this module do not hold for a method or a kernel: its post-load function is not vLLM's. Empty if it is.

    It is told by the module that compiled the function. A wrapper that takes over another function's name can't change that.
    """
    function: Any = owner.process_weights_after_loading  # type: ignore[attr-defined]
    while _is_verls_wrapper(function):
        function = getclosurevars(function).nonlocals[_WRAPPED]
    home = _home(function)
    if home.partition(".")[0] == vllm.__name__:
        return ""
    return (
        f"process_weights_after_loading of {type(owner).__name__} was replaced by a function of {home} and may rewrite the "
        "layout"
    )


def _is_verls_wrapper(function: Any) -> bool:
    """Whether it is the wrapper of the verl that was read. That of another verl counts as any library's function."""
    known = (_home(function), getattr(function, "__qualname__", "")) == _VERLS_WRAPPER
    return known and verl_contract.installed_version() == verl_contract.TESTED


def _home(function: Any) -> str:
    """The name of the module in which a function was compiled."""
    home: str = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return home


def _format(method: Any, ue8m0: bool) -> Fp8Blockwise:
    rows, columns = method.weight_block_size
    return Fp8Blockwise((rows, columns), ue8m0)
