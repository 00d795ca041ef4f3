"""An FSDP2 rank as the source of a LoRA adapter alone: its factors, under the names of an adapter's checkpoint."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from ....integration.errors import RefitError
from ....integration.layout import Fragment
from ....integration.weights.endpoints import StorageLook, Writes, rank_device
from ....integration.weights.manifest import TensorSpec
from ...lora import PREFIX, SETTINGS_NAME, AdapterSettings, changes_base
from ..trained import noted_formats, require_no_adapters
from .adapters import Adapters, LoraTarget, base_model, has_adapters
from .casting import exported
from .checkpoint import unwrapped_modules
from .parameters import KeptTensors, require_known


class AdapterSource:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightSource` for the active adapter of a model under peft.

    The factors go shard to shard where the engine can take them so; the settings (ranks and scalings) go over the misc
    path, so that an engine can't serve the factors with others. The base weights do not travel: the engine has them.

    Args:
        model: a ``PeftModel``, or a transformers model with an adapter, under ``fully_shard`` or not.
        dtype: of the export; None exports the factors as they are kept.

    Raises:
        RefitError: not exactly one adapter is active, or it is more than plain LoRA; lists all reasons.
        RefitMismatch: the base is trained quantized.

    Nothing is a collective but ``export``.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None = None):
        whole, model = model, base_model(model)
        require_known(model, whole)
        if not has_adapters(model):
            raise RefitError(
                f"policy.refit.lora is adapter, but {type(model).__name__} has no adapter; nothing would reach the "
                "engine. Nothing was sent. Put one into it (peft.get_peft_model), or set it to merge",
                stage="prepare",
            )
        require_no_adapters(noted_formats(unwrapped_modules(model)))
        adapters = Adapters(model)
        self._targets = adapters.targets
        self._adapter = _only_adapter(model, adapters)
        self._settings = self._now()
        self._text = self._settings.to_tensor()
        self._kept = KeptTensors(model, whole, self._names().get)
        self._look = StorageLook()
        self._dtypes = {name: dtype or self._kept[name].dtype for name in self._kept.names}
        self._specs = [
            TensorSpec(SETTINGS_NAME, tuple(self._text.shape), self._text.dtype),
            *(
                TensorSpec(name, tuple(self._kept[name].shape), self._dtypes[name])
                for name in self._kept.names
            ),
        ]

    @property
    def device(self) -> torch.device:
        return rank_device()

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held: list[Fragment] = []
        refused = {SETTINGS_NAME: "settings of the adapter, which the engine checks"}
        for name in self._kept.names:
            found = self._kept.held(name, self._kept.local(name))
            if isinstance(found, str):
                refused[name] = found
            else:
                held.extend(exported(fragment, self._dtypes[name]) for fragment in found)
        return held, refused

    def prepare(self) -> None:
        self._kept.require_same_places()
        if self._now() != self._settings:
            raise RefitError(
                f"the adapter {self._adapter!r} has another rank, scaling or set of layers than when the refit was "
                "prepared; the engine would serve it with the old ones. Nothing was sent. Prepare the refit again, with "
                "a new source",
                stage="export",
            )

    @property
    def prepares_alone(self) -> bool:
        """Always: nothing is gathered before the export."""
        return True

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = frozenset(names)
        for name, _, dtype in self._specs:
            if name not in wanted:
                continue
            if name == SETTINGS_NAME:
                yield name, self._text.to(self.device)
            else:
                yield name, self._kept.whole(name, self.device).to(dtype)

    def storage_key(self) -> Hashable:
        return self._look.key(self._kept.locals())

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`."""
        return self._kept.writes()

    def _names(self) -> dict[str, str]:
        """The name in an adapter's checkpoint by that in the base model's state dict."""
        names = {}
        for target in self._ours():
            factors = target.factors[self._adapter]
            for factor in (factors.a, factors.b):
                holder, _, rest = factor.removeprefix(f"{target.path}.").partition(".")
                names[factor] = f"{PREFIX}{target.path}.{holder}{rest.removeprefix(self._adapter)}"
        return names

    def _ours(self) -> list[LoraTarget]:
        return [target for target in self._targets.values() if self._adapter in target.factors]

    def _now(self) -> AdapterSettings:
        """Settings of the layers that compute with the adapter at the moment."""
        active = [target for target in self._ours() if target.applied() == [self._adapter]]
        return AdapterSettings(
            {target.path: int(target.layer.r[self._adapter]) for target in active},
            {target.path: float(target.layer.scaling[self._adapter]) for target in active},
        )


def _only_adapter(model: Any, adapters: Adapters) -> str:
    """The adapter that the layers compute with, if that is all that the model has beside its base."""
    problems = []
    used: dict[str, None] = {}
    for target in adapters.targets.values():
        used |= dict.fromkeys(target.applied())
        if target.layer.merged_adapters:
            problems.append(f"{', '.join(target.layer.merged_adapters)} merged into {target.name}")
    trained = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and adapters.factor_name(name) is None
    ]
    if trained:
        shown = ", ".join(trained[:5])
        problems.append(f"{len(trained)} trained parameters that are no factors: {shown}")
    if len(used) != 1:
        problems.append(f"{len(used)} active adapters{': ' if used else ''}{', '.join(used)}")
    made = {name: model.peft_config[name].init_lora_weights for name in used}
    problems += [
        f"base weights that peft wrote as it made {name} (init_lora_weights={init!r})"
        for name, init in made.items()
        if changes_base(init)
    ]
    if problems:
        raise RefitError(
            "policy.refit.lora=adapter sends the factors of one adapter, to an engine that holds the base model as it was "
            "loaded; it would compute something else than the trainer. Nothing was sent. Unmerge, leave one adapter "
            "active and train nothing else, or set it to merge:\n  " + "\n  ".join(problems),
            stage="prepare",
        )
    return next(iter(used))
