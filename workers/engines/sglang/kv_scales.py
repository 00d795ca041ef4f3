"""Sets calibrated scales of the FP8 KV cache in a live SGLang model.

All of it was read in SGLang 0.5.17 and 0.5.23. A ``RadixAttention`` has ``k_scale`` and ``v_scale``, which its memory pool divides
by as it stores keys and values, and ``k_scale_float`` and ``v_scale_float``. SGLang makes them where a model hands its quantization
to its attention (Llama, Qwen2), and fills them from a checkpoint once. Elsewhere (Qwen3, Qwen3-MoE) they are None, and it drops a
checkpoint's scales. Here all cached layers get them, as ``BaseKVCacheMethod.process_weights_after_loading`` leaves them.

What reads them is the attention backend's:

- FlashAttention 3 (``fa3``) reads the tensors, so that CUDA graphs see new values, and uses none for heads wider than 256.
- ``triton`` reads the numbers, of which CUDA graphs keep those of the capture.
- Both turn queries into FP8 without a scale; ``triton`` does it in its kernels, wherever it reads the cache (``q.to(k.dtype)``).
- ``torch_native`` and ``intel_amx``, those of CPUs, read none, and store without. ``flashinfer`` reads a cached prefix without them
  (``forward_extend``). No other one was read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sglang
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.utils import is_hip, is_musa
from torch import nn

from ....integration.errors import RefitError
from ...kv_scales.endpoints import AttentionLayer, Scales, scale_names
from .compat import SCALES_READ, release

_E4M3 = "fp8_e4m3"
_KINDS = ("k", "v")
# A module of the engine, by what stands before it.
_ATTENTION = ".attn"
# The widest head that FlashAttention 3 reads with a scale.
_FA3_HEAD = 256


@dataclass(frozen=True)
class _Backend:
    """How an attention backend uses the scales.

    Attributes:
        on_host: whether it reads numbers. A CUDA graph keeps their values.
        widest_head: that it reads with a scale; None for any.
    """

    on_host: bool
    widest_head: int | None = None


_BACKENDS = {
    "fa3": _Backend(on_host=False, widest_head=_FA3_HEAD),
    "triton": _Backend(on_host=True),
}


class SglangScaledCache:
    """Implements :class:`rlrefit.workers.kv_scales.endpoints.ScaledCache` for one worker.

    Layers that have no scales get those of 1, with which SGLang computes as it does without.

    Args:
        runner: SGLang's ``ModelRunner``, its model loaded and its attention backends chosen.
        device: where the model's parameters live.

    Raises:
        RefitError: scales would not be used, or not all of them; lists all reasons.
    """

    def __init__(self, runner: Any, device: torch.device) -> None:
        self._attentions = {
            name: module
            for name, module in runner.model.named_modules()
            if isinstance(module, RadixAttention) and module.attn_type is not AttentionType.ENCODER_ONLY
        }
        backends = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
        problems = _problems(runner, self._attentions, backends)
        if problems:
            raise RefitError(
                f"policy.refit.kv_scales is true, but {'; '.join(problems)}. Nothing has moved",
                stage="settings",
            )
        for attention in self._attentions.values():
            _give_scales(attention, device)
        self._layers: dict[AttentionLayer, RadixAttention] = {}

    def claim(self, layers: Sequence[AttentionLayer]) -> tuple[list[AttentionLayer], list[str]]:
        there = {layer for layer in layers if f"{layer}{_ATTENTION}" in self._attentions}
        self._layers = {layer: self._attentions[f"{layer}{_ATTENTION}"] for layer in layers if layer in there}
        missing = [name for name in self._attentions if name.removesuffix(_ATTENTION) not in there]
        return list(self._layers), missing

    def set(self, scales: Mapping[AttentionLayer, Scales]) -> None:
        """As :meth:`ScaledCache.set`.

        Raises:
            RefitError: queries are larger than FP8 stores without a scale.
        """
        self._require_small_queries(scales)
        for layer, of_layer in scales.items():
            self._layers[layer].k_scale_float, self._layers[layer].v_scale_float = of_layer.k, of_layer.v
        write_tensors([self._layers[layer] for layer in scales])

    def live(self) -> dict[str, list[float]]:
        """Each scale on the device and on the host, by the checkpoint's name."""
        return {
            name: [getattr(attention, f"{kind}_scale").item(), getattr(attention, f"{kind}_scale_float")]
            for layer, attention in self._layers.items()
            for name, kind in zip(scale_names(layer), _KINDS, strict=False)
        }

    def _require_small_queries(self, scales: Mapping[AttentionLayer, Scales]) -> None:
        large = [layer for layer, of_layer in scales.items() if not math.isnan(of_layer.q) and of_layer.q > 1]
        if large:
            raise RefitError(
                f"queries of {', '.join(large)} were as large as FP8 stores without a scale when they were calibrated, with the "
                "margin that was asked for, and SGLang has none for queries: larger ones are cut off or become NaN. Start SGLang with "
                "kv_cache_dtype='auto', and set policy.refit.kv_scales=false",
                stage="post_load",
                parameter=large[0],
            )


def loaded_scales(model: nn.Module) -> dict[str, RadixAttention]:
    """Attention layers whose scales SGLang made parameters, by name. A checkpoint may have brought these."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RadixAttention) and isinstance(module.k_scale, nn.Parameter)
    }


def forget_random_scales(model: nn.Module) -> None:
    """Have scales of 1 come with the next refit, after ``load_format=dummy`` has made random numbers of them."""
    for attention in loaded_scales(model).values():
        attention.k_scale_float = attention.v_scale_float = 1.0


@torch.no_grad()
def write_tensors(attentions: Sequence[RadixAttention]) -> None:
    """Write the numbers of these layers' scales into their tensors: in place, with one copy to the device."""
    places = [getattr(each, f"{kind}_scale").data for each in attentions for kind in _KINDS]
    if places:
        values = [getattr(each, f"{kind}_scale_float") for each in attentions for kind in _KINDS]
        new = torch.tensor(values, dtype=torch.float32, device=places[0].device)
        torch._foreach_copy_(places, list(new.unbind()))


def _give_scales(attention: RadixAttention, device: torch.device) -> None:
    """Scales of 1, where SGLang made none. No parameters: no loader knows them, and no sleep discards them."""
    for kind in _KINDS:
        if getattr(attention, f"{kind}_scale") is None:
            setattr(attention, f"{kind}_scale", torch.ones((), dtype=torch.float32, device=device))
            setattr(attention, f"{kind}_scale_float", 1.0)


def _problems(runner: Any, attentions: Mapping[str, RadixAttention], backends: set[str]) -> list[str]:
    found = []
    if release(sglang.__version__) not in SCALES_READ:
        found.append(
            f"what SGLang {sglang.__version__} does with scales was not read, as it was in {' and '.join(SCALES_READ)}: install "
            "one of these, or set policy.refit.kv_scales=false"
        )
    if is_hip() or is_musa():
        found.append(
            "SGLang's kernels for AMD's and Moore Threads' GPUs store keys and values in other ways than those for NVIDIA's, "
            "which alone were read: set policy.refit.kv_scales=false"
        )
    if runner.model_config.attention_arch is AttentionArch.MLA:
        found.append(
            "multi-head latent attention caches no keys and values, and there is no calibration for what it caches: set "
            "policy.refit.kv_scales=false"
        )
    if runner.kv_cache_dtype_str != _E4M3:
        found.append(
            f"the engine's KV cache is {runner.kv_cache_dtype_str!r}, and scales are calibrated for float8_e4m3fn: start SGLang "
            f"with kv_cache_dtype={_E4M3!r}, or set policy.refit.kv_scales=false"
        )
    unknown = sorted(backends - _BACKENDS.keys())
    if unknown:
        found.append(
            f"attention backend {', '.join(unknown)} does not read scales everywhere, or is not known to: start SGLang with "
            f"attention_backend={' or '.join(map(repr, sorted(_BACKENDS)))}, on NVIDIA's GPUs"
        )
    return (
        found + _problems_of_graphs(runner, attentions, backends) + _problems_of_layers(attentions, backends)
    )


def _problems_of_graphs(runner: Any, attentions: Mapping[str, nn.Module], backends: set[str]) -> list[str]:
    if all(check_cuda_graph_backend(phase, Backend.DISABLED) for phase in Phase.ALL):
        return []
    found = []
    on_host = sorted(name for name in backends & _BACKENDS.keys() if _BACKENDS[name].on_host)
    if on_host:
        found.append(
            f"attention backend {', '.join(on_host)} takes scales as numbers, which CUDA graphs keep for ever: start SGLang with "
            "disable_cuda_graph=True"
        )
    without = [name for name, module in attentions.items() if not isinstance(module.k_scale, torch.Tensor)]
    if without and not on_host:
        found.append(
            f"SGLang makes no scales for {', '.join(without[:3])}{', …' * (len(without) > 3)} of {type(runner.model).__name__}, so "
            "its CUDA graphs were captured without any and would go on so: start SGLang with disable_cuda_graph=True"
        )
    return found


def _problems_of_layers(attentions: Mapping[str, RadixAttention], backends: set[str]) -> list[str]:
    found = []
    others = [
        name
        for name, module in attentions.items()
        if module.is_cross_attention or module.attn_type is not AttentionType.DECODER
    ]
    if others:
        found.append(
            f"{', '.join(others)} of the engine are no causal self-attention, whose keys alone are calibrated: set "
            "policy.refit.kv_scales=false"
        )
    sharing = defaultdict(list)
    for name, module in attentions.items():
        sharing[module.layer_id].append(name)
    shared = [name for names in sharing.values() if len(names) > 1 for name in names]
    if shared:
        found.append(
            f"{', '.join(shared)} share a cache, and would read it by two scales: set policy.refit.kv_scales=false"
        )
    numbers = [
        name
        for name, module in attentions.items()
        if not (
            module.k_scale is None
            or (isinstance(module.k_scale, torch.Tensor) and module.k_scale.numel() == 1)
        )
    ]
    if numbers:
        found.append(
            f"SGLang has other scales of {', '.join(numbers)} than one tensor of one number for each layer "
            "(quantization_param_path makes them Python's numbers): start it without that"
        )
    widest = min(
        (_BACKENDS[n].widest_head or math.inf for n in backends & _BACKENDS.keys()), default=math.inf
    )
    wide = [
        name for name, module in attentions.items() if max(module.qk_head_dim, module.v_head_dim) > widest
    ]
    if wide:
        found.append(
            f"heads of {', '.join(wide)} are wider than {widest}, which attention backend fa3 reads without a scale: start SGLang "
            "with attention_backend='triton' and disable_cuda_graph=True"
        )
    return found
