"""Shard rules held against the installed Bridge: its real export of probes, one of each kind of parameter.

A rule says where Bridge's code puts a parameter's bytes. That code changes between versions and model
families, under names that stay; so before a rule is trusted, Bridge exports a parameter of random values
through it, and the rule's fragments must hold exactly what came out.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from typing import Any

import torch
import torch.distributed as dist

from ...integration.layout import Fragment, box_of, local_slice
from .enumeration import VOCABULARY, Enumeration, conversion_tasks
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
    any_shape = not changes_converted_weights(bridge)
    probes = [_with_probe(tasks[i], kinds[i], any_shape) for i in chosen]
    shapes = {spec.name: spec.shape for spec in enumeration.specs}
    wrong = {
        kinds[i]: f"this version of Megatron-Bridge converts {kinds[i][1]} in another way than its rule"
        for i, holds in zip(chosen, _hold(bridge, model, probes, shapes), strict=True)
        if not holds
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


def _with_probe(task: Any, kind: tuple[Any, ...], any_shape: bool) -> Any:
    weight, mapping = task.param_weight, task.mapping
    if type(weight) is not torch.nn.Parameter or type(weight.data) is not torch.Tensor:
        return task
    shape = weight.shape
    # A hook of the model's bridge may want true shapes, but not of the vocabulary, whose size would be felt.
    of_vocabulary = task.global_param_name.endswith(VOCABULARY)
    if fits_any_shape(task) and (any_shape or of_vocabulary):
        shape = torch.Size(min(n, _SIDE) for n in shape)
    # Alike on ranks that hold the same shard: Bridge exports only one of them.
    place = (mapping.tp_rank, mapping.ep_rank if mapping.is_expert else 0, task.global_param_name, kind)
    generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
    values = torch.randint(-100, 100, shape, dtype=torch.int8, generator=generator)
    # Not where the parameter is, which may be offloaded: Bridge's collectives work on the GPU.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probe = torch.nn.Parameter(values.to(device).to(weight.dtype), requires_grad=False)
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(weight, attribute):
            setattr(probe, attribute, getattr(weight, attribute))
    return dataclasses.replace(task, param_weight=probe)


def _hold(bridge: Any, model: list[Any], tasks: list[Any], shapes: dict[str, tuple[int, ...]]) -> list[bool]:
    """For each task, whether all fragments that this rank has of it hold what Bridge exports."""
    wanted: dict[str, list[tuple[int, Fragment]]] = {}
    for index, task in enumerate(tasks):
        for fragment in _fragments(task, shapes):
            wanted.setdefault(fragment.name, []).append((index, fragment))
    holds = [True] * len(tasks)
    for name, weight in bridge.export_hf_weights(
        model, cpu=False, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
    ):
        for index, fragment in wanted.pop(name, []):
            holds[index] &= _holds(fragment, weight.detach())
    for index, _ in (pair for never_exported in wanted.values() for pair in never_exported):
        holds[index] = False
    return holds


def _fragments(task: Any, shapes: dict[str, tuple[int, ...]]) -> list[Fragment]:
    if task.param_weight is None:
        return []
    try:
        return fragments_of_task(task, shapes)
    except Refused:
        return []


def _holds(fragment: Fragment, whole: torch.Tensor) -> bool:
    return (
        tuple(whole.shape) == fragment.full_shape
        and whole.dtype == fragment.view.dtype
        and torch.equal(whole[local_slice(box_of(whole.shape), fragment.box)], fragment.view)
    )
