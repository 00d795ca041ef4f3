"""Routes: which weight goes shard to shard, which takes the packed misc path, and why.

A whitelist: a weight is bulk only if some trainer rank holds fragments of it, no trainer rank and no
engine rank refuses it, and the dtypes on both sides are equal. Whatever nobody vouches for is misc.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..quantize.formats import Format, wire_names
from .holdings import Holdings
from .manifest import Manifest, ManifestEntry, Route, TensorSpec, dtype_name
from .quantizing import CUTS_BLOCKS

logger = logging.getLogger(__name__)

_LARGE_SHARE = 0.05
# Of weights that are exported in FP32 for an engine of another dtype.
SAY_REFIT_DTYPE = (
    "Tell the source the engine's dtype, to which shards are cast as they are packed: refit_dtype = torch.bfloat16 of "
    "FSDPRefitMixin, FSDPSource(model, torch.bfloat16)"
)


def decide_routes(
    specs: Sequence[TensorSpec], sources: Sequence[Holdings], destinations: Sequence[Holdings]
) -> Manifest:
    """Give each weight its route. Every rank computes the same manifest from the same published data.

    What no engine rank takes in either way is unused, and is not exported, whether a trainer rank could place it or not.
    """
    of_engines = _refusals(len(specs), destinations, "engine")
    refusals = of_engines | _refusals(len(specs), sources, "trainer")
    held, odd_source = _coverage(specs, sources, "trainer")
    wanted, odd_destination = _coverage(specs, destinations, "engine")
    entries: list[ManifestEntry] = []
    for position, spec in enumerate(specs):
        route: Route = "bulk"
        reason = ""
        if not wanted[position] and position not in of_engines:
            route = "unused"
            reason = (
                "engine: its loader ignores this name on every rank" if spec.nbytes else "it has no elements"
            )
        elif position in refusals:
            route, reason = "misc", refusals[position]
        elif not held[position]:
            route, reason = "misc", "trainer: no rank has a shard rule for it"
        elif position in odd_source or position in odd_destination:
            route, reason = "misc", odd_source.get(position) or odd_destination[position]
        entries.append(ManifestEntry(spec, route, reason))
    return Manifest(tuple(entries))


def warn_of_misc(manifest: Manifest, formats: Mapping[str, Format]) -> None:
    """Warn where more than a twentieth of the bytes are gathered and sent whole for the trainer's dtype or its layout.

    What the engine can't take in place, its own ranks tell.

    Args:
        manifest: as all ranks agreed on it.
        formats: of the weights that travel as codes and scales.
    """
    misc = [entry for entry in manifest if entry.route == "misc"]
    of_quantized = {part for name, format in formats.items() for part in wire_names(name, format)}
    cut = [entry for entry in misc if entry.spec.name in of_quantized and CUTS_BLOCKS in entry.reason]
    wide = [
        entry for entry in misc if entry.spec.dtype == torch.float32 and entry.spec.name not in of_quantized
    ]
    # An engine with codes takes BF16 as well, if they are FP8's.
    compared = (
        ", or compare with trainer_quantize_fp8=false, which sends shards of BF16"
        if any(format.setting == "trainer_quantize_fp8" for format in formats.values())
        else ""
    )
    _warn(
        manifest,
        cut,
        "a trainer rank's shard cuts their blocks of scales",
        f"Choose a layout whose shards are whole blocks{compared}",
    )
    _warn(manifest, wide, "they are exported in float32, which the engine does not keep", SAY_REFIT_DTYPE)


def _refusals(count: int, side: Sequence[Holdings], who: str) -> dict[int, str]:
    """The first reason that a rank of one side gives, by position."""
    found: dict[int, str] = {}
    seen = np.zeros(count, dtype=bool)
    for holdings in side:
        for reason, indices in holdings.refused.items():
            fresh = indices[~seen[indices]]
            seen[fresh] = True
            found.update(dict.fromkeys(fresh.tolist(), f"{who}: {reason}"))
    return found


def _coverage(
    specs: Sequence[TensorSpec], side: Sequence[Holdings], who: str
) -> tuple[np.ndarray, dict[int, str]]:
    """Which weights any rank of a side holds, and those that it stores in another dtype than the export's."""
    held = np.zeros(len(specs), dtype=bool)
    dtypes: dict[torch.dtype, int] = {}
    exported = np.array([dtypes.setdefault(s.dtype, len(dtypes)) for s in specs], dtype=np.int64)
    odd: dict[int, str] = {}
    for holdings in side:
        for group in holdings.groups:
            held[group.indices] = True
            for position in group.indices[exported[group.indices] != dtypes.get(group.dtype, -1)].tolist():
                odd.setdefault(
                    position,
                    f"{who} stores {dtype_name(group.dtype)}, the export is {dtype_name(specs[position].dtype)}",
                )
    return held, odd


def _warn(manifest: Manifest, entries: list[ManifestEntry], why: str, remedy: str) -> None:
    nbytes, total = sum(e.spec.nbytes for e in entries), sum(e.spec.nbytes for e in manifest)
    if nbytes <= _LARGE_SHARE * total:
        return
    logger.warning(
        "%.0f%% of the weights (%.1f MB of %.1f) do not go shard to shard: every refit gathers them and sends them whole to "
        "each engine rank, since %s. First %s: %s. %s",
        100 * nbytes / total,
        nbytes / 1e6,
        total / 1e6,
        why,
        entries[0].spec.name,
        entries[0].reason,
        remedy,
    )
