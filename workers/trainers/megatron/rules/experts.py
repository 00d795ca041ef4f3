"""Rules of experts that stand in one Hugging Face tensor, dimension 0 being the expert."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .....integration.layout import Axes, Fragment
from .pieces import Refused, Run, lay, one_name
from .plain import detected

Shapes = Mapping[str, tuple[int, ...]]


def stacked(task: Any, exported: Shapes) -> list[Fragment]:
    """One weight of each expert, cut as its module is."""
    if task.mapping.permute_dims is not None:
        raise Refused("permuted experts: Bridge permutes after it has stacked the EP ranks' experts")
    return [_turned(task, _in_stack(task, part), exported) for part in detected(task)]


def stacked_gated(task: Any, exported: Shapes) -> list[Fragment]:
    """``[gate; up]`` of each expert, gate rows before up rows in the tensor, too."""
    view, mapping = task.param_weight.data, task.mapping
    if view.ndim != 2 or view.shape[0] % 2:
        raise Refused(f"experts of shape {list(view.shape)} can't be halved into gate and up")
    if mapping.permute_dims is not None:
        raise Refused("permuted experts: Bridge ignores it for gate and up")
    name, half = one_name(task), view.shape[0] // 2
    inner = half * mapping.tp_size
    runs = [Run(name, 2 * inner, first + mapping.tp_rank * half, half) for first in (0, inner)]
    return [_turned(task, _in_stack(task, part), exported) for part in lay(view, runs)]


def stacked_transposed(task: Any, exported: Shapes) -> list[Fragment]:
    """GPT-OSS: the transpose of each expert's weight; a bias as it is."""
    parts = [_in_stack(task, part) for part in detected(task)]
    return parts if one_name(task).endswith("_bias") else [_transposed(part) for part in parts]


def stacked_alternating(task: Any, exported: Shapes) -> list[Fragment]:
    """GPT-OSS: ``[gate; up]`` of each expert, whose rows alternate in the tensor as columns; in a bias as elements."""
    view, mapping = task.param_weight.data, task.mapping
    if view.shape[0] % 2:
        raise Refused(f"experts of shape {list(view.shape)} can't be halved into gate and up")
    if mapping.permute_dims is not None:
        raise Refused("permuted experts: Bridge permutes what it has transposed")
    half, tail = view.shape[0] // 2, tuple(view.shape[1:])
    inner, expert, count = half * mapping.tp_size, _expert_of(task.global_param_name), _experts(task)
    # The tensor's columns are seen as [inner, 2] and, as they lie here, before the rows that they cross.
    splits = ((count,), *((n,) for n in tail), (inner, 2))
    axes = Axes(splits, (0, len(tail) + 1, len(tail) + 2, *range(1, len(tail) + 1)))
    rows = (mapping.tp_rank * half, (mapping.tp_rank + 1) * half)
    return [
        Fragment(
            one_name(task),
            axes.full_shape,
            ((expert, expert + 1), rows, (which, which + 1), *((0, n) for n in tail)),
            part[None, :, None],
            axes=axes,
        )
        for which, part in enumerate((view[:half], view[half:]))
    ]


def _in_stack(task: Any, part: Fragment) -> Fragment:
    """``part`` of one expert as a part of the tensor of all experts."""
    expert = _expert_of(task.global_param_name)
    return Fragment(
        part.name, (_experts(task), *part.full_shape), ((expert, expert + 1), *part.box), part.view[None]
    )


def _experts(task: Any) -> int:
    count: int = task.mapping._get_config(task.megatron_module).num_moe_experts
    return count


def _turned(task: Any, part: Fragment, exported: Shapes) -> Fragment:
    """Transposed, if Bridge does so: it transposes where the checkpoint's shape asks for it."""
    if not task.mapping.transpose_on_export:
        return part
    turned = _transposed(part)
    if part.full_shape == turned.full_shape:
        raise Refused("square stacked experts: their shape doesn't tell whether Bridge transposes them")
    for candidate in (part, turned):
        if candidate.full_shape == exported.get(part.name):
            return candidate
    raise Refused("stacked experts: the shape of Bridge's export doesn't tell whether it transposes them")


def _transposed(part: Fragment) -> Fragment:
    """``part`` of the tensor that has its matrices transposed, still seen as it lies here."""
    if len(part.full_shape) != 3:
        raise Refused(f"stacked experts of shape {list(part.full_shape)}: Bridge transposes matrices alone")
    count, rows, columns = part.full_shape
    axes = Axes(((count,), (columns,), (rows,)), (0, 2, 1))
    return Fragment(part.name, axes.full_shape, part.box, part.view, axes=axes)


def _expert_of(parameter: str) -> int:
    """The number of the expert in a global parameter name, as Bridge reads it.

    Raises:
        Refused: there is none.
    """
    found = re.search(r"local_experts\.(\d+)", parameter) or re.search(r"(?:weight|bias)(\d+)", parameter)
    if found is None:
        raise Refused(f"stacked experts, but {parameter} names no expert")
    return int(found.group(1))
