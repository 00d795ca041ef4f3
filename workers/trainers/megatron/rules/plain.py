"""Rules of parameters that are one weight, or gate and up: whole, or cut along one dimension."""

from __future__ import annotations

from typing import Any

from .....integration.layout import Fragment, box_of
from .pieces import Refused, kind_of, one_name, shard


def whole(task: Any) -> list[Fragment]:
    """Every TP rank holds all of it."""
    view = task.param_weight.data
    return [Fragment(one_name(task), tuple(view.shape), box_of(view.shape), view)]


def column(task: Any) -> list[Fragment]:
    """Cut along dim 0."""
    return _cut(task, 0)


def row(task: Any) -> list[Fragment]:
    """Cut along dim 1; a bias is added after the reduction and so stands whole on every rank."""
    return whole(task) if task.param_weight.ndim == 1 else _cut(task, 1)


def detected(task: Any) -> list[Fragment]:
    """Whichever of these Bridge finds by the class of the module."""
    kind = kind_of(task.mapping, task.megatron_module)
    return {"column": column, "row": row, "replicated": whole}[kind](task)


def auto(task: Any) -> list[Fragment]:
    """As :func:`detected`; the dimensions permuted, if Bridge says so."""
    mapping = task.mapping
    fragments = detected(task)
    if mapping.permute_dims is None:
        return fragments
    if mapping.is_expert:
        raise Refused("permuted expert: Bridge permutes after it has stacked the EP ranks' experts")
    return [_permuted(fragment, tuple(mapping.permute_dims)) for fragment in fragments]


def gated(task: Any) -> list[Fragment]:
    """``[gate; up]`` of one TP rank, stacked along dim 0."""
    view, mapping = task.param_weight.data, task.mapping
    if view.shape[0] % 2:
        raise Refused(f"{view.shape[0]} rows can't be halved into gate and up")
    half = view.shape[0] // 2
    parts = (("gate", view[:half]), ("up", view[half:]))
    return [shard(mapping.hf_param[key], part, 0, mapping.tp_rank, mapping.tp_size) for key, part in parts]


def _cut(task: Any, dim: int) -> list[Fragment]:
    mapping = task.mapping
    return [shard(one_name(task), task.param_weight.data, dim, mapping.tp_rank, mapping.tp_size)]


def _permuted(fragment: Fragment, dims: tuple[int, ...]) -> Fragment:
    full = tuple(fragment.full_shape[d] for d in dims)
    box = tuple(fragment.box[d] for d in dims)
    return Fragment(fragment.name, full, box, fragment.view.permute(dims))
