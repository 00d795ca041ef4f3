"""A Megatron rank as a weight source: fragments of its parameters, and Bridge's export for the rest."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....integration.layout import Fragment
from ....integration.quantize.formats import Format
from ....integration.weights.endpoints import StorageLook, Writes, rank_device, writes_of
from ....integration.weights.manifest import TensorSpec
from ..offload import Residence
from ..trained import noted_formats, require_no_adapters
from .adapters import Adapters, has_adapters, is_adapted
from .enumeration import VOCABULARY, Enumeration, conversion_tasks, enumerate_export, names_of
from .merging import MergedWeights
from .native_fp8 import as_codes, is_native, native_blocks, native_storage_key, with_scales
from .places import Places
from .rules import Refused, fragments_of_task
from .self_check import changes_converted_weights, disproved_tasks


@dataclass(frozen=True)
class Survey:
    """What is known of Bridge's export of a model.

    Attributes:
        enumeration: names and shapes, and the tasks that yield them.
        disproved: tasks whose shard rule the installed Bridge does not follow, with the reason.
    """

    enumeration: Enumeration
    disproved: Mapping[int, str]


def _survey(bridge: Any, model: list[Any]) -> Survey:
    """Ask Bridge; a collective of all trainer ranks. See :func:`.enumerate_export` and :func:`.disproved_tasks`."""
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_group()
    enumeration = enumerate_export(bridge, model, stages)
    return Survey(enumeration, disproved_tasks(bridge, model, enumeration))


class MegatronSource:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightSource` for a Megatron model under Bridge.

    Args:
        bridge: ``AutoBridge`` made from the Hugging Face checkpoint.
        model: model chunks of this rank, as ``provide_distributed_model`` returns them.
        known: of Bridge's export; None asks it, with all trainer ranks.

    Building it is a collective of all trainer ranks (names and shapes of other pipeline stages are
    exchanged, and each rule is tried on the installed Bridge); nothing else is, but ``export``, and under adapters ``prepare``,
    which gathers their factors. Adapters of Bridge's LoRA are merged on the way, as :mod:`.merging` says.

    Raises:
        RefitError: adapters that can't be merged; lists all reasons.
        RefitMismatch: adapters over weights that are trained quantized.
    """

    def __init__(self, bridge: Any, model: list[Any], known: Survey | None = None):
        self._bridge = bridge
        self._model = model
        self._residence = Residence(model, self.device)
        known = known or _survey(bridge, model)
        self._enumeration, self._disproved = known.enumeration, known.disproved
        self._tasks = conversion_tasks(bridge, model)
        self._places = Places(model, self._tasks)
        self._adapters: Adapters | None = None
        self._merged: MergedWeights | None = None
        if has_adapters(self._tasks):
            tasks = zip(self._tasks, self._enumeration.task_names, strict=True)
            require_no_adapters(
                self.trained_formats, {name for task, names in tasks if is_adapted(task) for name in names}
            )
            self._adapters = Adapters(bridge, model, self._tasks, self.device)
            self._merged = MergedWeights(self._adapters, self._tasks, self.device)
        self._chosen: tuple[frozenset[str], list[Any]] = frozenset(), []
        self._look = StorageLook()
        self._vocabulary = _padded_vocabulary(self._enumeration, self._tasks, bridge.hf_pretrained.config)
        self._specs = [
            spec._replace(shape=(self._vocabulary[spec.name], *spec.shape[1:]))
            if spec.name in self._vocabulary
            else spec
            for spec in self._enumeration.specs
        ]
        self._exported = {spec.name: spec for spec in self._specs}
        self._shapes = {spec.name: spec.shape for spec in self._specs}

    @property
    def device(self) -> torch.device:
        return rank_device()

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held: list[Fragment] = []
        refused: dict[str, str] = {}
        self._follow_parameters()
        tasks = self._residence.tasks(self._tasks)
        for index, (task, names) in enumerate(zip(tasks, self._enumeration.task_names, strict=True)):
            if task.param_weight is None:
                continue
            try:
                if self._merged is not None:
                    task = self._merged.of(index, task)
                fragments = [self._without_padding(f) for f in fragments_of_task(task, self._shapes)]
                if index in self._disproved:
                    raise Refused(self._disproved[index])
                self._check(fragments, task)
                held.extend(fragments)
                refused.update(_made_of_others(task, names))
            except Refused as reason:
                refused.update(dict.fromkeys(names, str(reason)))
        return held, refused

    def quantized_fragments(
        self, formats: Mapping[str, Format]
    ) -> tuple[list[Fragment], dict[str, str], frozenset[str]]:
        """As :meth:`rlrefit.integration.weights.endpoints.HoldsQuantized.quantized_fragments`: Transformer Engine's FP8 blocks."""
        held: list[Fragment] = []
        refused: dict[str, str] = {}
        native: set[str] = set()
        for index, (task, names) in enumerate(zip(self._tasks, self._enumeration.task_names, strict=True)):
            if not is_native(task.param_weight) or not all(name in formats for name in names):
                continue
            native.update(names)
            try:
                if is_adapted(task):
                    raise Refused("LoRA: Bridge merges the adapter on export")
                if index in self._disproved:
                    raise Refused(self._disproved[index])
                found = native_blocks(task.param_weight)
                fragments = fragments_of_task(as_codes(task, found), self._shapes)
                self._check_place(fragments)
                self._check_conversion_hook(fragments, task)
                held += [part for f in fragments for part in with_scales(f, found, formats[f.name])]
            except Refused as reason:
                refused.update(dict.fromkeys(names, str(reason)))
        return held, refused, frozenset(native)

    def prepare(self) -> None:
        if self._merged is None:
            self._finish_parameters()
        else:
            self._merged.refresh(self._resident)

    @property
    def prepares_alone(self) -> bool:
        """Unless factors of adapters have to be gathered, or what the optimizer left to the next forward pass; a subclass with a
        ``prepare`` of its own says so itself."""
        gathers = self._merged is not None or self._residence.delays_gathers
        return not gathers and type(self).prepare is MegatronSource.prepare

    @property
    def trained_formats(self) -> Mapping[str, Format]:
        """As :attr:`rlrefit.integration.weights.endpoints.TellsFormats.trained_formats`, of a model that :mod:`..qat` quantizes."""
        # The names are those of the checkpoint, whatever is around the chunk.
        return noted_formats(("", module) for module in self._model[0].modules())

    @property
    def sent_formats(self) -> Mapping[str, Format]:
        return {}

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = frozenset(names)
        if wanted != self._chosen[0]:
            # Kept: every refit asks for the same ones, and must not walk through thousands of tasks.
            self._chosen = wanted, [self._tasks[i] for i in self._enumeration.tasks_for(wanted)]
        tasks = self._residence.on_device(self._chosen[1])
        if self._adapters is None:
            # Bridge would look for adapters in every module of the model: 70 ms for Qwen3-30B-A3B at EP2.
            exported = self._bridge.export_hf_weights(
                self._model,
                cpu=False,
                show_progress=False,
                conversion_tasks=tasks,
                merge_adapter_weights=False,
            )
        else:
            exported = self._adapters.merged_export(tasks)
        for name, weight in exported:
            if name in wanted:
                rows = self._vocabulary.get(name)
                yield name, weight.detach() if rows is None else weight.detach()[:rows]

    def storage_key(self) -> Hashable:
        self._follow_parameters()
        owned = [task.param_weight for task in self._tasks if task.param_weight is not None]
        native = [weight for weight in owned if is_native(weight)]
        plain = [weight for weight in owned if not is_native(weight)] if native else owned
        if self._merged is not None:
            plain = [*plain, *self._merged.copies]
        return self._look.key(plain), native_storage_key(native), self._residence.key()

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`; what Megatron's optimizer writes, it does not count."""
        self._follow_parameters()
        owned = [(task.global_param_name, task.param_weight) for task in self._tasks]
        if self._adapters is not None:
            self._adapters.follow()
            owned += self._adapters.parameters()
        return writes_of((name, w) for name, w in owned if w is not None and not is_native(w))

    def _finish_parameters(self) -> None:
        self._residence.finish_gathers()
        # Where all weights are exported, nobody asks for the storage key.
        self._follow_parameters()

    def _resident(self) -> list[Any]:
        """The tasks, finished, with the parameters where they are now."""
        self._finish_parameters()
        found: list[Any] = self._residence.tasks(self._tasks)
        return found

    def _follow_parameters(self) -> None:
        if self._places.follow(self._tasks):
            # Chosen of the tasks as they were.
            self._chosen = frozenset(), []

    def _without_padding(self, fragment: Fragment) -> Fragment:
        rows = self._vocabulary.get(fragment.name)
        if rows is None:
            return fragment
        start, stop = fragment.box[0]
        kept = max(0, min(stop, rows) - start)
        box = ((start, start + kept), *fragment.box[1:]) if kept else ((0, 0), *fragment.box[1:])
        return Fragment(fragment.name, (rows, *fragment.full_shape[1:]), box, fragment.view[:kept])

    def _check(self, fragments: list[Fragment], task: Any) -> None:
        """A rule and the export must speak of the same weights, or the rule is wrong for this model."""
        self._check_place(fragments)
        for fragment in fragments:
            exported = self._exported[fragment.name]
            if exported.dtype != fragment.view.dtype:
                raise Refused(f"stored as {fragment.view.dtype}, which Bridge exports as {exported.dtype}")
        self._check_conversion_hook(fragments, task)

    def _check_place(self, fragments: list[Fragment]) -> None:
        for fragment in fragments:
            exported = self._exported.get(fragment.name)
            if exported is None:
                raise Refused(f"its rule names {fragment.name}, which Bridge does not export")
            if exported.shape != fragment.full_shape:
                raise Refused(
                    f"its rule gives shape {list(fragment.full_shape)}, Bridge exports {list(exported.shape)}"
                )

    def _check_conversion_hook(self, fragments: list[Fragment], task: Any) -> None:
        if not changes_converted_weights(self._bridge):
            return
        bridge = self._bridge._model_bridge
        # The hook is asked with tensors that it can only pass through or replace.
        probes = {f.name: torch.empty(f.full_shape, dtype=f.view.dtype, device="meta") for f in fragments}
        result = bridge.maybe_modify_converted_hf_weight(task, dict(probes), self._bridge.hf_pretrained.state)
        for name, probe in probes.items():
            if result.get(name) is not probe:
                raise Refused(f"{type(bridge).__name__} changes the converted weight")


def _made_of_others(task: Any, names: Sequence[str]) -> dict[str, str]:
    """Weights that the export of a task yields and its mapping doesn't name, with the reason to refuse them.

    They are copies (of a tied embedding, of the embedding beside a prediction layer) or tensors of the checkpoint.
    """
    own = {_of_any_expert(name) for name in names_of(task)}
    return {
        name: f"made of {' and '.join(sorted(own))} by Bridge's export, and no part of {task.global_param_name}"
        for name in names
        if _of_any_expert(name) not in own
    }


def _of_any_expert(name: str) -> str:
    return re.sub(r"experts\.\d+", "experts.*", name)


def _padded_vocabulary(enumeration: Enumeration, tasks: list[Any], hf_config: Any) -> dict[str, int]:
    """Weights that Bridge exports with Megatron's padding of the vocabulary, and the rows that are the model's.

    Bridge does not trim it; an engine would refuse the shape or serve tokens that do not exist.
    """
    rows = getattr(hf_config.get_text_config(), "vocab_size", None)
    exported = {spec.name: spec.shape for spec in enumeration.specs}
    return {
        name: rows
        for task, names in zip(tasks, enumeration.task_names, strict=True)
        if task.global_param_name.endswith(VOCABULARY)
        for name in names
        if rows is not None and exported[name][0] > rows
    }
