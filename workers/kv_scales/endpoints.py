"""The scales of an engine's FP8 KV cache as a part of a refit: their names, a trainer rank that sends them, an engine rank that
sets them.

Names are those of Hugging Face checkpoints with an FP8 KV cache, ``model.layers.3.self_attn.k_scale``, ``….v_scale`` and
``….q_scale``, which vLLM's ``maybe_remap_kv_scale_name`` knows. A layer is spoken of by what stands before them. Scales are tensors
without dimensions that stand behind the weights and take the misc path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from ...integration.errors import RefitError, RefitMismatch
from ...integration.layout import Fragment
from ...integration.quantize.formats import Format
from ...integration.weights.endpoints import (
    HoldsQuantized,
    Look,
    StoresQuantized,
    WeightDestination,
    WeightSource,
    Writes,
    gives_memory_back,
    prepare_ahead,
    prepares_alone,
    rewritten,
    sent_formats,
    trained_formats,
    working_on_portions,
    writes_by,
)
from ...integration.weights.manifest import TensorSpec

# model.layers.3.self_attn
AttentionLayer = str

_PROJECTION = re.compile(r"^(.*\blayers\.\d+\.(?:self_attn|mixer))\.(?:k_proj|qkv_proj)\.weight$")
# Some write the module that vLLM makes of it (NeMo-RL does for queries).
_SCALE = re.compile(r"^(.*\blayers\.\d+\.(?:self_attn|mixer))\.(?:attn\.)?([qkv]_scale)$")
_REASON = "scale of the FP8 KV cache, set on the engine's attention layers"


class Scales(NamedTuple):
    """One layer's scales, by which its keys, values and queries are divided before they become FP8.

    ``q`` is NaN where queries were not calibrated.
    """

    k: float
    v: float
    q: float


def layer_of_weight(name: str) -> AttentionLayer | None:
    """The attention layer whose keys the checkpoint weight ``name`` projects; None for any other weight."""
    found = _PROJECTION.match(name)
    return found[1] if found else None


def _attention_layers(specs: Iterable[TensorSpec]) -> list[AttentionLayer]:
    """The attention layers of a model, in the order of its weights."""
    found = (layer_of_weight(spec.name) for spec in specs)
    return list(dict.fromkeys(layer for layer in found if layer))


def scale_names(layer: AttentionLayer) -> tuple[str, str, str]:
    """The names of a layer's scales, in the order of :class:`Scales`."""
    return f"{layer}.k_scale", f"{layer}.v_scale", f"{layer}.q_scale"


def scale_specs(layers: Iterable[AttentionLayer]) -> list[TensorSpec]:
    """The scales as tensors of the refit: float32, without dimensions."""
    return [TensorSpec(name, (), torch.float32) for layer in layers for name in scale_names(layer)]


def _canonical(name: str) -> str | None:
    """The name of a scale as :func:`scale_names` has it; None for what names no scale."""
    found = _SCALE.match(name)
    return f"{found[1]}.{found[2]}" if found else None


def _layer_of_scale(name: str) -> AttentionLayer:
    """The layer of a scale by its canonical name."""
    return name.rpartition(".")[0]


def is_scale(spec: TensorSpec) -> bool:
    """Whether a tensor of the refit is one of :func:`scale_specs`."""
    return not spec.shape and _canonical(spec.name) == spec.name


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
        self.layers: list[AttentionLayer] = _attention_layers(specs)
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
        named = [(_canonical(name), name, value) for name, value in scales.items()]
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
        return held, {**refused, **dict.fromkeys(self._values, _REASON)}

    def quantized_fragments(
        self, formats: Mapping[str, Format]
    ) -> tuple[list[Fragment], dict[str, str], frozenset[str]]:
        """As :meth:`rlrefit.integration.weights.endpoints.HoldsQuantized.quantized_fragments`; nothing if the trainer's keep none."""
        weights: object = self._weights
        if isinstance(weights, HoldsQuantized):
            return weights.quantized_fragments(formats)
        return [], {}, frozenset()

    def prepare(self) -> None:
        self._weights.prepare()

    def prepare_ahead(self, encoded: frozenset[str]) -> Look | None:
        """As :meth:`rlrefit.integration.weights.endpoints.PreparesAhead.prepare_ahead`."""
        return prepare_ahead(self._weights, encoded)

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        weights = [name for name in names if name not in self._values]
        if weights:
            yield from self._weights.export(weights)
        scales = [name for name in names if name in self._values]
        yield from ((name, self._on_device[self._positions[name]]) for name in scales)

    def storage_key(self) -> Hashable:
        return self._weights.storage_key()

    @property
    def gives_memory_back(self) -> bool | None:
        return gives_memory_back(self._weights)

    @property
    def prepares_alone(self) -> bool:
        return prepares_alone(self._weights)

    @property
    def trained_formats(self) -> Mapping[str, Format]:
        return trained_formats(self._weights)

    @property
    def sent_formats(self) -> Mapping[str, Format]:
        return sent_formats(self._weights)

    def writes(self) -> Writes:
        """As :meth:`rlrefit.integration.weights.endpoints.CountsWrites.writes`; of nothing if the trainer's own does not count."""
        return writes_by(self._weights)

    def _copied(self) -> torch.Tensor:
        # Not in the middle of a refit, where the copy would wait for what the device does for others.
        return torch.tensor(list(self._values.values()), dtype=torch.float32, device=self.device)


def _is_scale(value: float) -> bool:
    # As it travels: a float64 may be finite and above 0 where its float32 is not.
    found = torch.tensor(value, dtype=torch.float32).item()
    return math.isfinite(found) and found > 0


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


class ScaledCache(Protocol):
    """What an engine with an FP8 KV cache offers."""

    def claim(self, layers: Sequence[AttentionLayer]) -> tuple[list[AttentionLayer], list[str]]:
        """Those of the trainer's ``layers`` that this rank has, and its own names of layers that none of them is."""

    def set(self, scales: Mapping[AttentionLayer, Scales]) -> None:
        """Have the layers use the scales from the next step on; NaN leaves what is there. In place."""


class KvScaleDestination:
    """Implements :class:`rlrefit.integration.weights.endpoints.WeightDestination`: another one, and its KV cache's scales.

    Scales are set at the end of each refit, the last known ones too: what reloads layers resets them.

    Args:
        weights: where the weights go.
        cache: where the scales go.
    """

    def __init__(self, weights: WeightDestination, cache: ScaledCache) -> None:
        self._weights = weights
        self._cache = cache
        self._layers: list[AttentionLayer] = []
        self._arrived: dict[str, torch.Tensor] = {}
        self._held: dict[str, float] = {}

    @property
    def device(self) -> torch.device:
        return self._weights.device

    @property
    def kept_bytes(self) -> int:
        return self._weights.kept_bytes

    @property
    def gives_memory_back(self) -> bool | None:
        return gives_memory_back(self._weights)

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        return rewritten(self._weights, specs)

    @property
    def works_on_portions(self) -> bool:
        return working_on_portions(self._weights) is not None

    def expect(self, portions: Mapping[str, int]) -> None:
        if (weights := working_on_portions(self._weights)) is not None:
            weights.expect(portions)

    def landed(self, portion: int) -> None:
        if (weights := working_on_portions(self._weights)) is not None:
            weights.landed(portion)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        if not isinstance(self._weights, StoresQuantized):
            return {}
        return self._weights.quantized([spec for spec in specs if not is_scale(spec)])

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        scales = [spec.name for spec in specs if is_scale(spec)]
        layers = list(dict.fromkeys(map(_layer_of_scale, scales)))
        self._layers, left_out = self._cache.claim(layers)
        if left_out:
            raise RefitMismatch(
                f"the trainer has no scales for {', '.join(left_out)} of this engine's FP8 KV cache, which would go on with "
                "others than the trainer calibrates. Nothing has moved. Does the trainer train the model that is served? "
                "Else set policy.refit.kv_scales=false",
                stage="handshake",
                parameter=left_out[0],
            )
        held, refused = self._weights.fragments([spec for spec in specs if not is_scale(spec)])
        return held, {**refused, **dict.fromkeys(self._names(), _REASON)}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = set(self._names())
        rest = self._without_scales(weights, own)
        first = next(rest, None)
        # Engines load lists that end; an empty one may be none.
        if first is not None:
            self._weights.load_weights(chain((first,), rest))

    def finish(self, version: int) -> None:
        self._weights.finish(version)
        names, tensors = list(self._arrived), list(self._arrived.values())
        self._arrived = {}
        if tensors:
            # The one wait for the device, now that nothing on it waits for a peer.
            values = torch.stack(tensors).tolist()
            self._held.update((n, v) for n, v in zip(names, values, strict=True) if not math.isnan(v))
        known = {layer: Scales(*map(self._value, scale_names(layer))) for layer in self._layers}
        self._cache.set({layer: scales for layer, scales in known.items() if not math.isnan(scales.k)})

    def abandon(self) -> None:
        self._arrived = {}
        self._weights.abandon()

    def storage_key(self) -> Hashable:
        return self._weights.storage_key()

    def _names(self) -> list[str]:
        return [name for layer in self._layers for name in scale_names(layer)]

    def _value(self, name: str) -> float:
        return self._held.get(name, math.nan)

    def _without_scales(
        self, weights: Iterable[tuple[str, torch.Tensor]], own: Collection[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name in own:
                self._arrived[name] = tensor
            elif not is_scale(TensorSpec(name, tuple(tensor.shape), tensor.dtype)):
                yield name, tensor
