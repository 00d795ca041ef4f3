"""Mapping classes that no family here uses, or not in every way: each one's own conversion over TP, beside its rule."""

from __future__ import annotations

import itertools
from typing import Any

import torch

_HIDDEN = 32
_HEADS = {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 6}
_QKV = {key: f"{key}_proj" for key in ("q", "k", "v")}
_QKVG = {**_QKV, "g": "g_proj"}
_GROUPS = 4 * (2 + 2) * 6
_WITH_GATES, _GATED = (_GROUPS + 48, _HIDDEN), {"attention_output_gate": True}
_TURNED = {"hf_param": "w", "permute_dims": (1, 0)}

_CUTS = {
    "column": ("TEColumnParallelLinear", 0),
    "row": ("TERowParallelLinear", 1),
    "replicated": ("TENorm", None),
}

# Name → class, further arguments, shape of the whole Megatron parameter, class of the module, settings of the model.
CONVERSIONS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], str, dict[str, Any]]] = {
    "kv": ("KVMapping", {"k": "k", "v": "v"}, (48, _HIDDEN), "column", {}),
    "kv bias": ("KVMapping", {"k": "k", "v": "v"}, (48,), "column", {}),
    "concatenated qkv": ("ConcatenatedQKVMapping", {"hf_param": "qkv"}, (_GROUPS, _HIDDEN), "column", {}),
    "concatenated qkv bias": ("ConcatenatedQKVMapping", {"hf_param": "qkv"}, (_GROUPS,), "column", {}),
    "concatenated qkv with gates": (
        "ConcatenatedQKVMapping",
        {"hf_param": "qkv"},
        _WITH_GATES,
        "column",
        _GATED,
    ),
    "qkv bias with gates": ("QKVMapping", _QKV, (_GROUPS + 48,), "column", _GATED),
    "qkvg, gates at the end": ("QKVGMapping", _QKVG, (_GROUPS + 8, _HIDDEN), "column", {}),
    "qkvg, gates in groups": ("QKVGMapping", _QKVG, _WITH_GATES, "column", _GATED),
    "transposed column": ("AutoMapping", _TURNED, (24, _HIDDEN), "column", {}),
    "transposed row": ("AutoMapping", _TURNED, (_HIDDEN, 24), "row", {}),
    "direct": ("DirectMapping", {"hf_param": "w"}, (24, _HIDDEN), "replicated", {}),
    "replicated": ("ReplicatedMapping", {"hf_param": "w"}, (24, _HIDDEN), "replicated", {}),
    "row": ("RowParallelMapping", {"hf_param": "w"}, (_HIDDEN, 24), "row", {}),
    "row bias": ("RowParallelMapping", {"hf_param": "w"}, (24,), "replicated", {}),
}


def examine(tp: int) -> dict[str, list[str]]:
    """What is wrong with each of the conversions on this rank; Megatron's parallel state is there already."""
    return {name: _one(*conversion, tp) for name, conversion in CONVERSIONS.items()}


def unclassified() -> list[str]:
    """Mapping classes of the installed Bridge's own module that the rules have never heard of."""
    from megatron.bridge.models.conversion import param_mapping

    from rlrefit.workers.trainers.megatron.rules import is_classified

    bases = {"MegatronParamMapping", "ChunkedMapping", "_LooseGatedMLPMapping"}
    return [
        name
        for name, value in vars(param_mapping).items()
        if isinstance(value, type)
        and issubclass(value, param_mapping.MegatronParamMapping)
        and name not in bases
        and not is_classified(value)
    ]


def _one(
    kind: str, names: dict[str, Any], shape: tuple[int, ...], cut: str, settings: dict[str, Any], tp: int
) -> list[str]:
    from megatron.bridge.models.conversion import param_mapping
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
    from megatron.core.transformer import TransformerConfig

    from rlrefit.workers.trainers.megatron.rules import fragments_of_task

    name = "decoder.layers.0.linear.weight"
    mapping = getattr(param_mapping, kind)(name, **names)
    # Bridge goes by the name of the module's class alone.
    module_type, dim = _CUTS[cut]
    module = type(module_type, (torch.nn.Module,), {})()
    module.config = TransformerConfig(num_layers=1, hidden_size=_HIDDEN, **_HEADS, **settings)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    part = whole if dim is None else whole.chunk(tp, dim)[mapping.tp_rank].contiguous()
    module.weight = torch.nn.Parameter(part)
    exported = mapping.megatron_to_hf(module.weight, module)
    task = WeightConversionTask(
        param_name=name,
        global_param_name=name,
        mapping=mapping,
        megatron_module=module,
        param_weight=module.weight,
    )
    fragments = fragments_of_task(task)
    return [*_differences(fragments, exported), *_holes(fragments, exported)]


def _differences(fragments: list[Any], exported: dict[str, torch.Tensor]) -> list[str]:
    return [
        f"{f.name} {f.box}"
        for f in fragments
        if tuple(exported[f.name].shape) != f.full_shape
        or not torch.equal(exported[f.name][tuple(slice(*side) for side in f.box)], f.view)
    ]


def _holes(fragments: list[Any], exported: dict[str, torch.Tensor]) -> list[str]:
    import torch.distributed as dist

    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, [(f.name, f.box) for f in fragments])
    masks = {name: torch.zeros(weight.shape, dtype=torch.bool) for name, weight in exported.items()}
    for name, box in itertools.chain.from_iterable(boxes):
        masks[name][tuple(slice(*side) for side in box)] = True
    return [f"{name} has holes" for name, mask in masks.items() if not mask.all()]
