"""Fragment rules: where a Megatron parameter's bytes stand in the Hugging Face name space.

One rule per mapping class of Megatron-Bridge. A rule turns a conversion task (mapping, local
parameter, TP/EP/ETP rank) into fragments that view the live parameter. The table is a whitelist of
exact classes, by module and name: a class that is not in it (a subclass of one that is, too), or a
condition that a rule does not know, refuses the parameter with a reason, and the parameter takes the
misc path through Bridge's own export.

The layouts follow ``megatron_to_hf`` of each class in Megatron-Bridge 0.6. :mod:`..self_check` holds
them against the installed Bridge whenever a source is made, and the tests against every family's export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .....integration.layout import Fragment
from .attention import concatenated_qkv, kv, norm_over_heads, qkv, qkv_without_copies, qkvg
from .experts import stacked, stacked_alternating, stacked_gated, stacked_transposed
from .pieces import Refused, parameter_like
from .plain import auto, column, gated, row, whole
from .state_space import gdn_convolution, gdn_projection, gdn_projections, mamba_convolution, mamba_projection

__all__ = ["Refused", "fits_any_shape", "fragments_of_task", "is_classified", "parameter_like"]

Rule = Callable[[Any], list[Fragment]]
Shapes = Mapping[str, tuple[int, ...]]

_BRIDGE = "megatron.bridge.models"
_MAPPINGS = f"{_BRIDGE}.conversion.param_mapping"
_GPT_OSS = f"{_BRIDGE}.gpt_oss.gpt_oss_bridge"
_GEMMA4 = f"{_BRIDGE}.gemma.gemma4_bridge"
_MINIMAX = f"{_BRIDGE}.minimax_m2.minimax_m2_bridge"

# Rows and columns stand as they are, whatever the model's sizes.
_PLAIN: dict[tuple[str, str], Rule] = {
    (_MAPPINGS, "DirectMapping"): whole,
    (_MAPPINGS, "ReplicatedMapping"): whole,
    (_MAPPINGS, "ColumnParallelMapping"): column,
    (_MAPPINGS, "RowParallelMapping"): row,
    (_MAPPINGS, "AutoMapping"): auto,
    (_MAPPINGS, "GatedMLPMapping"): gated,
}
# Rows stand as heads, groups and state sizes of the model's configuration have it.
_BY_CONFIG: dict[tuple[str, str], Rule] = {
    (_MAPPINGS, "QKVMapping"): qkv,
    (_MAPPINGS, "QKVGMapping"): qkvg,
    (_MAPPINGS, "KVMapping"): kv,
    (_MAPPINGS, "ConcatenatedQKVMapping"): concatenated_qkv,
    (_MINIMAX, "_FullDimQKNormMapping"): norm_over_heads,
    (_MAPPINGS, "MambaInProjMapping"): mamba_projection,
    (_MAPPINGS, "MambaConv1dMapping"): mamba_convolution,
    (_MAPPINGS, "GDNLinearMapping"): gdn_projection,
    (_MAPPINGS, "GDNLinearMappingSeparate"): gdn_projections,
    (_MAPPINGS, "GDNConv1dMapping"): gdn_convolution,
}
# One expert of a tensor that holds all.
_STACKED: dict[tuple[str, str], Callable[[Any, Shapes], list[Fragment]]] = {
    (_MAPPINGS, "FusedExpertMapping"): stacked,
    (_MAPPINGS, "FusedGatedExpertMapping"): stacked_gated,
    (_GPT_OSS, "GPTOSSMLPDownProjMapping"): stacked_transposed,
    (_GPT_OSS, "GPTOSSMLPGateUpProjMapping"): stacked_alternating,
}
# Rows of some layers are none of any tensor that Bridge exports.
_WITHOUT_COPIES: dict[tuple[str, str], Callable[[Any, Shapes], list[Fragment]]] = {
    (_GEMMA4, "_Gemma4QKVMapping"): qkv_without_copies,
    (_GEMMA4, "_Gemma4DenseQKVMapping"): qkv_without_copies,
}
# Classes that are known to have no rule, and why.
_KNOWN_MISC: dict[tuple[str, str], str] = {
    (_MAPPINGS, "RMSNorm2ZeroCenteredRMSNormMapping"): "zero-centred norm: Bridge adds 1 to it on export",
}


def fragments_of_task(task: Any, exported: Shapes | None = None) -> list[Fragment]:
    """Fragments of one of Bridge's conversion tasks.

    Args:
        task: a ``WeightConversionTask`` whose ``param_weight`` this rank owns.
        exported: shapes of Bridge's export by Hugging Face name, from which a rule learns whether Bridge
            transposes stacked experts, and which keys and values it leaves out; without them both are refused.

    Raises:
        Refused: no rule places the parameter; it has to go over the misc path.
    """
    _require_plain(task)
    key = _key(task.mapping)
    if key in _KNOWN_MISC:
        raise Refused(_KNOWN_MISC[key])
    if getattr(task.mapping, "is_grouped_export", False):
        if key not in _STACKED:
            raise Refused(f"{_told(key)} has no shard rule, and Bridge stacks its experts into one tensor")
        return _STACKED[key](task, exported or {})
    if key in _WITHOUT_COPIES:
        return _WITHOUT_COPIES[key](task, exported or {})
    rule = _PLAIN.get(key) or _BY_CONFIG.get(key)
    if rule is None:
        raise Refused(f"{_told(key)} has no shard rule")
    return rule(task)


def is_classified(mapping_class: type) -> bool:
    """Whether this exact class has a rule, or a reason for having none."""
    key = (mapping_class.__module__, mapping_class.__qualname__)
    return any(key in table for table in (_PLAIN, _BY_CONFIG, _STACKED, _WITHOUT_COPIES, _KNOWN_MISC))


def fits_any_shape(task: Any) -> bool:
    """Whether the rule of ``task`` reads nothing but the parameter's own shape: neither sizes of the model nor shapes
    of the export."""
    key = _key(task.mapping)
    return key in _PLAIN or (key in _STACKED and not getattr(task.mapping, "transpose_on_export", False))


def _key(mapping: Any) -> tuple[str, str]:
    return type(mapping).__module__, type(mapping).__qualname__


def _told(key: tuple[str, str]) -> str:
    module, name = key
    return f"mapping {name}" if module == _MAPPINGS else f"mapping {name} of {module}"


def _require_plain(task: Any) -> None:
    weight = task.param_weight
    if ".router." in f".{task.global_param_name}":
        raise Refused("MoE router: engines keep it in a dtype or layout of their own")
    if type(weight) not in (torch.nn.Parameter, torch.Tensor) or type(weight.data) is not torch.Tensor:
        raise Refused(f"storage of type {type(weight).__name__} is not a plain tensor")
    if not isinstance(weight, torch.nn.Parameter):
        raise Refused("buffer: exported as Bridge converts it")
    if task.export_hook is not None:
        raise Refused("Bridge applies an export hook that may change values")
    if task.weight_dtype is not None and task.weight_dtype != weight.dtype:
        raise Refused(f"Bridge casts it to {task.weight_dtype} on export")
