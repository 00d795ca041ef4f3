"""Sets calibrated scales of the FP8 KV cache in a live vLLM model.

vLLM reads scales from a checkpoint once, when it loads it. Here they are written where its attention layers keep them (vLLM
0.21): into ``_k_scale``, ``_v_scale`` and ``_q_scale``, whose addresses CUDA graphs hold, and into the floats beside them,
which some backends read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from ....integration.errors import RefitError
from ...kv_scales.endpoints import AttentionLayer, Scales, scale_names

# Cache types whose values are float8_e4m3fn, for which trainers calibrate.
_E4M3 = ("fp8", "fp8_e4m3")
_UNQUANTIZED = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class _Backend:
    """How an attention backend uses the scales.

    Attributes:
        on_host: whether it reads floats. A CUDA graph of the attention keeps their values.
        queries: whether it divides queries by a scale, and multiplies by it later.
    """

    on_host: bool
    queries: bool


_BACKENDS = {
    "FLASH_ATTN": _Backend(on_host=False, queries=True),
    "FLASHINFER": _Backend(on_host=True, queries=True),
    "TRITON_ATTN": _Backend(on_host=False, queries=False),  # it asserts that the queries' scale is 1
    "CPU_ATTN": _Backend(on_host=True, queries=False),
}
# What FlashInfer's layers derive from the scales, once, in their first step.
_DERIVED_BY_IMPL = ("bmm1_scale", "bmm2_scale", "o_sf_scale")


class VllmScaledCache:
    """Implements :class:`rlrefit.workers.kv_scales.endpoints.ScaledCache` for one worker.

    Args:
        model: the live model.
        vllm_config: the worker's configuration.

    Raises:
        RefitError: scales would not be used, or not all of them; lists all reasons.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._attentions = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, Attention) and module.attn_type == AttentionType.DECODER
        }
        self._scaled = {
            name: module for name, module in self._attentions.items() if module.kv_cache_dtype in _E4M3
        }
        problems = self._problems(model, vllm_config)
        if problems:
            raise RefitError(
                f"policy.refit.kv_scales is true, but {'; '.join(problems)}. Nothing has moved",
                stage="settings",
            )
        self._layers: dict[AttentionLayer, Attention] = {}

    def claim(self, layers: Sequence[AttentionLayer]) -> tuple[list[AttentionLayer], list[str]]:
        named = {self._module_name(layer): layer for layer in layers}
        self._layers = {named[name]: module for name, module in self._scaled.items() if name in named}
        return list(self._layers), [name for name in self._scaled if name not in named]

    @torch.no_grad()
    def set(self, scales: Mapping[AttentionLayer, Scales]) -> None:
        # MI300's FP8 has half the range. vLLM's kernels there expect scales of twice the size.
        factor = 2.0 if current_platform.is_fp8_fnuz() else 1.0
        places: list[torch.Tensor] = []
        values: list[float] = []
        for layer, of_layer in scales.items():
            attention = self._layers[layer]
            for name, value in of_layer._asdict().items():
                if math.isnan(value) or (name == "q" and not _scales_queries(attention)):
                    continue
                places.append(getattr(attention, f"_{name}_scale"))
                values.append(value * factor)
                setattr(attention, f"_{name}_scale_float", value * factor)
            _forget_derived(attention)
        if places:
            # In place, with one copy to the device.
            new = torch.tensor(values, dtype=torch.float32, device=places[0].device)
            torch._foreach_copy_(places, list(new.unbind()))

    def live(self) -> dict[str, list[float]]:
        """Each scale on the device and on the host, by the checkpoint's name."""
        return {
            name: [
                getattr(attention, f"_{kind}_scale").item(),
                getattr(attention, f"_{kind}_scale_float"),
            ]
            for layer, attention in self._layers.items()
            for name, kind in zip(scale_names(layer), Scales._fields, strict=True)
        }

    def _module_name(self, layer: AttentionLayer) -> str:
        if self._mapper is None:
            return f"{layer}.attn"
        # By the name of a weight, since a mapper may drop or rename by a prefix or a part.
        mapped = self._mapper.apply_list([f"{layer}.k_scale"])
        return f"{mapped[0].rpartition('.')[0]}.attn" if mapped else ""

    def _problems(self, model: nn.Module, vllm_config: VllmConfig) -> list[str]:
        found = []
        if any(isinstance(module, MLAAttention) for module in model.modules()):
            found.append(
                "multi-head latent attention caches no keys and values, and there is no calibration for what it caches: set "
                "policy.refit.kv_scales=false"
            )
        others = {m.kv_cache_dtype for m in self._attentions.values()} - {*_E4M3, *_UNQUANTIZED}
        if others:
            found.append(
                f"the engine's KV cache is {', '.join(sorted(others))}, and scales are calibrated for float8_e4m3fn: start vLLM "
                "with kv_cache_dtype='fp8'"
            )
        elif not self._scaled and not found:
            found.append(
                f"the engine's KV cache is not quantized (kv_cache_dtype={vllm_config.cache_config.cache_dtype!r}), so scales "
                "would have no effect: start vLLM with kv_cache_dtype='fp8', or set policy.refit.kv_scales=false"
            )
        found.extend(self._problems_of_layers(vllm_config))
        return found

    def _problems_of_layers(self, vllm_config: VllmConfig) -> list[str]:
        found = []
        layers = self._scaled
        if vllm_config.cache_config.calculate_kv_scales or any(
            m.calculate_kv_scales for m in layers.values()
        ):
            found.append(
                "calculate_kv_scales has vLLM take scales from its first batch, in the place of those of the trainer: start "
                "vLLM without it"
            )
        per_head = [name for name, m in layers.items() if m._k_scale.numel() != 1]
        if per_head:
            found.append(
                f"{', '.join(per_head)} of the engine have a scale for each head, and the trainer calibrates one for each layer: "
                "serve a checkpoint whose kv_cache_scheme has strategy 'tensor'"
            )
        sharing = [name for name, m in layers.items() if m.kv_sharing_target_layer_name is not None]
        if sharing:
            found.append(
                f"{', '.join(sharing)} read the cache of another layer, whose scale they would not have: set "
                "policy.refit.kv_scales=false"
            )
        backends = {m.attn_backend.get_name() for m in layers.values()}
        unknown = sorted(backends - _BACKENDS.keys())
        if unknown:
            found.append(
                f"attention backend {', '.join(unknown)} is not known to take new scales while it serves: start vLLM with one of "
                f"{', '.join(sorted(_BACKENDS))}"
            )
        on_host = sorted(name for name in backends & _BACKENDS.keys() if _BACKENDS[name].on_host)
        if on_host and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            found.append(
                f"attention backend {', '.join(on_host)} takes scales as numbers, which full CUDA graphs keep for ever: start vLLM "
                "with compilation_config={'cudagraph_mode': 'PIECEWISE'}, or with attention_backend='FLASH_ATTN' or 'TRITON_ATTN'"
            )
        return found


def _scales_queries(attention: Attention) -> bool:
    return attention.query_quant is not None and _BACKENDS[attention.attn_backend.get_name()].queries


def _forget_derived(attention: Attention) -> None:
    """Drop what the layer derived from the old scales. It derives it again in its next step."""
    for name in _DERIVED_BY_IMPL:
        if hasattr(attention.impl, name):
            setattr(attention.impl, name, None)
    # No calibrated scale: FlashInfer keeps the output's scale here when it derives the others.
    attention._o_scale_float = None
