"""An engine rank that takes the scales of its FP8 KV cache out of the misc path."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch

from ...integration.errors import RefitMismatch
from ...integration.layout import Fragment
from ...integration.weights.endpoints import StoresQuantized, WeightDestination, gives_memory_back
from ...integration.weights.manifest import TensorSpec
from .names import AttentionLayer, Scales, is_scale, layer_of_scale, scale_names
from .source import REASON

if TYPE_CHECKING:
    from ...integration.quantize.formats import Format


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
    def gives_memory_back(self) -> bool:
        return gives_memory_back(self._weights)

    def quantized(self, specs: Sequence[TensorSpec]) -> dict[str, Format]:
        if not isinstance(self._weights, StoresQuantized):
            return {}
        return self._weights.quantized([spec for spec in specs if not is_scale(spec)])

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        scales = [spec.name for spec in specs if is_scale(spec)]
        layers = list(dict.fromkeys(map(layer_of_scale, scales)))
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
        return held, {**refused, **dict.fromkeys(self._names(), REASON)}

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
