"""A Megatron rank as the source of a LoRA adapter alone: its factors, under the names of an adapter's checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from ....integration.errors import RefitError
from ....integration.layout import Fragment
from ....integration.weights.endpoints import StorageLook, Writes, rank_device, writes_of
from ....integration.weights.manifest import TensorSpec
from ...lora import PREFIX, SETTINGS_NAME
from ..trained import noted_formats, require_no_adapters
from .adapters import Adapters, has_adapters, is_adapted
from .enumeration import conversion_tasks
from .rules import Refused


class AdapterSource:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightSource` for the adapters that Bridge put into a model.

    The factors go shard to shard where the engine can take them so, those of a fused layer under the name of each weight in it; the
    settings (ranks and scalings) go over the misc path, so that an engine can't serve the factors with others. The base
    weights do not travel: the engine has them.

    Args:
        bridge: ``AutoBridge`` of the Hugging Face checkpoint.
        model: Megatron model chunks of this rank.

    Building it is a collective of all trainer ranks; nothing else is, but ``export``.

    Raises:
        RefitError: on all ranks: there is no adapter, or more than plain LoRA, or something else is trained; lists all reasons.
        RefitMismatch: the base is trained quantized.
    """

    def __init__(self, bridge: Any, model: list[Any]):
        tasks = conversion_tasks(bridge, model)
        if not has_adapters(tasks):
            raise RefitError(
                "policy.refit.lora is adapter, but the model has no adapter; nothing would reach the engine. Nothing was sent. "
                "Put one into it (megatron.bridge.peft), or set it to merge",
                stage="prepare",
            )
        require_no_adapters(noted_formats(("", module) for module in model[0].modules()))
        self._adapters = Adapters(bridge, model, tasks, self.device, alone=True)
        exports = self._adapters.exports()
        self._text = self._adapters.settings(exports).to_tensor()
        self._names = [[f"{PREFIX}{spec.name}" for spec in found] for found in exports]
        self._specs = [
            TensorSpec(SETTINGS_NAME, tuple(self._text.shape), self._text.dtype),
            *(spec._replace(name=f"{PREFIX}{spec.name}") for found in exports for spec in found),
        ]
        self._tasks = [task for task in tasks if is_adapted(task) and task.param_weight is not None]
        self._chosen: tuple[frozenset[str], list[int]] = frozenset(), []
        self._look = StorageLook()

    @property
    def device(self) -> torch.device:
        return rank_device()

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held: list[Fragment] = []
        refused = {SETTINGS_NAME: "settings of the adapter, which the engine checks"}
        exported = {spec.name: (spec.shape, spec.dtype) for spec in self._specs}
        factors = self._adapters.resident()
        for task in self._tasks:
            try:
                pairs = self._adapters.pairs(task)
            except Refused as reason:
                for number in self._adapters.numbers_under(task):
                    refused |= dict.fromkeys(self._names[number], str(reason))
                continue
            for part in (part for pair in pairs for part in self._adapters.fragments(pair, factors)):
                part = dataclasses.replace(part, name=f"{PREFIX}{part.name}")
                if exported.get(part.name) == (part.full_shape, part.view.dtype):
                    held.append(part)
                else:
                    refused[part.name] = "LoRA: Bridge exports this factor in another shape or dtype"
        return held, refused

    def prepare(self) -> None:
        self._adapters.finish_gathers()
        self._adapters.require_same()

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = frozenset(names)
        if wanted != self._chosen[0]:
            # Kept: every refit asks for the same ones.
            self._chosen = wanted, [i for i, found in enumerate(self._names) if wanted.intersection(found)]
        if SETTINGS_NAME in wanted:
            yield SETTINGS_NAME, self._text.to(self.device)
        for name, weight in self._adapters.export(self._chosen[1]):
            if (full := f"{PREFIX}{name}") in wanted:
                yield full, weight.detach()

    def storage_key(self) -> Hashable:
        self._adapters.follow()
        return self._look.key(weight for _, weight in self._adapters.parameters()), self._adapters.residence()

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`; what Megatron's optimizer writes, it does not count."""
        self._adapters.follow()
        return writes_of(self._adapters.parameters())
