"""Shard rules held against the installed Bridge: its real export of probes, one of each kind of parameter.

A rule says where Bridge's code puts a parameter's bytes. That code changes between versions and model
families, under names that stay; so before a rule is trusted, Bridge exports a parameter of random values
through it, and the rule's fragments must hold exactly what came out.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...integration.layout import Fragment, box_of, local_slice
from .enumeration import Enumeration, conversion_tasks
from .rules import Refused, fits_any_shape, fragments_of_task

# Sides of a probe whose shape is free: even, for gate and up, and not 1, which Bridge's stacking drops.
_SIDE = 8


def disproved_tasks(
    bridge: Any, model: list[Any], enumeration: Enumeration, pp_group: dist.ProcessGroup
) -> dict[int, str]:
    """Tasks whose rule and Bridge's export disagree, with the reason; a collective of all trainer ranks.

    Args:
        bridge: ``AutoBridge`` with its Hugging Face checkpoint.
        model: Megatron model chunks of this rank.
        enumeration: of the same model.
        pp_group: pipeline-parallel group; what one stage finds holds for the layers of all others.
    """
    tasks = conversion_tasks(bridge, model)
    kinds = _kinds(tasks, enumeration)
    chosen = enumeration.tasks_for(
        name for kind in dict.fromkeys(kinds) for name in enumeration.task_names[kinds.index(kind)]
    )
    free = not changes_converted_weights(bridge)
    probes = [_with_probe(tasks[i], kinds[i], free) for i in chosen]
    wrong = {
        kinds[i]: reason for i, reason in zip(chosen, _compare(bridge, model, probes), strict=True) if reason
    }
    found: list[dict[Any, str]] = [{} for _ in range(dist.get_world_size(pp_group))]
    dist.all_gather_object(found, wrong, group=pp_group)
    reasons = {kind: reason for stage in found for kind, reason in stage.items()}
    return {i: reasons[kind] for i, kind in enumerate(kinds) if kind in reasons}


def changes_converted_weights(bridge: Any) -> bool:
    """Whether the model's bridge has a hook of its own on converted weights."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    own = type(bridge._model_bridge).maybe_modify_converted_hf_weight
    return own is not MegatronModelBridge.maybe_modify_converted_hf_weight


def _kinds(tasks: list[Any], enumeration: Enumeration) -> list[tuple[Any, ...]]:
    """What Bridge converts alike: the same parameter of other layers and experts, if it is of the same shape."""
    shapes = {spec.name: spec.shape for spec in enumeration.specs}
    return [
        (
            re.sub(r"\d+", "#", task.global_param_name),
            type(task.mapping).__name__,
            tuple(shapes[name] for name in dict.fromkeys(names)),
        )
        for task, names in zip(tasks, enumeration.task_names, strict=True)
    ]


def _with_probe(task: Any, kind: tuple[Any, ...], free: bool) -> Any:
    weight, mapping = task.param_weight, task.mapping
    if type(weight) is not torch.nn.Parameter or type(weight.data) is not torch.Tensor:
        return task
    shape = weight.shape
    if free and fits_any_shape(task):
        shape = torch.Size(min(n, _SIDE) for n in shape)
    # Alike on ranks that hold the same shard: Bridge exports only one of them.
    place = (mapping.tp_rank, mapping.ep_rank if mapping.is_expert else 0, task.global_param_name, kind)
    generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
    # Not where the parameter is, which may be offloaded: Bridge's collectives work on the GPU.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.randn(shape, generator=generator).to(weight.dtype).to(device)
    probe = torch.nn.Parameter(values, requires_grad=False)
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(weight, attribute):
            setattr(probe, attribute, getattr(weight, attribute))
    return dataclasses.replace(task, param_weight=probe)


def _compare(bridge: Any, model: list[Any], tasks: list[Any]) -> Iterator[str]:
    """For each task, what is wrong with its rule here; empty if nothing is, or this rank has no part of it."""
    exported = {
        name: weight.detach()
        for name, weight in bridge.export_hf_weights(
            model, cpu=False, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
        )
    }
    shapes = {name: tuple(weight.shape) for name, weight in exported.items()}
    for task in tasks:
        holds = all(_holds(f, exported.get(f.name)) for f in _fragments(task, shapes))
        yield (
            ""
            if holds
            else (
                f"this version of Megatron-Bridge converts {type(task.mapping).__name__} in another way than its rule"
            )
        )


def _fragments(task: Any, shapes: dict[str, tuple[int, ...]]) -> list[Fragment]:
    if task.param_weight is None:
        return []
    try:
        return fragments_of_task(task, shapes)
    except Refused:
        return []


def _holds(fragment: Fragment, whole: torch.Tensor | None) -> bool:
    return (
        whole is not None
        and tuple(whole.shape) == fragment.full_shape
        and whole.dtype == fragment.view.dtype
        and torch.equal(whole[local_slice(box_of(whole.shape), fragment.box)], fragment.view)
    )
