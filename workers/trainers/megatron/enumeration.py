"""What Bridge exports, learned on the meta device: names, shapes, dtypes, order; no memory, no weights moved.

Bridge's real export runs with a meta tensor in the place of every parameter. Collectives on meta
tensors are no-ops (torch's fake collectives); only Bridge's object collectives between pipeline
stages are real, and they carry shapes, so all trainer ranks must enumerate together.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....integration.weights.manifest import TensorSpec
from .agreement import on_all_ranks

logger = logging.getLogger(__name__)

# How the names of Megatron's parameters over the vocabulary end.
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class _TaskCursor(list[Any]):
    """A list of conversion tasks that knows which one a running export is at."""

    current: int = -1

    def __iter__(self) -> Iterator[Any]:
        for index, task in enumerate(super().__iter__()):
            self.current = index
            yield task


@dataclasses.dataclass(frozen=True)
class Enumeration:
    """Bridge's export: ``specs`` in its order, and ``task_names[i]``: the weights that task ``i`` yields."""

    specs: list[TensorSpec]
    task_names: list[tuple[str, ...]]

    def tasks_for(self, names: Iterable[str]) -> list[int]:
        """Indices of the tasks that must run to export ``names``, in order."""
        wanted = set(names)
        return [i for i, yielded in enumerate(self.task_names) if wanted.intersection(yielded)]


def enumerate_export(bridge: Any, model: list[Any], pp_group: dist.ProcessGroup) -> Enumeration:
    """Run Bridge's export on meta tensors; a collective of all trainer ranks.

    Args:
        bridge: ``AutoBridge`` with its Hugging Face checkpoint.
        model: Megatron model chunks of this rank.
        pp_group: pipeline-parallel group, over which the shapes of remote parameters are shared.

    Raises:
        RefitError: on every rank, if Bridge exports something else than the tasks' parameters on any. If Bridge
            itself raises on one rank, the others are in its collective until Megatron's own timeout.
    """
    # Tasks of their own: Bridge's mappings cache who owns a tensor, and here everybody seems to.
    tasks = on_meta(conversion_tasks(bridge, model), pp_group)
    _tell_of_holes(bridge, model, tasks)
    yielded = _walk_on_meta(bridge, model, tasks)
    return on_all_ranks("the enumeration of Bridge's export", lambda: joined(tasks, _specs_of(yielded)))


def run_on_meta(bridge: Any, model: list[Any], tasks: list[Any]) -> list[list[TensorSpec]]:
    """Bridge's export of ``tasks`` whose parameters are on the meta device: what each of them yields, in its order.

    Raises:
        RuntimeError: Bridge exports something else than the tasks' parameters.
    """
    return _specs_of(_walk_on_meta(bridge, model, tasks))


def _walk_on_meta(
    bridge: Any, model: list[Any], tasks: list[Any]
) -> list[list[tuple[TensorSpec, torch.device]]]:
    # Registers no-op kernels for c10d collectives on meta tensors.
    import torch.distributed._tools.fake_collectives  # noqa: F401

    cursor = _TaskCursor(tasks)
    yielded: list[list[tuple[TensorSpec, torch.device]]] = [[] for _ in tasks]
    # To its end, whatever it yields: other pipeline stages are in the same export.
    for name, weight in base_weights(bridge, model, cursor):
        yielded[cursor.current].append((TensorSpec(name, tuple(weight.shape), weight.dtype), weight.device))
    return yielded


def base_weights(bridge: Any, model: list[Any], tasks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Bridge's export of ``tasks``, without what adapters would add, under the names of a model that has none."""
    for name, weight in bridge.export_hf_weights(
        model, cpu=False, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
    ):
        yield name.replace(".base_layer", ""), weight


def _specs_of(yielded: list[list[tuple[TensorSpec, torch.device]]]) -> list[list[TensorSpec]]:
    for spec, device in (pair for found in yielded for pair in found):
        if device.type != "meta":
            raise RuntimeError(
                f"Bridge exports {spec.name} from a real tensor during the enumeration on the meta device, so its shape "
                "can't be trusted; this version of Megatron-Bridge reads parameters outside of its conversion tasks"
            )
    return [[spec for spec, _ in found] for found in yielded]


def joined(tasks: list[Any], yielded: list[list[TensorSpec]]) -> Enumeration:
    """The enumeration of an export, from its tasks and what each of them yields."""
    specs = [spec for found in yielded for spec in found]
    return Enumeration(
        specs, _with_group_members(tasks, [[spec.name for spec in found] for found in yielded])
    )


def conversion_tasks(bridge: Any, model: list[Any]) -> list[Any]:
    """Bridge's conversion tasks, by which all weights are exported as they are trained.

    The holes that it leaves for unmapped parameters are left out (see :func:`_tell_of_holes`).
    """
    tasks = [task for task in bridge.get_conversion_tasks(model) if task is not None]
    # Kimi-K2.5's bridge makes INT4 of experts, by a rule of its own, unless their task has a dtype.
    makes_int4 = getattr(bridge._model_bridge, "_is_quantized_expert_key", None)
    if makes_int4 is None:
        return tasks
    from megatron.core.utils import unwrap_model

    # Of the model, and not of the parameter: every stage casts what it gets, and only one has the parameter.
    dtype = unwrap_model(model)[0].config.params_dtype
    return [
        dataclasses.replace(task, weight_dtype=dtype) if any(map(makes_int4, names_of(task))) else task
        for task in tasks
    ]


def _tell_of_holes(bridge: Any, model: list[Any], tasks: list[Any]) -> None:
    """Log by name, on the first rank, the parameters that Bridge exports neither here nor by itself: no refit brings them.

    A collective of the pipeline's stages. No error: whether an engine has a place for them, only its own check of the manifest can tell.

    Args:
        bridge: ``AutoBridge``.
        model: Megatron model chunks of this rank.
        tasks: Bridge's conversion tasks, with the parameters of all pipeline stages.
    """
    from megatron.core.utils import unwrap_model

    converter, named = bridge._model_bridge, {task.global_param_name for task in tasks}
    tied = converter._share_embeddings_and_output_weights(unwrap_model(model)[0].config)
    unmapped = [
        name
        for name in converter._megatron_global_param_names_all_pp_ranks(model)
        if name not in named and not (tied and "output_layer" in name)
    ]
    absent = [f"{t.global_param_name} ({', '.join(names_of(t))})" for t in tasks if t.param_weight is None]
    if dist.get_rank() != 0:
        return
    if unmapped:
        logger.warning(
            "Megatron-Bridge has no mapping for %d parameters, which stay out of refits: %s. An engine that has a place for "
            "them refuses the manifest; give %s a mapping for them",
            len(unmapped),
            ", ".join(unmapped),
            type(converter).__name__,
        )
    if absent:
        logger.warning(
            "the checkpoint that Megatron-Bridge was made from lacks the weights of %d parameters, which stay out of refits: "
            "%s. An engine that has a place for them refuses the manifest; make the bridge from a whole checkpoint",
            len(absent),
            ", ".join(absent),
        )


def names_of(task: Any) -> list[str]:
    """The weights that a task's mapping names, by Hugging Face's names."""
    named = task.mapping.hf_param
    return [named] if isinstance(named, str) else list(named.values())


def on_meta(tasks: Sequence[Any], pp_group: dist.ProcessGroup) -> list[Any]:
    """Bridge's tasks with a meta tensor in the place of every parameter, also of other stages'; a collective of the pipeline's stages."""
    ours = {
        t.global_param_name: (t.param_weight.shape, t.param_weight.dtype)
        for t in tasks
        if t.param_weight is not None
    }
    stages: list[dict[str, Any] | None] = [None] * dist.get_world_size(pp_group)
    dist.all_gather_object(stages, ours, group=pp_group)
    known: dict[str, Any] = {}
    for stage in stages:
        known.update(stage or {})
    # Also for remote parameters: Bridge would allocate a real tensor to receive them. Without a stage of its own, a
    # task of the embedding's copy beside a prediction layer is not made a receiver, which would wait for a sender.
    return [
        dataclasses.replace(
            task, vp_stage=None, param_weight=_meta_like(task.param_weight, known.get(task.global_param_name))
        )
        for task in tasks
    ]


def _meta_like(
    weight: torch.Tensor | None, spec: tuple[torch.Size, torch.dtype] | None
) -> torch.Tensor | None:
    if spec is None:
        return None  # a parameter that the checkpoint lacks: no stage has a task with it
    shape, dtype = spec
    meta = torch.empty(shape, dtype=dtype, device="meta")
    for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(weight, attribute):
            setattr(meta, attribute, getattr(weight, attribute))
    return meta


def _with_group_members(tasks: list[Any], yielded: list[list[str]]) -> list[tuple[str, ...]]:
    """Give every task of a grouped export the group's names: all of them must run for the group to come out."""
    groups: dict[str, list[str]] = {}
    for task, names in zip(tasks, yielded, strict=True):
        if getattr(task.mapping, "is_grouped_export", False):
            groups.setdefault(task.mapping.group_key, []).extend(names)
    return [
        tuple(groups[task.mapping.group_key])
        if getattr(task.mapping, "is_grouped_export", False)
        else tuple(names)
        for task, names in zip(tasks, yielded, strict=True)
    ]
