"""Which modules of a live vLLM model may be written in place: a whitelist, with a reason for all others.

A fragment is right only where the live parameter still has the layout that the loader wrote, and where
nothing else was derived from it when the weights were processed after loading. Both are facts about
vLLM's own code, named here for each kind of module (read in vLLM 0.21, 0.26 and 0.32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from ....integration.layout.rearrangement import NotRearranged
from ..common.loader_trace.modules import changed_parameter
from ..common.packed.layers import PackedLayout
from .compat import kind_of
from .fp8 import block_fp8

ATTENTION_MODULES = (Attention, MLAAttention, MMEncoderAttention)
# By name: a dense engine imports none of these, and what a later vLLM has under another name takes the misc path.
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
UNQUANTIZED_EXPERTS = f"{FUSED_MOE}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod"
CPU_EXPERTS = f"{FUSED_MOE}.cpu_fused_moe.CPUFusedMOE"
# The one that kernels inherit, which does nothing.
_NO_PACKING = "FusedMoEExperts.process_weights_after_loading"
# Of vLLM's UnquantizedMoeBackend, those whose kernel format is the loader's: convert_to_unquantized_kernel_format returns both as
# they are. What others make of them is found out by KernelLayouts, or it is not.
_PLAIN_MOE_BACKENDS = ("TRITON", "BATCHED_TRITON")


@dataclass(frozen=True)
class VllmLayout(PackedLayout):
    """Of a module of vLLM's.

    Attributes:
        reload: vLLM's loader cannot write it in place, so new weights need vLLM's layerwise reload.
    """

    reload: bool = False

    @property
    def separable(self) -> bool:
        # Its loader then writes each parameter where it is, and nothing is made of them afterwards.
        return not self.reload and not self.placed


def module_layout(name: str, live: nn.Module, twin: nn.Module, promised: bool = False) -> VllmLayout:
    """Classify the live module ``name`` by its type and by its parameters beside the untouched twin's.

    Args:
        name: of the module.
        live: the module.
        twin: its untouched twin.
        promised: if it holds FP8 blocks, all of them come in the very format that it was said to hold.
    """
    method = getattr(live, "quant_method", None)
    visited = isinstance(method, QuantizeMethodBase) or isinstance(live, ATTENTION_MODULES)
    changed = changed_parameter(live, twin)
    if changed:
        return VllmLayout(f"layer {name}: {changed}", reload=True)
    blocks = block_fp8(live)
    if blocks is not None:
        effect = blocks.post_load_effect(promised)
        if effect:
            return VllmLayout(f"layer {name}: {effect}", reload=True)
        return VllmLayout(placed=True, swapped=blocks.swapped)
    derived = _post_load_effect(live, method)
    if derived:
        return VllmLayout(f"layer {name}: {derived}", reload=visited)
    return VllmLayout()


def has_padding(live: nn.Module) -> bool:
    """Whether a fused-experts module has elements that no checkpoint tensor reaches (rounded-up sizes)."""
    config = getattr(live, "moe_config", None)
    return config is not None and (
        config.hidden_dim != config.hidden_dim_unpadded
        or config.intermediate_size_per_partition != config.intermediate_size_per_partition_unpadded
    )


def known_kernel(known: str | None, name: str, made_of: str, live: nn.Module, experts: Any = None) -> str:
    """The kernel of a packed layer, if it is known what it makes of the layer.

    Args:
        known: its name here, None if there is none.
        name: vLLM's.
        made_of: what it takes.
        live: the layer.
        experts: vLLM's configuration of experts, if it computes some.

    Raises:
        NotRearranged: it can't be told; says why.
    """
    if known is None:
        raise NotRearranged(f"what {name} makes of {made_of} is not known")
    if experts is not None and experts.moe_parallel_config.use_all2all_kernels:
        raise NotRearranged("its experts are made with communicators of their own")
    if has_padding(live):
        raise NotRearranged("its experts are padded with elements that no refit brings")
    return known


def _post_load_effect(live: nn.Module, method: Any) -> str:
    """Why direct writes may miss what post-load processing made of the weights; empty if they cannot."""
    kind = type(method)
    if method is None and not hasattr(live, "process_weights_after_loading"):
        # vLLM makes nothing of it after a load: its own loader would write the same bytes in the same place.
        return ""
    if kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return _cpu_packing(live) if current_platform.is_cpu() else ""
    if kind_of(method) == UNQUANTIZED_EXPERTS:
        return _experts_effect(method)
    owner = type(live) if method is None else kind
    return f"process_weights_after_loading of {owner.__name__} may rewrite the layout"


def _cpu_packing(layer: nn.Module) -> str:
    """Why the CPU platform computes with a packed copy of a layer's weight (dispatch_cpu_unquantized_gemm).

    vLLM gives the layer a function that computes. One that holds nothing takes the weight as it is; one of a kernel that packs
    (oneDNN's, SGL's, zentorch's) holds the packed copy.
    """
    if layer.weight.dim() != 2:
        packed = hasattr(layer, "_cpu_unpacked_conv_weight")
        return "the CPU's convolution computes with a packed weight" if packed else ""
    function = getattr(layer, "cpu_linear", None)
    if function is None or getattr(function, "__closure__", None):
        return (
            "the CPU's kernel computes with a packed copy of the weight (oneDNN's does where rlrefit's worker extension was not "
            "in use as the model was loaded)"
        )
    return ""


def _experts_effect(method: Any) -> str:
    backend = method.unquantized_backend
    if backend.name in _PLAIN_MOE_BACKENDS:
        kernel = packing_experts(method)
        return f"process_weights_after_loading of {kernel} may rewrite the layout" if kernel else ""
    if backend.name != "CPU":
        return (
            f"process_weights_after_loading of the {backend.value} experts backend rewrites the layout (start vLLM with "
            "moe_backend='triton', which computes with the experts as they are loaded)"
        )
    if packing := packing_experts(method):
        return f"process_weights_after_loading packs the experts for {packing}"
    kernel = getattr(method, "cpu_fused_moe", None)
    if kind_of(kernel) != CPU_EXPERTS:
        return f"process_weights_after_loading packs the experts for {type(kernel).__name__}"
    if kernel.forward_method != kernel.forward_torch:
        return f"process_weights_after_loading packs the experts for the CPU's grouped GEMM ({kernel.isa})"
    return ""


def packing_experts(method: Any) -> str:
    """The class of the kernel of unquantized experts, where it makes something of their weights after loading; else empty.

    vLLM has such a kernel from 0.32 on CPUs, and calls its function once: not when weights are loaded again.
    """
    if kind_of(method) != UNQUANTIZED_EXPERTS:
        return ""
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    function = getattr(type(experts), "process_weights_after_loading", None)
    if function is None or function.__qualname__ == _NO_PACKING:
        return ""
    return type(experts).__name__
