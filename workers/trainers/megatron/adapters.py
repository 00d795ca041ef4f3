"""LoRA layers that Megatron-Bridge put into a model: which part of which adapter belongs to which weight.

A layer under LoRA holds the base weight as ``….to_wrap.weight`` and the factors as ``….adapter.linear_in.weight`` and
``….adapter.linear_out.weight``. Both are cut over tensor parallelism: the first along its rank under a layer that is cut
along its outputs, and along its inputs under one that is cut so; the second along its outputs. The outputs stand as those
of the base weight, so that the rows of one factor belong to queries, keys and values, or to gate and up. Grouped experts
share one adapter, or have one each, in tensors of three dimensions.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....integration.errors import RefitError
from ....integration.layout import Fragment
from ..offload import Residence
from .agreement import on_all_ranks
from .places import Places
from .rules import Refused, fragments_of_task, parameter_like

# How Bridge marks the base weights in the names of its tasks.
WRAPPED = ".to_wrap."
# Mapping classes of base weights whose fragments tell where an adapter's rows stand in Bridge's export of it.
_PLACED = ("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping", "GatedMLPMapping", "QKVMapping")
_WRAPPERS = ("LoRALinear", "TEFusedLoRALinear", "LoRATopKRouter", "LoRALinearSplitQKV", "LoRALinearSplitFC1UpGate")
_ADAPTERS = ("ParallelLinearAdapter", "GroupedExpertLinearAdapter")


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a weight, and where a rank's part of a factor has them.

    Attributes:
        first: of them in the weight.
        count: of them.
        at: first of them in the part.
    """

    first: int
    count: int
    at: int


@dataclass(frozen=True)
class Pair:
    """What an adapter adds to one Hugging Face weight, of which this rank holds a part.

    Attributes:
        weight: its name.
        shape: of all of it.
        number: of the adapter, among those of this rank.
        expert: index of the expert in factors of three dimensions; None for factors of two.
        rows: of the weight in this rank's part of ``linear_out``; None if that is cut evenly along the weight's rows.
    """

    weight: str
    shape: tuple[int, int]
    number: int
    expert: int | None
    rows: tuple[Rows, ...] | None


def has_adapters(tasks: Iterable[Any]) -> bool:
    """Whether any of Bridge's conversion tasks is of a layer under an adapter; the same on all pipeline stages."""
    return any(WRAPPED in f".{task.global_param_name}" for task in tasks)


def is_adapted(task: Any) -> bool:
    """Whether an adapter adds to the parameter of one of Bridge's conversion tasks: to a layer's weight, not to its bias or norm."""
    return f"{WRAPPED}weight" in f".{task.global_param_name}"


class Adapters:
    """The adapters of this rank's model chunks, and those of other pipeline stages by Bridge's tasks.

    Args:
        bridge: ``AutoBridge`` of the Hugging Face checkpoint.
        model: Megatron model chunks of this rank.
        device: that computes.

    Building it is a collective of all trainer ranks.

    Raises:
        RefitError: on all ranks: what an adapter adds is not known here; lists all reasons.
    """

    def __init__(self, bridge: Any, model: list[Any], device: torch.device):
        on_all_ranks("looking at the adapters", lambda: _require_plain(model))
        self._bridge = bridge
        self._model = model
        self._device = device
        self._residence = Residence(model, device)
        self._wrappers = [module for chunk in model for module in _wrappers(chunk)]
        # All stages', as Bridge orders them.
        self.all = [task for found in self._built().values() for task in found]
        self._own = [task for task in self.all if task.linear_in_task.param_weight is not None]
        # Two of each adapter of this rank's: linear_in, linear_out.
        self._tasks = [t for task in self._own for t in (task.linear_in_task, task.linear_out_task)]
        self._places = Places(model, self._tasks)
        self._of_base: dict[str, list[int]] = defaultdict(list)
        for number, task in enumerate(self._own):
            self._of_base[task.global_base_prefix].append(number)

    def pairs(self, task: Any) -> list[Pair]:
        """What is added to the weights of one of Bridge's conversion tasks, whose parameter this rank holds.

        Raises:
            Refused: where an adapter's rows stand is not known.
        """
        if type(task.mapping).__name__ not in _PLACED or getattr(task.mapping, "is_grouped_export", False):
            raise Refused(f"LoRA under {type(task.mapping).__name__}: Bridge merges the adapter on export")
        empty = torch.empty(task.param_weight.shape, dtype=task.param_weight.dtype, device="meta")
        base = parameter_like(task.param_weight, empty)
        fragments = fragments_of_task(dataclasses.replace(task, param_weight=base))
        if any(len(f.full_shape) != 2 or f.axes is not None for f in fragments):
            raise Refused("LoRA on a weight that is no plain matrix: Bridge merges the adapter on export")
        prefix, _, leaf = task.global_param_name.partition(f"{WRAPPED}weight")
        numbers = self._of_base.get(prefix, [])
        names = dict.fromkeys(f.name for f in fragments)
        if not all(name.endswith(".weight") for name in names):
            raise Refused("LoRA on a weight whose name doesn't end in .weight: Bridge merges the adapter on export")
        return [
            self._pair(name, [f for f in fragments if f.name == name], base, numbers, task, leaf)
            for name in names
        ]

    def _pair(
        self, name: str, parts: list[Fragment], base: torch.Tensor, numbers: list[int], task: Any, leaf: str
    ) -> Pair:
        number = self._number_for(name, numbers)
        out_task = self._own[number].linear_out_task
        out, size = out_task.param_weight, out_task.mapping.tp_size
        height, width = parts[0].full_shape
        expert = int(task.param_name.rpartition("weight")[2]) if leaf and out.ndim == 3 else None
        rows: tuple[Rows, ...] | None
        if out.shape[-2] == base.shape[0] and self._own[number].adapter_key is None:
            rows = tuple(_rows_of(part, base) for part in parts)
        elif out.shape[-2] * size == height:
            rows = None
        else:
            raise Refused(
                f"LoRA: {out.shape[-2]} rows of its adapter at TP {size} are not those of {name}: Bridge merges the adapter on export"
            )
        return Pair(name, (height, width), number, expert, rows)

    def _number_for(self, name: str, numbers: list[int]) -> int:
        """The adapter of one weight: the one of the layer, or of several that one which Bridge keeps for it."""
        from megatron.bridge.models.conversion.peft_bridge import ADAPTER_NAME_MAP

        keys = {self._own[number].adapter_key: number for number in numbers}
        if None in keys:
            return keys[None]
        key = next((key for suffix, key in ADAPTER_NAME_MAP.items() if name.endswith(suffix)), None)
        if key not in keys:
            raise Refused(f"LoRA: {name} has no adapter of its own among {', '.join(map(str, keys))}")
        return keys[key]

    def scaling(self, number: int) -> float:
        """What the product of an adapter's factors is multiplied by."""
        return float(self._own[number].alpha / self._own[number].dim)

    def is_cut(self, number: int) -> bool:
        """Whether an adapter's factors are cut over several ranks of tensor parallelism."""
        return bool(self._factors_of(number)[1].mapping.tp_size > 1)

    def out_rows(self, number: int) -> int:
        """Rows of this rank's part of ``linear_out``."""
        return int(self._factors_of(number)[1].param_weight.shape[-2])

    def elements(self, number: int) -> int:
        """Of an adapter's whole factors."""
        return sum(task.param_weight.numel() * task.mapping.tp_size for task in self._factors_of(number))

    def fragments(self, pair: Pair) -> tuple[Fragment, ...]:
        """This rank's parts of the two factors of a weight, by their names in an adapter's checkpoint, without its prefix."""
        a, b = self._factors_of(pair.number)
        (view_a, name_a), (view_b, name_b) = (
            (task.param_weight.data if pair.expert is None else task.param_weight.data[pair.expert], name)
            for task, name in zip((a, b), factor_names(pair.weight), strict=True)
        )
        found = [_part(name_a, view_a, _axis(a), a.mapping)]
        if pair.rows is None:
            return (*found, _part(name_b, view_b, 0, b.mapping))
        shape = pair.shape[0], view_b.shape[1]
        found += [
            Fragment(name_b, shape, ((r.first, r.first + r.count), (0, shape[1])), view_b[r.at : r.at + r.count])
            for r in pair.rows
        ]
        return tuple(found)

    def whole(self, numbers: Sequence[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The whole factors of adapters of this rank in FP32: ``[…, r, in]`` and ``[…, out, r]``, the outputs as the ranks of tensor
        parallelism hold them, one rank's after the other's. One collective of each group and dtype, on all of its ranks with the same
        adapters.
        """
        tasks = self._residence.tasks([t for number in numbers for t in self._factors_of(number)])
        gathered = _gathered(tasks, self._device)
        return {number: (gathered[2 * i], gathered[2 * i + 1]) for i, number in enumerate(numbers)}

    def follow(self) -> bool:
        """Look at where the factors are; whether any is another parameter than before.

        Raises:
            RefitError: as of :meth:`.Places.follow`.
        """
        return self._places.follow(self._tasks)

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's parts of all factors, by their names in Megatron."""
        return [(task.global_param_name, task.param_weight) for task in self._tasks]

    def residence(self) -> Any:
        """As :meth:`.Residence.key`."""
        return self._residence.key()

    def require_enabled(self) -> None:
        """Check that the model computes with what is sent, as it did when the refit was prepared.

        Raises:
            RefitError: an adapter is disabled, or was put in or taken out.
        """
        now = [module for chunk in self._model for module in _wrappers(chunk)]
        if len(now) != len(self._wrappers) or any(a is not b for a, b in zip(now, self._wrappers, strict=True)):
            raise RefitError(
                "the model has other adapters than when the refit was prepared; the engine would get the old ones. Nothing was "
                "sent. Call close_refit on all trainer ranks and prepare the refit again",
                stage="export",
            )
        disabled = [module for module in now if not module._adapter_enabled]
        if disabled:
            raise RefitError(
                f"{len(disabled)} of {len(now)} adapters are disabled, so that the trainer computes without them, and what is sent "
                "would have them. Nothing was sent. Call enable_adapter_layers before the refit",
                stage="export",
            )

    def merged_export(self, tasks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Bridge's export of base weights with the adapters merged in; a collective of all trainer ranks.

        Args:
            tasks: Bridge's conversion tasks.
        """
        converter = self._converter(self.all)
        exported: Iterator[tuple[str, torch.Tensor]] = converter.stream_weights_megatron_to_hf(
            self._model,
            self._bridge.hf_pretrained,
            cpu=False,
            show_progress=False,
            conversion_tasks=tasks,
            merge_adapter_weights=True,
        )
        return exported

    def _converter(self, tasks: Sequence[Any]) -> Any:
        """Bridge's converter of the model, which knows of these adapters alone, and reads them where they are now, on the device."""
        live = {task.global_param_name: task for task in self._tasks}
        factors = [f for task in tasks for f in (task.linear_in_task, task.linear_out_task)]
        here = list(self._residence.on_device([live.get(f.global_param_name, f) for f in factors]))
        by_base: dict[str, list[Any]] = defaultdict(list)
        for task, a, b in zip(tasks, here[::2], here[1::2], strict=True):
            found = dataclasses.replace(task, linear_in_task=a, linear_out_task=b)
            by_base[task.global_base_prefix].append(found)
        return _knowing(self._bridge, by_base)

    def _built(self) -> dict[str, list[Any]]:
        from megatron.core.utils import unwrap_model

        built: dict[str, list[Any]] = self._bridge._model_bridge.build_adapter_conversion_tasks(
            unwrap_model(self._model)
        )
        return built

    def _factors_of(self, number: int) -> tuple[Any, Any]:
        return self._tasks[2 * number], self._tasks[2 * number + 1]


def _knowing(bridge: Any, adapters: dict[str, list[Any]]) -> Any:
    """A converter of Bridge that takes these tasks of adapters for the model's."""
    converter = bridge._model_bridge  # another one at each access
    converter.build_adapter_conversion_tasks = lambda *_, **__: adapters
    return converter


def factor_names(weight: str) -> tuple[str, str]:
    """Names of the two factors of a weight in an adapter's checkpoint, without the prefix that such names have there."""
    path = weight.removesuffix(".weight")
    return f"{path}.lora_A.weight", f"{path}.lora_B.weight"


@contextmanager
def adapters_off(model: Sequence[Any]) -> Iterator[None]:
    """The model computes without its adapters: what it was before them, as a reference policy."""
    wrappers = [module for chunk in model for module in _wrappers(chunk)]
    for module in wrappers:
        module.disable_adapter_layers()
    try:
        yield
    finally:
        for module in wrappers:
            module.enable_adapter_layers()


def _wrappers(chunk: Any) -> Iterator[Any]:
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    return (module for module in chunk.modules() if isinstance(module, AdapterWrapper))


def _require_plain(model: list[Any]) -> None:
    from megatron.bridge.peft.lora_layers import LinearAdapter

    problems: dict[str, None] = {}
    for chunk in model:
        for path, module in chunk.named_modules():
            if isinstance(module, LinearAdapter):
                problems[f"{type(module).__name__} ({path}): Bridge has no names for the factors of torch's own linear layers"] = None
        for module in _wrappers(chunk):
            problems |= dict.fromkeys(_problems(module))
    if problems:
        raise RefitError(
            "the model's adapters can't be refitted; the engine would compute something else than the trainer. Nothing was sent. "
            "Train Bridge's LoRA or CanonicalLoRA on Megatron's linear layers:\n  " + "\n  ".join(problems),
            stage="prepare",
        )


def _problems(wrapper: Any) -> Iterator[str]:
    kind = type(wrapper).__name__
    if kind not in _WRAPPERS:
        yield f"{kind} is no plain LoRA"
        return
    several = isinstance(wrapper.adapter, torch.nn.ModuleDict)
    for adapter in wrapper.adapter.values() if several else [wrapper.adapter]:
        name = getattr(adapter, "base_linear_name", kind)
        if type(adapter).__name__ not in _ADAPTERS:
            yield f"{type(adapter).__name__} ({name}) is no plain LoRA"
            continue
        if not isinstance(adapter.activation, torch.nn.Identity):
            yield f"{name} has an activation between its factors"
        config = adapter.config
        if adapter.is_expert and (config.expert_tensor_parallel_size or 1) > 1:
            yield (
                f"{name}: under expert tensor parallelism Bridge exports gate and up of experts' adapters in each other's place; "
                "give expert_tensor_parallel_size 1"
            )
        if ".local_experts." in name and config.expert_model_parallel_size > 1:
            yield (
                f"{name}: Bridge counts adapters of experts in modules of their own on each rank anew; give moe_grouped_gemm, or "
                "expert_model_parallel_size 1"
            )


def _axis(task: Any) -> int:
    """The dimension along which the first factor is cut, from the end."""
    return -1 if type(task.mapping).__name__ == "RowParallelMapping" else -2


def _part(name: str, view: torch.Tensor, axis: int, mapping: Any) -> Fragment:
    rank, size, axis = mapping.tp_rank, mapping.tp_size, axis % 2
    full, box = list(view.shape), [(0, n) for n in view.shape]
    full[axis] *= size
    box[axis] = (rank * view.shape[axis], (rank + 1) * view.shape[axis])
    return Fragment(name, (full[0], full[1]), tuple(box), view)


def _rows_of(part: Fragment, base: torch.Tensor) -> Rows:
    """Where a fragment's rows are in the parameter that it is cut from.

    Raises:
        Refused: it is no cut along the rows.
    """
    view = part.view
    at, rest = divmod(view.storage_offset(), base.shape[1])
    if rest or view.shape[1] != base.shape[1] or view.stride() != base.stride():
        raise Refused("LoRA on a weight that Bridge rearranges: Bridge merges the adapter on export")
    (first, stop), _ = part.box
    return Rows(first, stop - first, at)


def _gathered(tasks: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    """The whole factors of ``tasks`` in FP32 on ``device``."""
    whole: dict[int, torch.Tensor] = {}
    groups: dict[tuple[Any, torch.dtype], list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        groups[task.mapping.tp_group, task.param_weight.dtype].append(index)
    for (group, dtype), members in groups.items():
        parts = [tasks[i].param_weight.detach().to(device) for i in members]
        size = tasks[members[0]].mapping.tp_size
        if size == 1:
            whole |= {i: part.float() for i, part in zip(members, parts, strict=True)}
            continue
        own = torch.cat([part.reshape(-1) for part in parts])
        ranks = torch.empty((size, own.numel()), dtype=dtype, device=device)
        dist.all_gather_into_tensor(ranks.view(-1), own, group=group)
        start = 0
        for i, part in zip(members, parts, strict=True):
            cut = ranks[:, start : start + part.numel()].view(size, *part.shape)
            start += part.numel()
            axis = _axis(tasks[i])
            whole[i] = torch.cat(list(cut.float()), dim=axis)
    return [whole[i] for i in range(len(tasks))]
