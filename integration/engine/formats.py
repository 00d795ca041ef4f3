"""How the ranks of an epoch agree on what the trainer quantizes: the engine says what it stores, and in which format."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from ..config import RefitConfig
from ..control.channel import Channel
from ..errors import RefitMismatch
from ..layout import Fragment
from ..quantize.formats import Format, from_json, to_json, wire_specs
from ..weights.endpoints import StoresQuantized, WeightDestination, WeightSource
from ..weights.holdings import Positions, decode_positions, encode_positions
from ..weights.manifest import TensorSpec, dtype_name
from ..weights.quantizing import QuantizingSource
from .misc_share import SAY_REFIT_DTYPE

_START_IN_BLOCKS = (
    "Start the engine from a checkpoint or with a configuration of block-scaled FP8 weights, or set "
    "policy.refit.trainer_quantize_fp8 to false"
)


def agree_on_formats[E: WeightSource | WeightDestination](
    channel: Channel, config: RefitConfig, endpoint: E, specs: Sequence[TensorSpec]
) -> tuple[E, list[TensorSpec], dict[str, Format]]:
    """Replace the weights that the engine stores quantized by what travels in their place.

    Args:
        channel: of the epoch.
        config: says whether the trainer quantizes; the same on all ranks.
        endpoint: of this rank.
        specs: as the trainer exports them.

    Returns:
        The endpoint, on a trainer rank one that quantizes; what travels; the formats of the weights that do so as codes.

    Raises:
        RefitMismatch: on every rank. No engine rank stores anything quantized; two store one weight differently; a
            weight can't be held in the format that its engine has.
    """
    if not config.trainer_quantize_fp8:
        return endpoint, list(specs), {}
    world = channel.world
    wanted: dict[str, Format] = {}
    engine: object = endpoint
    if not world.is_source and isinstance(engine, StoresQuantized):
        wanted = engine.quantized(specs)
    formats = _merge(channel, specs, channel.vote("formats", _pack(wanted, specs)))
    wire = _wire(channel, specs, formats)
    if world.is_source:
        return cast(E, QuantizingSource(cast(WeightSource, endpoint), formats)), wire, formats
    return endpoint, wire, formats


def _pack(wanted: dict[str, Format], specs: Sequence[TensorSpec]) -> list[list[Any]]:
    """``[format, positions]`` each, as plain data."""
    positions = {spec.name: i for i, spec in enumerate(specs)}
    found: dict[Format, list[int]] = defaultdict(list)
    for name, format in wanted.items():
        found[format].append(positions[name])
    return [
        [to_json(format), encode_positions(np.array(sorted(indices), dtype=np.int64))]
        for format, indices in found.items()
    ]


def _merge(
    channel: Channel, specs: Sequence[TensorSpec], answers: Sequence[list[list[Any]]]
) -> dict[str, Format]:
    """Each weight's format, in the order of ``specs``."""
    known: list[Format] = []
    chosen = np.full(len(specs), -1, dtype=np.int64)
    first = np.zeros(len(specs), dtype=np.int64)
    merged: set[str] = set()
    for rank, answer in enumerate(answers):
        for entry in answer:
            # The ranks of one engine, and engines that are alike, say the same.
            text = json.dumps(entry)
            if text in merged:
                continue
            merged.add(text)
            format, indices = _read(channel, rank, entry, len(specs))
            if format not in known:
                known.append(format)
            number = known.index(format)
            odd = indices[(chosen[indices] >= 0) & (chosen[indices] != number)]
            if odd.size:
                index = int(odd[0])
                raise RefitMismatch(
                    f"{channel.world.describe(int(first[index]))} stores it as {known[chosen[index]]} and "
                    f"{channel.world.describe(rank)} as {format}, but it is quantized once for all; nothing was written. "
                    "Start all engines alike",
                    stage="handshake",
                    rank=channel.world.rank,
                    parameter=specs[index].name,
                )
            first[indices[chosen[indices] < 0]] = rank
            chosen[indices] = number
    if not known:
        raise RefitMismatch(
            f"policy.refit.trainer_quantize_fp8 is true, but no engine rank stores a weight in a format that the trainer "
            f"makes; nothing was written. {_remedy(specs)}",
            stage="handshake",
            rank=channel.world.rank,
        )
    return {specs[index].name: known[chosen[index]] for index in np.flatnonzero(chosen >= 0).tolist()}


def _read(channel: Channel, rank: int, entry: object, count: int) -> tuple[Format, Positions]:
    try:
        if not isinstance(entry, list) or len(entry) != 2:
            raise TypeError("no pair of a format and positions")
        return from_json(entry[0]), decode_positions(entry[1], count)
    except (TypeError, ValueError) as error:
        raise RefitMismatch(
            f"{channel.world.describe(rank)} tells its weights' formats in words unknown here: {error}. Do all ranks run "
            "the same rlrefit?",
            stage="handshake",
            rank=channel.world.rank,
        ) from error


def require_stored_so(channel: Channel, fragments: Sequence[Fragment], formats: Mapping[str, Format]) -> None:
    """Check that this engine rank stores as codes what travels as codes, because another engine does.

    Raises:
        RefitMismatch: it stores a weight otherwise, and would take codes for numbers.
    """
    for fragment in fragments:
        if fragment.name in formats and fragment.dtype != torch.float8_e4m3fn:
            raise RefitMismatch(
                f"another engine stores it as {formats[fragment.name]} and {channel.world.describe(channel.world.rank)} as "
                f"{dtype_name(fragment.dtype)}, but all get the same; nothing was written. Start all engines alike, or set "
                "policy.refit.trainer_quantize_fp8 to false",
                stage="handshake",
                rank=channel.world.rank,
                parameter=fragment.name,
            )


def _remedy(specs: Sequence[TensorSpec]) -> str:
    """By what stands in the way: an engine of FP8 names no weight that comes in a dtype which nobody quantizes."""
    matrices = [spec for spec in specs if len(spec.shape) == 2]
    if matrices and all(spec.dtype == torch.float32 for spec in matrices):
        return f"The trainer exports it in float32, of which no blocks are made. {SAY_REFIT_DTYPE}"
    return _START_IN_BLOCKS


def _wire(channel: Channel, specs: Sequence[TensorSpec], formats: dict[str, Format]) -> list[TensorSpec]:
    travelling: list[TensorSpec] = []
    for spec in specs:
        try:
            travelling += wire_specs(spec, formats[spec.name]) if spec.name in formats else [spec]
        except ValueError as error:
            raise RefitMismatch(
                f"the engine stores it quantized, which the trainer can't make of it: {error}. {_remedy([spec])}",
                stage="handshake",
                rank=channel.world.rank,
                parameter=spec.name,
            ) from error
    return travelling
