"""How the ranks of an epoch agree on what the trainer quantizes: the engine says what it stores, and in which format."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

from ..channel import Channel
from ..config import RefitConfig
from ..endpoints import StoresQuantized, WeightDestination, WeightSource
from ..errors import RefitMismatch
from ..manifest import TensorSpec
from ..quantize.formats import Format, from_json, to_json, wire_specs
from ..quantize.source import QuantizingSource

_REMEDY = (
    "Start the engine from a checkpoint or with a configuration of block-scaled FP8 weights, or set "
    "policy.refit.trainer_quantize_fp8 to false"
)


def agree_on_formats[E: WeightSource | WeightDestination](
    channel: Channel, config: RefitConfig, endpoint: E, specs: Sequence[TensorSpec]
) -> tuple[E, list[TensorSpec]]:
    """Replace the weights that the engine stores quantized by what travels in their place.

    Args:
        channel: of the epoch.
        config: says whether the trainer quantizes; the same on all ranks.
        endpoint: of this rank.
        specs: as the trainer exports them.

    Returns:
        The endpoint, on a trainer rank one that quantizes, and what travels.

    Raises:
        RefitMismatch: on every rank. No engine rank stores anything quantized; two store one weight differently; a
            weight can't be held in the format that its engine has.
    """
    if not config.trainer_quantize_fp8:
        return endpoint, list(specs)
    world = channel.world
    wanted: dict[str, Format] = {}
    engine: object = endpoint
    if not world.is_source and isinstance(engine, StoresQuantized):
        wanted = engine.quantized(specs)
    formats = _merge(channel, specs, channel.vote("formats", _pack(wanted, specs)))
    wire = _wire(channel, specs, formats)
    if world.is_source:
        return cast(E, QuantizingSource(cast(WeightSource, endpoint), formats)), wire
    return endpoint, wire


def _pack(wanted: dict[str, Format], specs: Sequence[TensorSpec]) -> list[list[Any]]:
    """``[format, positions]`` each, as plain data."""
    positions = {spec.name: i for i, spec in enumerate(specs)}
    found: dict[str, list[int]] = defaultdict(list)
    for name, format in wanted.items():
        found[json.dumps(to_json(format))].append(positions[name])
    return [[json.loads(text), sorted(indices)] for text, indices in found.items()]


def _merge(
    channel: Channel, specs: Sequence[TensorSpec], answers: Sequence[list[list[Any]]]
) -> dict[str, Format]:
    """Each weight's format, in the order of ``specs``."""
    found: dict[int, tuple[Format, int]] = {}
    for rank, answer in enumerate(answers):
        for data, indices in answer:
            try:
                format = from_json(data)
            except ValueError as error:
                raise RefitMismatch(
                    f"{channel.world.describe(rank)} stores weights in a format unknown here: {error}",
                    stage="handshake",
                    rank=channel.world.rank,
                ) from error
            for index in indices:
                known, other = found.setdefault(int(index), (format, rank))
                if known != format:
                    raise RefitMismatch(
                        f"{channel.world.describe(other)} stores it as {known} and {channel.world.describe(rank)} as "
                        f"{format}, but it is quantized once for all; nothing was written. Start all engines alike",
                        stage="handshake",
                        rank=channel.world.rank,
                        parameter=specs[int(index)].name,
                    )
    if not found:
        raise RefitMismatch(
            f"policy.refit.trainer_quantize_fp8 is true, but no engine rank stores a weight in a format that the trainer "
            f"makes; nothing was written. {_REMEDY}",
            stage="handshake",
            rank=channel.world.rank,
        )
    return {specs[index].name: found[index][0] for index in sorted(found)}


def _wire(channel: Channel, specs: Sequence[TensorSpec], formats: dict[str, Format]) -> list[TensorSpec]:
    travelling: list[TensorSpec] = []
    for spec in specs:
        try:
            travelling += wire_specs(spec, formats[spec.name]) if spec.name in formats else [spec]
        except ValueError as error:
            raise RefitMismatch(
                f"the engine stores it quantized, which the trainer can't make of it: {error}. {_REMEDY}",
                stage="handshake",
                rank=channel.world.rank,
                parameter=spec.name,
            ) from error
    return travelling
