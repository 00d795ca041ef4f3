"""What all ranks of an epoch compare before anything moves, and again whenever storage has moved.

Segments, messages and the bytes in them are made of names, boxes, dtypes and formats. So the ranks agree on the trainer's
weights, on the formats in which the engine wants them, and on the plan. What a rank said of its fragments then has to hold
for the whole epoch: a weight that changed would be read as something else on the other end.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from ..config import RefitConfig
from ..control.channel import Channel
from ..errors import RefitMismatch
from ..layout import Axes, Box, Fragment, Misfit, volume
from ..quantize.formats import Format, as_made, from_json, to_json, wire_names
from ..weights.endpoints import StoresQuantized, WeightDestination, WeightSource
from ..weights.holdings import Positions, decode_positions, encode_positions
from ..weights.manifest import TensorSpec, dtype_name, first_difference
from ..weights.quantizing import QuantizingSource, wire_specs
from ..weights.routing import SAY_REFIT_DTYPE

_MODULUS = 1 << 256
# By the key that asks for a format.
_START_IN = {
    "trainer_quantize_fp8": "Start the engine from a checkpoint or with a configuration of block-scaled FP8 weights, or set "
    "policy.refit.trainer_quantize_fp8 to false",
    "trainer_quantize_int4": "Start vLLM or SGLang from a checkpoint or with a configuration of compressed-tensors' INT4 weights (W4A16, symmetric, in "
    "groups), or without quantization and with policy.refit.trainer_quantize_int4 at false",
}
# Name, full shape, box, the dtype of what travels, which is not always that of the storage, and the axes.
_Row = tuple[str, tuple[int, ...], Box, torch.dtype, Axes | None]


def agree_on_specs(channel: Channel, endpoint: WeightSource | WeightDestination) -> list[TensorSpec]:
    """The trainer's weights, as trainer rank 0 tells them to all.

    Raises:
        RefitMismatch: on a trainer rank whose export differs; names the first weight that does.
    """
    world = channel.world
    ours = cast(WeightSource, endpoint).specs() if world.is_source else []
    # A vote, in which trainer rank 0 waits, and not runs on beside the rendezvous that shares its interpreter.
    told = channel.vote("specs", [spec.to_json() for spec in ours] if world.rank == 0 else None)
    if world.rank == 0:
        return ours
    theirs = [TensorSpec.from_json(row) for row in told[0]]
    if world.is_source:
        difference = first_difference(ours, theirs)
        if difference:
            raise RefitMismatch(
                f"{world.describe(world.rank)} and trainer rank 0 export different weights: {difference}. "
                "All trainer ranks must hold the same model.",
                stage="handshake",
                rank=world.rank,
                parameter=difference.split()[0],
            )
    return theirs


def agree_on_digest(channel: Channel, topic: str, digest: str) -> None:
    """Check that all ranks computed the same digest.

    Raises:
        RefitMismatch: on every rank; names the ranks that differ from trainer rank 0.
    """
    _require_equal(channel, topic, channel.vote(topic, digest))


def _require_equal(channel: Channel, topic: str, digests: Sequence[str]) -> None:
    others = [channel.world.describe(rank) for rank, d in enumerate(digests) if d != digests[0]]
    if others:
        raise RefitMismatch(
            f"{', '.join(others)} computed another {topic} than trainer rank 0, so messages would be cut differently "
            "on both ends. Do all ranks run the same rlrefit with the same policy.refit values?",
            stage=topic,
            rank=channel.world.rank,
        )


def agree_on_plan(channel: Channel, digest: str, pairs: dict[tuple[int, int], str]) -> None:
    """Check that all ranks computed the same plan, and that both ends of each pair list the same messages.

    What a pair exchanges is known to its two ends alone, so it is compared by sums: those over all senders
    and over all receivers must be equal.

    Raises:
        RefitMismatch: on every rank; names the ranks, or the first pair that differs.
    """
    rank = channel.world.rank
    sent, received = (
        sum(int(d, 16) for pair, d in pairs.items() if pair[end] == rank) % _MODULUS for end in (0, 1)
    )
    votes = channel.vote("plan", [digest, f"{sent:x}", f"{received:x}"])
    _require_equal(channel, "plan", [vote[0] for vote in votes])
    if sum(int(v[1], 16) for v in votes) % _MODULUS == sum(int(v[2], 16) for v in votes) % _MODULUS:
        return
    lists = channel.vote("pairs", {f"{a}-{b}": d for (a, b), d in pairs.items()})
    seen: dict[str, list[str]] = {}
    for listed in lists:
        for pair, its_digest in listed.items():
            seen.setdefault(pair, []).append(its_digest)
    odd = sorted(pair for pair, digests in seen.items() if len(digests) != 2 or len(set(digests)) != 1)
    raise RefitMismatch(
        f"the two ends of {len(odd)} pairs list different messages, first refit ranks {odd[0] if odd else '?'}; bytes "
        "would land in the wrong weights. Do all ranks run the same rlrefit?",
        stage="plan",
        rank=rank,
    )


def specs_digest(specs: Sequence[TensorSpec], config: RefitConfig) -> str:
    """SHA-256 over what a packed broadcast carries, in order, its bucket size and its checks."""
    body = json.dumps(
        [config.bucket_bytes, config.verify, [spec.to_json() for spec in specs]], separators=(",", ":")
    )
    return hashlib.sha256(body.encode()).hexdigest()


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
        RefitMismatch: on every rank. No engine rank stores anything in a format that was asked for, or one does in another; two
            store one weight differently; a weight can't be held in the format that its engine has.
    """
    asked = config.quantized_in_transit
    if not asked:
        return endpoint, list(specs), {}
    world = channel.world
    wanted: dict[str, Format] = {}
    engine: object = endpoint
    if not world.is_source and isinstance(engine, StoresQuantized):
        wanted = engine.quantized(specs)
    stored = _merge(channel, specs, asked, channel.vote("formats", _pack(wanted, specs)))
    formats = as_made(stored, config.int4_scale)
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
    channel: Channel, specs: Sequence[TensorSpec], asked: str, answers: Sequence[list[list[Any]]]
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
    # Those that no key asks for are told of where their tensors are.
    stored = {format.setting: format for format in known if format.setting}
    if asked not in stored:
        others = [f"set policy.refit.{other} to true in its place" for other in stored]
        raise RefitMismatch(
            f"policy.refit.{asked} is true, but no engine rank stores a weight in a format that the trainer "
            f"makes by it; nothing was written. {'; or '.join([_remedy(specs, asked), *others])}",
            stage="handshake",
            rank=channel.world.rank,
        )
    wanted = stored.pop(asked)
    if stored:
        setting, format = next(iter(stored.items()))
        index = int(np.flatnonzero(chosen == known.index(format))[0])
        raise RefitMismatch(
            f"{channel.world.describe(int(first[index]))} stores it as {format}, which the trainer makes by "
            f"policy.refit.{setting} alone, and other weights as {wanted}; nothing was written. No trainer makes both: start the "
            "engine with one of these formats",
            stage="handshake",
            rank=channel.world.rank,
            parameter=specs[index].name,
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
    by_codes = {wire_names(name, format)[0]: format for name, format in formats.items()}
    for fragment in fragments:
        format = by_codes.get(fragment.name)
        if format is not None and fragment.dtype != format.code_dtype:
            raise RefitMismatch(
                f"another engine stores it as {format} and {channel.world.describe(channel.world.rank)} as "
                f"{dtype_name(fragment.dtype)}, but all get the same; nothing was written. Start all engines alike, or set "
                f"policy.refit.{format.setting} to false",
                stage="handshake",
                rank=channel.world.rank,
                parameter=fragment.name,
            )


def _remedy(specs: Sequence[TensorSpec], setting: str) -> str:
    """By what stands in the way: an engine of FP8 or INT4 names no weight that comes in a dtype which nobody quantizes."""
    matrices = [spec for spec in specs if len(spec.shape) == 2]
    if matrices and all(spec.dtype == torch.float32 for spec in matrices):
        return f"The trainer exports it in float32, of which no blocks are made. {SAY_REFIT_DTYPE}"
    return _START_IN.get(setting, "Start the engine without quantization")


def _wire(channel: Channel, specs: Sequence[TensorSpec], formats: dict[str, Format]) -> list[TensorSpec]:
    travelling: list[TensorSpec] = []
    for spec in specs:
        try:
            travelling += wire_specs(spec, formats[spec.name]) if spec.name in formats else [spec]
        except ValueError as error:
            raise RefitMismatch(
                f"the engine stores it quantized, which the trainer can't make of it: {error}. {_remedy([spec], formats[spec.name].setting)}",
                stage="handshake",
                rank=channel.world.rank,
                parameter=spec.name,
            ) from error
    return travelling


class AgreedFragments:
    """This rank's fragments as they were when the ranks agreed.

    Args:
        fragments: of this rank.
        left_out: names of weights that may change, since nothing was made of this rank's fragments of them.
    """

    def __init__(self, fragments: Sequence[Fragment], left_out: Collection[str]):
        self._left_out = frozenset(left_out)
        self._rows = _rows(fragments, self._left_out)
        self._asked = 0

    def again(
        self, channel: Channel, ask: Callable[[], tuple[list[Fragment], dict[str, str]]]
    ) -> list[Fragment]:
        """This rank's fragments where they lie now. Called on all ranks at the same time.

        Args:
            channel: of the epoch.
            ask: for the fragments, and the weights that must not go shard to shard, with reasons.

        Raises:
            RefitMismatch: on every rank, if a weight changed on any: names the first such rank and its first such weight.
        """
        fragments: list[Fragment] = []
        try:
            fragments, refused = ask()
            changed = self._changed(fragments, refused)
        except Misfit as error:
            changed = error.name, str(error)
        topic = f"unchanged/{self._asked}"
        self._asked += 1
        if channel.barrier(topic, flags=changed is not None):
            rank, name, how = next(
                (rank, *told) for rank, told in enumerate(channel.vote(f"{topic}/by", changed)) if told
            )
            raise RefitMismatch(
                f"this weight changed on {channel.world.describe(rank)} since the ranks met: {how}. The plan was made for "
                "what it was, and its bytes would be read as something else, so nothing was written. Undo the change, or let "
                "all ranks meet in a new epoch",
                stage="bind",
                rank=channel.world.rank,
                parameter=name,
                blamed=rank,
            )
        return fragments

    def _changed(self, fragments: Sequence[Fragment], refused: Mapping[str, str]) -> tuple[str, str] | None:
        """The first weight that is not as it was, and how it differs."""
        rows = _rows(fragments, self._left_out | refused.keys())
        # Endpoints tell them in one order, so that this is all, nearly always.
        if rows == self._rows:
            return None
        before, now = _by_name(self._rows), _by_name(rows)
        for name in dict.fromkeys((*before, *now)):
            if before[name] != now[name]:
                found = refused.get(name) or _listed(now[name])
                return name, f"it was {_listed(before[name])}, and is now {found}"
        return None


def _rows(fragments: Sequence[Fragment], left_out: Collection[str]) -> list[_Row]:
    # Subclasses (vLLM's parameters) would run their own code for each dtype.
    with torch._C.DisableTorchFunctionSubclass():
        return [(f.name, f.full_shape, f.box, f.dtype, f.axes) for f in fragments if f.name not in left_out]


def _by_name(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    """Each weight's rows by their boxes, whatever order they were told in; none without elements."""
    found: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        if volume(row[2]):
            found[row[0]].append(row)
    for parts in found.values():
        parts.sort(key=lambda row: row[2])
    return found


def _listed(rows: Sequence[_Row]) -> str:
    if not rows:
        return "not held here"
    parts = ", ".join(f"{dtype_name(dtype)}{list(shape)} {box}" for _, shape, box, dtype, _ in rows[:3])
    return parts if len(rows) <= 3 else f"{parts} and {len(rows) - 3} parts more"
