"""Fragment rules: where a Megatron parameter's bytes stand in the Hugging Face name space.

One rule per mapping class of Megatron-Bridge. A rule turns a conversion task (mapping, local
parameter, TP/EP/ETP rank) into fragments that view the live parameter. The table is a whitelist of
exact classes: a class that is not in it, or a condition that a rule does not know, refuses the
parameter with a reason, and the parameter takes the misc path through Bridge's own export.

The layouts follow ``megatron.bridge.models.conversion.param_mapping`` (``megatron_to_hf`` of each
class); the tests compare every rule with Bridge's own export bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...integration.layout import Fragment
from ...integration.layout.boxes import Box, box_of


class Refused(Exception):
    """A parameter that no rule places safely; the text is the reason that users read."""


def fragments_of_task(task: Any) -> list[Fragment]:
    """Fragments of one of Bridge's conversion tasks.

    Args:
        task: a ``WeightConversionTask`` whose ``param_weight`` this rank owns.

    Raises:
        Refused: no rule places the parameter; it has to go over the misc path.
    """
    _require_plain(task)
    rule = _RULES.get(type(task.mapping).__name__)
    if rule is None:
        raise Refused(f"mapping {type(task.mapping).__name__} has no shard rule")
    return rule(task)


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
    if "to_wrap" in task.global_param_name or ".adapter." in task.global_param_name:
        raise Refused("LoRA: Bridge merges the adapter on export")
    if getattr(task.mapping, "is_grouped_export", False):
        raise Refused("grouped export: Bridge stacks the experts into one tensor")


def _whole(task: Any) -> list[Fragment]:
    view = task.param_weight.data
    return [Fragment(_one_name(task), tuple(view.shape), box_of(view.shape), view)]


def _sharded(task: Any, dim: int) -> list[Fragment]:
    view, mapping = task.param_weight.data, task.mapping
    return [_shard(_one_name(task), view, dim, mapping.tp_rank, mapping.tp_size)]


def _column(task: Any) -> list[Fragment]:
    return _sharded(task, 0)


def _row(task: Any) -> list[Fragment]:
    # A row-parallel bias is added after the reduction and so stands whole on every rank.
    return _whole(task) if task.param_weight.ndim == 1 else _sharded(task, 1)


def _auto(task: Any) -> list[Fragment]:
    mapping = task.mapping
    if mapping.permute_dims is not None:
        raise Refused(f"Bridge permutes its dimensions by {mapping.permute_dims}")
    kind = mapping._detect_parallelism_type(task.megatron_module)
    return {"column": _column, "row": _row, "replicated": _whole}[kind](task)


def _gated(task: Any) -> list[Fragment]:
    """``[gate; up]`` of one TP rank, stacked along dim 0."""
    view, mapping = task.param_weight.data, task.mapping
    if view.shape[0] % 2:
        raise Refused(f"{view.shape[0]} rows can't be halved into gate and up")
    half = view.shape[0] // 2
    parts = (("gate", view[:half]), ("up", view[half:]))
    return [_shard(mapping.hf_param[key], part, 0, mapping.tp_rank, mapping.tp_size) for key, part in parts]


def _qkv(task: Any) -> list[Fragment]:
    """Rows of ``linear_qkv`` come in query groups: the group's query heads, one key head, one value head."""
    view, mapping = task.param_weight.data, task.mapping
    config = mapping._get_config(task.megatron_module)
    heads, groups, tp = config.num_attention_heads, config.num_query_groups, mapping.tp_size
    if getattr(config, "attention_output_gate", False):
        raise Refused("QKV with an output gate: queries and gates are interleaved on export")
    if groups % tp:
        raise Refused(f"QKV: {groups} query groups can't be split over TP {tp}")
    head_dim = config.kv_channels or config.hidden_size // heads
    per_group = heads // groups
    local_groups = groups // tp
    if view.shape[0] != local_groups * (per_group + 2) * head_dim:
        raise Refused(
            f"QKV: {view.shape[0]} rows are not {local_groups} groups of {per_group}+2 heads of {head_dim}"
        )
    tail = tuple(view.shape[1:])
    fragments: list[Fragment] = []
    for group in range(local_groups):
        first = group * (per_group + 2) * head_dim
        place = mapping.tp_rank * local_groups + group
        for key, offset, count, total in (
            ("q", 0, per_group, heads),
            ("k", per_group, 1, groups),
            ("v", per_group + 1, 1, groups),
        ):
            rows = count * head_dim
            start = first + offset * head_dim
            box: Box = ((place * rows, (place + 1) * rows), *((0, n) for n in tail))
            full = (total * head_dim, *tail)
            fragments.append(Fragment(mapping.hf_param[key], full, box, view[start : start + rows]))
    return fragments


def _shard(name: str, view: torch.Tensor, dim: int, rank: int, size: int) -> Fragment:
    full = list(view.shape)
    full[dim] *= size
    box = [(0, n) for n in view.shape]
    box[dim] = (rank * view.shape[dim], (rank + 1) * view.shape[dim])
    return Fragment(name, tuple(full), tuple(box), view)


def _one_name(task: Any) -> str:
    name = task.mapping.hf_param
    if not isinstance(name, str):
        raise Refused(f"mapping names {sorted(name)} where its rule expects one weight")
    return name


_RULES: dict[str, Callable[[Any], list[Fragment]]] = {
    "DirectMapping": _whole,
    "ReplicatedMapping": _whole,
    "ColumnParallelMapping": _column,
    "RowParallelMapping": _row,
    "AutoMapping": _auto,
    "GatedMLPMapping": _gated,
    "QKVMapping": _qkv,
}
