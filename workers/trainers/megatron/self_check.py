"""Shard rules held against the installed Bridge: its real export of probes, one of each kind of parameter.

A rule says where Bridge's code puts a parameter's bytes. That code changes between versions and model
families, under names that stay; so before a rule is trusted, Bridge exports a parameter of random values
through it, and the rule's fragments must hold exactly what came out.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ....integration.layout import Fragment
from .agreement import on_all_ranks
from .enumeration import VOCABULARY, Enumeration, base_weights, conversion_tasks
from .native_fp8 import is_native
from .rules import Refused, fits_any_shape, fragments_of_task, parameter_like

# Sides of a probe whose shape is free: even, for gate and up, and not 1, which Bridge's stacking drops.
_SIDE = 8
# Elements of the weights that Bridge exports of probes of true shapes at once, unless one kind alone has more.
_AT_ONCE = 1 << 26

Kind = tuple[Any, ...]
Shapes = Mapping[str, tuple[int, ...]]


def disproved_tasks(bridge: Any, model: list[Any], enumeration: Enumeration) -> dict[int, str]:
    """Tasks whose rule and Bridge's export disagree, with the reason; a collective of all trainer ranks.

    What one rank finds holds for the same kind of parameter on all others. Bridge's collectives run under the timeout
    of Megatron's own groups: if Bridge itself raises on one rank, the others are in its collective until then.

    Args:
        bridge: ``AutoBridge`` with its Hugging Face checkpoint.
        model: Megatron model chunks of this rank.
        enumeration: of the same model.

    Raises:
        RefitError: a rule or its comparison failed on some rank; on all ranks.
    """
    tasks = conversion_tasks(bridge, model)
    kinds = _kinds(tasks, enumeration)
    shapes = {spec.name: spec.shape for spec in enumeration.specs}
    chosen = _representatives(kinds, enumeration)
    own = on_all_ranks("a shard rule", lambda: refusals(tasks, chosen, shapes))
    everywhere: list[dict[Kind, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, own)
    # A kind without a rule on some rank has none: nothing is probed, and no rank may use a rule that wasn't.
    reasons = {kind: why for found in everywhere for kind, why in found.items() if why}
    served = {kind for found in everywhere for kind in found} - reasons.keys()
    any_shape = not changes_converted_weights(bridge)
    of_any_shape = [kind for kind in chosen if _is_small(tasks[chosen[kind][0]], any_shape)]
    batches = [of_any_shape, *_batches(kind for kind in chosen if kind not in of_any_shape)]
    wrong: dict[Kind, str] = {}
    for batch in batches:
        indices = sorted(i for kind in batch if kind in served for i in chosen[kind])
        if indices:
            disproved = _disproved(bridge, model, [tasks[i] for i in indices], shapes, any_shape)
            wrong |= {kinds[indices[i]]: _changed(tasks[indices[i]]) for i in disproved}
    dist.all_gather_object(everywhere, wrong)
    for found in everywhere:
        reasons |= found
    return {i: reasons[kind] for i, kind in enumerate(kinds) if kind in reasons}


def _batches(kinds: Iterable[Kind]) -> list[list[Kind]]:
    """Kinds whose probes have true shapes, which may be large: as many at once as fit into :data:`_AT_ONCE`; alike on all ranks."""
    batches: list[list[Kind]] = []
    room = 0
    for kind in kinds:
        elements = sum(math.prod(shape) for shape in kind[-1])
        if not batches or elements > room:
            batches.append([])
            room = _AT_ONCE
        batches[-1].append(kind)
        room -= elements
    return batches


def changes_converted_weights(bridge: Any) -> bool:
    """Whether the model's bridge has a hook of its own on converted weights."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    own = type(bridge._model_bridge).maybe_modify_converted_hf_weight
    return own is not MegatronModelBridge.maybe_modify_converted_hf_weight


def _changed(task: Any) -> str:
    return (
        f"this version of Megatron-Bridge converts {type(task.mapping).__name__} in another way than its rule"
    )


def _kinds(tasks: list[Any], enumeration: Enumeration) -> list[Kind]:
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


def _representatives(kinds: list[Kind], enumeration: Enumeration) -> dict[Kind, list[int]]:
    """For each kind, the tasks that yield the weights of its first one; alike on all ranks."""
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    return {
        kind: [i for i in enumeration.tasks_for(enumeration.task_names[first[kind]]) if kinds[i] == kind]
        for kind in dict.fromkeys(kinds)
        if enumeration.task_names[first[kind]]
    }


def refusals(tasks: list[Any], chosen: dict[Kind, list[int]], shapes: Shapes) -> dict[Kind, str]:
    """Of the kinds that this rank holds: why no rule places them, empty for those that one does."""
    found: dict[Kind, str] = {}
    for kind, indices in chosen.items():
        for task in (tasks[i] for i in indices if tasks[i].param_weight is not None):
            # Parameters may be offloaded, with their storage freed, and rules read no values.
            weight = task.param_weight
            if _is_plain(weight) or is_native(weight):
                empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                task = dataclasses.replace(task, param_weight=parameter_like(weight, empty))
            try:
                fragments_of_task(task, shapes)
                found.setdefault(kind, "")
            except Refused as reason:
                found[kind] = str(reason)
    return found


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor


def _is_small(task: Any, any_shape: bool) -> bool:
    """Whether a probe may have any shape.

    A hook of the model's bridge may want true shapes, but not of the vocabulary, whose size would be felt.
    """
    return fits_any_shape(task) and (any_shape or task.global_param_name.endswith(VOCABULARY))


def _with_probe(task: Any, any_shape: bool) -> Any:
    """The task with random values in the parameter's place; as it is where another pipeline stage has that."""
    weight, mapping = task.param_weight, task.mapping
    if weight is None:
        return task
    small = _is_small(task, any_shape)
    shape = torch.Size(min(n, _SIDE) for n in weight.shape) if small else weight.shape
    # Alike on ranks that hold the same shard: Bridge exports only one of them.
    place = (mapping.tp_rank, mapping.ep_rank if mapping.is_expert else 0, task.global_param_name)
    # Not where the parameter is, which may be offloaded: Bridge's collectives work on the GPU.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(zlib.crc32(repr(place).encode()))
    values = torch.randint(-100, 100, shape, dtype=torch.int8, device=device, generator=generator)
    return dataclasses.replace(task, param_weight=parameter_like(weight, values.to(weight.dtype)))


def _disproved(bridge: Any, model: list[Any], tasks: list[Any], shapes: Shapes, any_shape: bool) -> set[int]:
    """Which tasks have a fragment on this rank that does not hold what Bridge exports of their probes."""

    def prepare() -> tuple[list[Any], dict[str, list[tuple[int, Fragment]]]]:
        probes = [_with_probe(task, any_shape) for task in tasks]
        wanted: dict[str, list[tuple[int, Fragment]]] = {}
        for index, probe in enumerate(probes):
            if probe.param_weight is not None:
                for fragment in fragments_of_task(probe, shapes):
                    wanted.setdefault(fragment.name, []).append((index, fragment))
        return probes, wanted

    probes, wanted = on_all_ranks("a probe of a shard rule", prepare)
    exported = {name: weight.detach() for name, weight in base_weights(bridge, model, probes)}
    return on_all_ranks(
        "the comparison of a shard rule with Bridge's export",
        lambda: {
            index
            for name, parts in wanted.items()
            for index, fragment in parts
            if name not in exported or not _holds(fragment, exported[name])
        },
    )


def _holds(fragment: Fragment, whole: torch.Tensor) -> bool:
    return (
        tuple(whole.shape) == fragment.full_shape
        and whole.dtype == fragment.view.dtype
        and torch.equal(fragment.part_of(whole), fragment.view)
    )
