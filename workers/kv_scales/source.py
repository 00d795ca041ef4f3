"""A trainer rank whose weights are joined by the scales of the engine's FP8 KV cache."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import torch

from ...integration.errors import RefitError
from ...integration.layout import Fragment
from ...integration.quantize.formats import Format
from ...integration.weights.endpoints import HoldsQuantized, WeightSource
from ...integration.weights.manifest import TensorSpec
from .names import AttentionLayer, attention_layers, canonical, scale_specs

REASON = "scale of the FP8 KV cache, set on the engine's attention layers"


class KvScaleSource:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightSource`: another source, and a scalar for each scale.

    The scales stand behind the weights and take the misc path. They travel with every refit, since its layout is
    agreed on once: those that were given last, and NaN, which engines skip, where none was given yet. So an engine that
    joins later gets them too.

    Args:
        weights: the trainer's own.

    Raises:
        RefitError: none of the weights is of an attention layer whose keys and values are cached.
    """

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        specs = weights.specs()
        self.layers: list[AttentionLayer] = attention_layers(specs)
        if not self.layers:
            raise RefitError(
                "policy.refit.kv_scales is true, but the model exports no layers.N.self_attn.k_proj or qkv_proj: there are no "
                "keys to calibrate (multi-head latent attention caches something else). Set policy.refit.kv_scales=false",
                stage="settings",
            )
        added = scale_specs(self.layers)
        self._specs = [*specs, *added]
        self._values = {spec.name: math.nan for spec in added}
        self._positions = {spec.name: i for i, spec in enumerate(added)}
        self._on_device = self._copied()

    def give(self, scales: Mapping[str, float], wanted: Collection[str] = ()) -> None:
        """Have the refits from the next one on bring ``scales``.

        Args:
            scales: name to scale, with ``k_scale`` and ``v_scale`` of every layer, and ``q_scale`` of every layer or of
                none. vLLM's form of a name (``….self_attn.attn.q_scale``) is understood.
            wanted: the scales that engines take; those of other layers may be missing. Empty for all.

        Raises:
            RefitError: names that are no scales of this model, that are missing, or whose value is no scale; names
                all of them. The scales are then what they were.
        """
        named = [(canonical(name), name, value) for name, value in scales.items()]
        problems = []
        unknown = [given for name, given, _ in named if name not in self._values]
        if unknown:
            problems.append(f"{', '.join(unknown)} {_are(unknown)} of no attention layer of the model")
        bad = [given for _, given, value in named if not _is_scale(value)]
        if bad:
            problems.append(f"{', '.join(bad)} {_are(bad)} not above 0 and finite in float32")
        present = {name: value for name, _, value in named if name in self._values}
        asked = [name for name in self._values if not wanted or name in wanted]
        any_query = any(name.endswith(".q_scale") for name in present)
        missing = [
            name for name in asked if name not in present and (any_query or not name.endswith(".q_scale"))
        ]
        if missing:
            problems.append(f"{', '.join(missing)} {_are(missing)} missing")
        if problems:
            raise RefitError(
                f"kv_scales: {'; '.join(problems)}. Nothing was written; the engine would read keys and values that were "
                "stored with one scale by another. Give what calibrate_kv_scales returned after a forward pass of all layers",
                stage="kv_scales",
                parameter=(unknown + bad + missing)[0],
            )
        self._values.update(present)
        self._on_device = self._copied()

    @property
    def device(self) -> torch.device:
        return self._weights.device

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held, refused = self._weights.fragments()
        return held, {**refused, **dict.fromkeys(self._values, REASON)}

    def quantized_fragments(
        self, formats: Mapping[str, Format]
    ) -> tuple[list[Fragment], dict[str, str], frozenset[str]]:
        """As :meth:`rlrefit.integration.weights.endpoints.HoldsQuantized.quantized_fragments`; nothing if the trainer's keep none."""
        weights: object = self._weights
        if isinstance(weights, HoldsQuantized):
            return weights.quantized_fragments(formats)
        return [], {}, frozenset()

    def settle(self) -> None:
        self._weights.settle()

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        weights = [name for name in names if name not in self._values]
        if weights:
            yield from self._weights.export(weights)
        scales = [name for name in names if name in self._values]
        yield from ((name, self._on_device[self._positions[name]]) for name in scales)

    def storage_key(self) -> Hashable:
        return self._weights.storage_key()

    def _copied(self) -> torch.Tensor:
        # Not in the middle of a refit, where the copy would wait for what the device does for others.
        return torch.tensor(list(self._values.values()), dtype=torch.float32, device=self.device)


def _is_scale(value: float) -> bool:
    # As it travels: a float64 may be finite and above 0 where its float32 is not.
    found = torch.tensor(value, dtype=torch.float32).item()
    return math.isfinite(found) and found > 0


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"
