"""A transformers model under a LoRA adapter as a destination: the adapter's factors alone are written."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch

from ....integration.errors import RefitError, RefitMismatch
from ....integration.layout import Fragment, box_of
from ....integration.weights.endpoints import StorageLook
from ....integration.weights.manifest import TensorSpec
from ...lora import SETTINGS_NAME, AdapterSettings, split_name

_ADAPTER = "refit"


class TransformersAdapterDestination:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightDestination` for an adapter of an unsharded model.

    peft puts the adapter into the model when the trainer's names are known, with the ranks and dtypes that these say.
    It computes nothing until its first refit: peft starts it with zeros.

    Args:
        model: as it was loaded, or with the adapter of an earlier epoch.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        # By the factor's name: what holds its parameter, which may be moved or replaced, and under which key.
        self._places: dict[str, tuple[dict[str, torch.nn.Parameter | None], str]] = {}
        self._ranks: dict[str, int] = {}
        self._look = StorageLook()

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def kept_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in map(self._factor, self._places))

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        factors = {spec.name: spec for spec in specs if spec.name != SETTINGS_NAME}
        others = [name for name in factors if split_name(name) is None]
        if others or len(factors) == len(specs):
            raise RefitError(
                "policy.refit.lora is adapter, but the trainer sends no LoRA adapter"
                f"{f' alone (of {len(others)} weights the first is {others[0]})' if others else ''}. Nothing has moved; "
                "give both sides the same policy.refit",
                stage="handshake",
                parameter=others[0] if others else SETTINGS_NAME,
            )
        self._inject(factors)
        held = [
            Fragment(name, spec.shape, box_of(spec.shape), self._factor(name))
            for name, spec in factors.items()
        ]
        return held, {SETTINGS_NAME: "settings of the adapter, which are checked"}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole factors, and compute with the settings that come.

        Raises:
            RefitMismatch: a factor of another shape than was agreed on, or settings of other layers.
        """
        for name, tensor in weights:
            if name == SETTINGS_NAME:
                self._apply(AdapterSettings.from_tensor(tensor))
                continue
            place = self._factor(name)
            if tensor.shape != place.shape:
                raise RefitMismatch(
                    f"{list(tensor.shape)} came where {list(place.shape)} was agreed on",
                    stage="misc",
                    parameter=name,
                )
            place.copy_(tensor)

    def finish(self, version: int) -> None:
        """Nothing is derived from the factors, and every call of ``generate`` makes its own KV cache."""

    def abandon(self) -> None:
        """The loader keeps no state between factors."""

    def storage_key(self) -> Hashable:
        return self._look.key(map(self._factor, self._places))

    def _factor(self, name: str) -> torch.Tensor:
        held, key = self._places[name]
        parameter = held[key]
        assert parameter is not None, "layers keep their factors"
        return parameter.data

    def _inject(self, factors: dict[str, TensorSpec]) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        ranks: dict[str, int] = {}
        for name, spec in factors.items():
            path, factor = split_name(name) or ("", "")
            if factor == "A":
                ranks[path] = spec.shape[0]
        layers = dict(self._model.named_modules())
        absent = [path for path in ranks if path not in layers]
        if absent:
            raise RefitError(
                f"the engine's model has no layer {absent[0]} ({len(absent)} of the adapter's {len(ranks)} are unknown); "
                "the adapter belongs to another model. Nothing has moved; load the trainer's base model",
                stage="handshake",
                parameter=absent[0],
            )
        present = {path for path, layer in layers.items() if isinstance(layer, LoraLayer)}
        if not present:
            # By their whole paths: a short name would also match layers that the trainer left alone.
            config = LoraConfig(target_modules=list(ranks), r=1, rank_pattern=ranks)
            inject_adapter_in_model(config, self._model, adapter_name=_ADAPTER)
            self._model.requires_grad_(False)
            layers = dict(self._model.named_modules())
        elif present != set(ranks) or ranks != self._of_model(layers, present):
            raise RefitError(
                "the trainer's adapter has other layers or ranks than in the epoch before, whose adapter is in the "
                "engine's model. Nothing has moved; start the engine anew",
                stage="handshake",
            )
        self._ranks = ranks
        for name, spec in factors.items():
            path, factor = split_name(name) or ("", "")
            layer = layers[path]
            if name.endswith(".weight"):
                held, key = getattr(layer, f"lora_{factor}")[_ADAPTER]._parameters, "weight"
            else:
                held, key = getattr(layer, f"lora_embedding_{factor}")._parameters, _ADAPTER
            parameter = held[key]
            if parameter.dtype != spec.dtype:
                parameter.data = parameter.data.to(spec.dtype)
            if tuple(parameter.shape) != spec.shape:
                raise RefitError(
                    f"the trainer exports {list(spec.shape)}, the engine's layer takes {list(parameter.shape)}; the "
                    "adapter belongs to another model. Nothing has moved; load the trainer's base model",
                    stage="handshake",
                    parameter=name,
                )
            self._places[name] = held, key

    def _of_model(self, layers: dict[str, torch.nn.Module], paths: set[str]) -> dict[str, int]:
        return {path: layers[path].r[_ADAPTER] for path in paths}  # type: ignore[index]

    def _apply(self, settings: AdapterSettings) -> None:
        if settings.ranks != self._ranks:
            raise RefitMismatch(
                "the adapter's settings are of other layers or ranks than its factors; the trainer changed the adapter "
                "after the ranks met. Prepare the refit again",
                stage="misc",
                parameter=SETTINGS_NAME,
            )
        for path, scaling in settings.scalings.items():
            self._model.get_submodule(path).scaling[_ADAPTER] = scaling  # type: ignore[index]
