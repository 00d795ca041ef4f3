"""How the scales of attention layers are called, as Hugging Face checkpoints with an FP8 KV cache call them.

``model.layers.3.self_attn.k_scale``, ``….v_scale`` and ``….q_scale``: the names that vLLM's
``maybe_remap_kv_scale_name`` knows. A layer is spoken of by what stands before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...integration.weights.manifest import TensorSpec

# model.layers.3.self_attn
AttentionLayer = str

_PROJECTION = re.compile(r"^(.*\blayers\.\d+\.(?:self_attn|mixer))\.(?:k_proj|qkv_proj)\.weight$")
# Some write the module that vLLM makes of it (NeMo-RL does for queries).
_SCALE = re.compile(r"^(.*\blayers\.\d+\.(?:self_attn|mixer))\.(?:attn\.)?([qkv]_scale)$")


class Scales(NamedTuple):
    """One layer's scales, by which its keys, values and queries are divided before they become FP8.

    ``q`` is NaN where queries were not calibrated.
    """

    k: float
    v: float
    q: float


def layer_of_weight(name: str) -> AttentionLayer | None:
    """The attention layer whose keys the checkpoint weight ``name`` projects; None for any other weight."""
    found = _PROJECTION.match(name)
    return found[1] if found else None


def attention_layers(specs: Iterable[TensorSpec]) -> list[AttentionLayer]:
    """The attention layers of a model, in the order of its weights."""
    found = (layer_of_weight(spec.name) for spec in specs)
    return list(dict.fromkeys(layer for layer in found if layer))


def scale_names(layer: AttentionLayer) -> tuple[str, str, str]:
    """The names of a layer's scales, in the order of :class:`Scales`."""
    return f"{layer}.k_scale", f"{layer}.v_scale", f"{layer}.q_scale"


def scale_specs(layers: Iterable[AttentionLayer]) -> list[TensorSpec]:
    """The scales as tensors of the refit: float32, without dimensions."""
    return [TensorSpec(name, (), torch.float32) for layer in layers for name in scale_names(layer)]


def canonical(name: str) -> str | None:
    """The name of a scale as :func:`scale_names` has it; None for what names no scale."""
    found = _SCALE.match(name)
    return f"{found[1]}.{found[2]}" if found else None


def layer_of_scale(name: str) -> AttentionLayer:
    """The layer of a scale by its canonical name."""
    return name.rpartition(".")[0]


def is_scale(spec: TensorSpec) -> bool:
    """Whether a tensor of the refit is one of :func:`scale_specs`."""
    return not spec.shape and canonical(spec.name) == spec.name
