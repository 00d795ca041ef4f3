"""Which modules of a live SGLang model may be written in place: a whitelist, with a reason for all others.

What each kind of module does with loaded weights is named here as it was read in SGLang 0.5.17 and 0.5.23:
``layers/quantization/unquant.py`` (AITER shuffles experts in place, FlashInfer's TRT-LLM experts are rearranged, gate and up may
be interleaved, AMX packs on CPUs). FP8 blocks are :mod:`.fp8`'s, and INT4 is :mod:`.int4`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.quantization import unquant
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.utils import use_intel_amx_backend
from torch import nn

from ..common.loader_trace.modules import changed_parameter
from ..common.packed.layers import PackedLayout
from .fp8 import block_fp8


@dataclass(frozen=True)
class SglangLayout(PackedLayout):
    """Of a module of SGLang's.

    Attributes:
        loadable: SGLang's own loader can write it: the parameters still have the shape in which they are loaded.
        processed: after a load, SGLang's quantization method has to process it again.
    """

    loadable: bool = True
    processed: bool = False

    @property
    def separable(self) -> bool:
        # Its loader then writes each parameter where it is, and nothing is made of them afterwards.
        return self.loadable and not self.processed and not self.placed


def module_layout(name: str, live: nn.Module, twin: nn.Module) -> SglangLayout:
    """Classify the live module ``name`` by its type and by its parameters beside the untouched twin's."""
    blocks = block_fp8(live)
    if blocks is not None and blocks.final:
        return SglangLayout(f"layer {name}: {blocks.effect}", loadable=False)
    changed = changed_parameter(live, twin, besides=blocks.packed if blocks else ())
    if changed:
        return SglangLayout(f"layer {name}: {changed}", loadable=False)
    method = getattr(live, "quant_method", None)
    if use_intel_amx_backend(live):
        return SglangLayout(f"layer {name}: its weights are packed for AMX", loadable=False)
    if blocks is not None:
        if blocks.effect:
            return SglangLayout(f"layer {name}: {blocks.effect}", processed=True)
        return SglangLayout(loadable=not blocks.packed, placed=bool(blocks.packed))
    if type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return SglangLayout()
    if isinstance(method, UnquantizedFusedMoEMethod):
        effect = _experts_effect(method)
        return SglangLayout(f"layer {name}: {effect}", loadable=False) if effect else SglangLayout()
    if method is not None:
        return SglangLayout(
            f"layer {name}: process_weights_after_loading of {type(method).__name__} may rewrite the layout",
            processed=True,
        )
    made = sorted(_tensors(live).keys() - _tensors(twin).keys())
    if made:
        return SglangLayout(
            f"layer {name}: it holds {made[0]}, which was made after {type(live).__name__} and may be of its weights"
        )
    # SGLang does nothing with it after a load, so what its loader is seen to do, which is no more than to copy, is all.
    return SglangLayout()


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a module holds of its own, parameters, buffers and tensors beside them."""
    held = {**module._parameters, **module._buffers, **vars(module)}
    return {name: tensor for name, tensor in held.items() if isinstance(tensor, torch.Tensor)}


def _experts_effect(method: UnquantizedFusedMoEMethod) -> str:
    """What SGLang makes of loaded experts in place, in words; empty if it leaves them alone."""
    if method.use_flashinfer_trtllm_moe:
        return "FlashInfer's TRT-LLM experts are rearranged after loading; start SGLang with moe_runner_backend='triton'"
    if unquant._use_aiter:
        return "AITER shuffles experts after loading; start SGLang with moe_runner_backend='triton' and SGLANG_USE_AITER=0"
    if getattr(method, "w13_swiglu_interleaved", False):  # not in 0.5.17
        return "gate and up rows are interleaved after loading; start SGLang with SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=0"
    return ""
