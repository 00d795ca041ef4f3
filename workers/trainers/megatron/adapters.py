"""LoRA layers that Megatron-Bridge put into a model: which part of which adapter belongs to which weight.

A layer under LoRA holds the base weight as ``….to_wrap.weight`` and the factors as ``….adapter.linear_in.weight`` and
``….adapter.linear_out.weight``. Both are cut over tensor parallelism: the first along its rank under a layer that is cut
along its outputs, and along its inputs under one that is cut so; the second along its outputs. The outputs stand as those
of the base weight, so that the rows of one factor belong to queries, keys and values, or to gate and up. Grouped experts
share one adapter, or have one each, in tensors of three dimensions.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....integration.errors import RefitError
from ....integration.layout import Fragment
from ....integration.weights.manifest import TensorSpec
from ...lora import PREFIX, AdapterSettings, split_name
from ..offload import Residence
from .agreement import on_all_ranks
from .enumeration import on_meta
from .places import Places
from .rules import Refused, fragments_of_task, parameter_like

# How Bridge marks the base weights in the names of its tasks.
WRAPPED = ".to_wrap."
# Mapping classes of base weights whose fragments tell where an adapter's rows stand in Bridge's export of it.
_PLACED = (
    "AutoMapping",
    "ColumnParallelMapping",
    "RowParallelMapping",
    "ReplicatedMapping",
    "GatedMLPMapping",
    "QKVMapping",
)
_WRAPPERS = (
    "LoRALinear",
    "TEFusedLoRALinear",
    "LoRATopKRouter",
    "LoRALinearSplitQKV",
    "LoRALinearSplitFC1UpGate",
)
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
        tasks: Bridge's conversion tasks of the model.
        device: that computes.
        alone: whether nothing else travels, so that nothing else may be trained.

    Building it is a collective of all trainer ranks: where a factor's rows stand is tried on the installed Bridge.

    Raises:
        RefitError: on all ranks: what an adapter adds is not known here; lists all reasons.
    """

    def __init__(
        self, bridge: Any, model: list[Any], tasks: Sequence[Any], device: torch.device, alone: bool = False
    ):
        _require_plain(model, alone)
        self._bridge = bridge
        self._model = model
        self._device = device
        self._residence = Residence(model, device)
        self._wrappers = self._present()
        # All stages', as Bridge orders them.
        self._all = self._built()
        self._own = [task for task in self._all if task.linear_in_task.param_weight is not None]
        # Two of each adapter of this rank's: linear_in, linear_out.
        self._tasks = [t for task in self._own for t in (task.linear_in_task, task.linear_out_task)]
        self._places = Places(model, self._tasks)
        self._of_base: dict[str, list[int]] = defaultdict(list)
        for number, task in enumerate(self._own):
            self._of_base[task.global_base_prefix].append(number)
        self._disproved: set[str] = set()
        self._disproved = self._disproved_by_bridge(tasks)

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
        if _kind(prefix) in self._disproved:
            raise Refused(
                "LoRA: this version of Megatron-Bridge exports the adapter's rows in another order than its weight's"
            )
        numbers = self._of_base.get(prefix, [])
        names = dict.fromkeys(f.name for f in fragments)
        if not all(name.endswith(".weight") for name in names):
            raise Refused(
                "LoRA on a weight whose name doesn't end in .weight: Bridge merges the adapter on export"
            )
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

    def resident(self) -> list[Any]:
        """Bridge's tasks of this rank's factors, two of each adapter, with the parameters where they are now."""
        self.follow()
        found: list[Any] = self._residence.tasks(self._tasks)
        return found

    def fragments(self, pair: Pair, factors: Sequence[Any]) -> list[Fragment]:
        """This rank's parts of the two factors of a weight, by their names in an adapter's checkpoint, without its prefix.

        Args:
            pair: of :meth:`pairs`.
            factors: as :meth:`resident` gives them.
        """
        a, b = factors[2 * pair.number : 2 * pair.number + 2]
        name_a, name_b = factor_names(pair.weight)
        view_a, view_b = (
            task.param_weight.data if pair.expert is None else task.param_weight.data[pair.expert]
            for task in (a, b)
        )
        found = [_part(name_a, view_a, _axis(a), a.mapping)]
        if pair.rows is None:
            return [*found, _part(name_b, view_b, -2, b.mapping)]
        shape = pair.shape[0], view_b.shape[1]
        found += [
            Fragment(
                name_b, shape, ((r.first, r.first + r.count), (0, shape[1])), view_b[r.at : r.at + r.count]
            )
            for r in pair.rows
        ]
        return found

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

    def require_same(self) -> None:
        """Check that the model computes with what is sent, as it did when the refit was prepared.

        Raises:
            RefitError: an adapter is disabled, was put in or taken out, or is scaled otherwise.
        """
        now = self._present()
        if now != self._wrappers:
            raise RefitError(
                "the model has other adapters than when the refit was prepared, or other ranks or scalings of them; the engine would "
                "get the old ones. Nothing was sent. Call close_refit on all trainer ranks and prepare the refit again",
                stage="export",
            )
        disabled = sum(not wrapper._adapter_enabled for wrapper, *_ in now)
        if disabled:
            raise RefitError(
                f"{disabled} of {len(now)} adapters are disabled, so that the trainer computes without them, and what is sent "
                "would have them. Nothing was sent. Call enable_adapter_layers before the refit",
                stage="export",
            )

    def finish_gathers(self) -> None:
        """As :meth:`.Residence.finish_gathers`."""
        self._residence.finish_gathers()

    def exports(self) -> list[list[TensorSpec]]:
        """What Bridge exports of each adapter of all stages, in its order; a collective of all trainer ranks."""
        # Registers no-op kernels for c10d collectives on meta tensors.
        import torch.distributed._tools.fake_collectives  # noqa: F401
        from megatron.core import parallel_state

        # Tasks of their own, as :func:`.enumerate_export` has them.
        built = self._built()
        stages = parallel_state.get_pipeline_model_parallel_group()
        factors = on_meta([t for task in built for t in (task.linear_in_task, task.linear_out_task)], stages)
        found: list[list[TensorSpec]] = []
        converter = _knowing(self._bridge, _with_factors(built, factors))
        materialize = converter.materialize_adapter_weights

        def noting(tasks: list[Any]) -> Any:
            found.append([])
            return materialize(tasks)

        converter.materialize_adapter_weights = noting
        for name, weight in self._streamed(converter):
            found[-1].append(TensorSpec(name, tuple(weight.shape), weight.dtype))
        return found

    def settings(self, exported: Sequence[Sequence[TensorSpec]]) -> AdapterSettings:
        """Rank and scaling of each layer of the checkpoint.

        Args:
            exported: as :meth:`exports` gives it.
        """
        ranks: dict[str, int] = {}
        scalings: dict[str, float] = {}
        for task, specs in zip(self._all, exported, strict=True):
            for spec in specs:
                path, factor = split_name(f"{PREFIX}{spec.name}") or ("", "")
                if factor == "A":
                    ranks[path], scalings[path] = spec.shape[-2], float(task.alpha / task.dim)
        return AdapterSettings(ranks, scalings)

    def export(self, numbers: Collection[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Bridge's export of adapters, by their places in :meth:`exports`; a collective of all trainer ranks."""
        return self._streamed(self._converter([self._all[number] for number in sorted(numbers)]))

    def numbers_under(self, task: Any) -> list[int]:
        """Places in :meth:`exports` of the adapters that add to a base weight's task."""
        prefix = task.global_param_name.partition(WRAPPED)[0]
        return [number for number, one in enumerate(self._all) if one.global_base_prefix == prefix]

    def merged_export(self, tasks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Bridge's export of base weights with the adapters merged in; a collective of all trainer ranks.

        Args:
            tasks: Bridge's conversion tasks.
        """
        converter = self._converter(self._all)
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
        self.follow()
        live = {task.global_param_name: task for task in self._tasks}
        factors = [f for task in tasks for f in (task.linear_in_task, task.linear_out_task)]
        here = self._residence.on_device([live.get(f.global_param_name, f) for f in factors])
        return _knowing(self._bridge, _with_factors(tasks, list(here)))

    def _streamed(self, converter: Any) -> Iterator[tuple[str, torch.Tensor]]:
        streamed: Iterator[tuple[str, torch.Tensor]] = converter.stream_adapter_weights_megatron_to_hf(
            self._model, cpu=False, show_progress=False
        )
        return streamed

    def _built(self) -> list[Any]:
        from megatron.core.utils import unwrap_model

        built = self._bridge._model_bridge.build_adapter_conversion_tasks(unwrap_model(self._model))
        return [task for found in built.values() for task in found]

    def _present(self) -> list[tuple[Any, ...]]:
        """This rank's wrappers, each with the ranks and scalings of its adapters."""
        return [
            (wrapper, *((one.dim, one.alpha) for one in _adapters_of(wrapper)))
            for chunk in self._model
            for wrapper in _wrappers(chunk)
        ]

    def _disproved_by_bridge(self, tasks: Sequence[Any]) -> set[str]:
        """Kinds of layers whose adapters Bridge exports otherwise than :meth:`pairs` says, found with random values in the place of
        one layer's factors of each kind."""
        built = self._built()
        first = {_kind(task.global_base_prefix): task.global_base_prefix for task in reversed(built)}
        chosen = [task for task in built if first[_kind(task.global_base_prefix)] == task.global_base_prefix]
        factors = [
            _with_probe(t, self._device)
            for task in chosen
            for t in (task.linear_in_task, task.linear_out_task)
        ]
        probes = {t.global_param_name: t for t in factors if t.param_weight is not None}
        held: list[tuple[str, Fragment]] = []

        def place() -> None:
            own = [probes.get(t.global_param_name, t) for t in self._tasks]
            for task in tasks:
                prefix = task.global_param_name.partition(WRAPPED)[0]
                if task.param_weight is None or not is_adapted(task) or prefix not in first.values():
                    continue
                with suppress(Refused):
                    held.extend((prefix, f) for pair in self.pairs(task) for f in self.fragments(pair, own))

        on_all_ranks("the placing of an adapter", place)
        exported = dict(self._streamed(_knowing(self._bridge, _with_factors(chosen, factors))))
        wrong = {
            _kind(prefix)
            for prefix, part in held
            if (whole := exported.get(part.name)) is None
            or tuple(whole.shape) != part.full_shape
            or not part.part_of(whole).equal(part.view)
        }
        everywhere: list[set[str]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, wrong)
        return set().union(*everywhere)

    def _factors_of(self, number: int) -> tuple[Any, Any]:
        return self._tasks[2 * number], self._tasks[2 * number + 1]


def _kind(prefix: str) -> str:
    """What layers of a model that differ in their numbers have in common."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", prefix)


def _with_factors(tasks: Sequence[Any], factors: Sequence[Any]) -> dict[str, list[Any]]:
    """Bridge's tasks of adapters by their layers, with other tasks of their factors, two of each."""
    found: dict[str, list[Any]] = defaultdict(list)
    for task, a, b in zip(tasks, factors[::2], factors[1::2], strict=True):
        found[task.global_base_prefix].append(dataclasses.replace(task, linear_in_task=a, linear_out_task=b))
    return found


def _with_probe(task: Any, device: torch.device) -> Any:
    weight, mapping = task.param_weight, task.mapping
    if weight is None:
        return task
    # Alike on ranks that hold the same part: Bridge exports only one of them.
    place = (mapping.tp_rank, mapping.ep_rank if mapping.is_expert else 0, task.global_param_name)
    generator = torch.Generator(device).manual_seed(zlib.crc32(repr(place).encode()))
    values = torch.randint(-100, 100, weight.shape, dtype=torch.int8, device=device, generator=generator)
    return dataclasses.replace(task, param_weight=parameter_like(weight, values.to(weight.dtype)))


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


def _adapters_of(wrapper: Any) -> list[Any]:
    held = wrapper.adapter
    return list(held.values()) if isinstance(held, torch.nn.ModuleDict) else [held]


def _require_plain(model: list[Any], alone: bool) -> None:
    own = dict.fromkeys(problem for chunk in model for problem in _problems(chunk))
    trained = [
        name
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad and ".adapter." not in name
    ]
    if alone and trained:
        shown = ", ".join(trained[:5])
        own[f"{len(trained)} trained parameters are no factors, and would not travel: {shown}"] = None
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, list(own))
    problems = dict.fromkeys(problem for found in everywhere for problem in found)
    if problems:
        raise RefitError(
            "the model's adapters can't be refitted; the engine would compute something else than the trainer. Nothing was sent. "
            "Train Bridge's LoRA or CanonicalLoRA on Megatron's linear layers:\n  " + "\n  ".join(problems),
            stage="prepare",
        )


def _problems(chunk: Any) -> Iterator[str]:
    from megatron.bridge.peft.lora_layers import LinearAdapter

    for path, module in chunk.named_modules():
        if isinstance(module, LinearAdapter):
            yield f"{path}: Bridge has no names for the factors of torch's own linear layers"
    for wrapper in _wrappers(chunk):
        kind = type(wrapper).__name__
        if kind not in _WRAPPERS:
            yield f"{kind} is no plain LoRA"
            continue
        for adapter in _adapters_of(wrapper):
            yield from _problems_of(adapter)


def _problems_of(adapter: Any) -> Iterator[str]:
    if type(adapter).__name__ not in _ADAPTERS:
        yield f"{type(adapter).__name__} is no plain LoRA"
        return
    config = adapter.config
    if not isinstance(adapter.activation, torch.nn.Identity):
        yield f"{adapter.base_linear_name}: there is an activation between its factors"
    if adapter.is_expert and (config.expert_tensor_parallel_size or 1) > 1:
        yield (
            f"{adapter.base_linear_name}: under expert tensor parallelism Bridge cuts gate and up of experts' adapters in the wrong "
            "place as it exports them; give expert_tensor_parallel_size=1"
        )
    if ".local_experts." in adapter.base_linear_name and config.expert_model_parallel_size > 1:
        yield (
            f"{adapter.base_linear_name}: Bridge counts the adapters of experts in modules of their own on each rank from 0; give "
            "moe_grouped_gemm=True or expert_model_parallel_size=1"
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
