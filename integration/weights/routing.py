"""Routes: which weight goes shard to shard, which takes the packed misc path, and why.

A whitelist: a weight is bulk only if some trainer rank holds fragments of it, no trainer rank and no
engine rank refuses it, and the dtypes on both sides are equal. Whatever nobody vouches for is misc.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .holdings import Holdings
from .manifest import Manifest, ManifestEntry, Route, TensorSpec, dtype_name


def decide_routes(
    specs: Sequence[TensorSpec], sources: Sequence[Holdings], destinations: Sequence[Holdings]
) -> Manifest:
    """Give each weight its route. Every rank computes the same manifest from the same published data."""
    refusals = _refusals(len(specs), sources, "trainer")
    for position, reason in _refusals(len(specs), destinations, "engine").items():
        refusals.setdefault(position, reason)
    held, odd_source = _coverage(specs, sources, "trainer")
    wanted, odd_destination = _coverage(specs, destinations, "engine")
    entries: list[ManifestEntry] = []
    for position, spec in enumerate(specs):
        route: Route = "bulk"
        reason = ""
        if position in refusals:
            route, reason = "misc", refusals[position]
        elif not wanted[position]:
            route = "unused"
            reason = (
                "engine: its loader ignores this name on every rank" if spec.nbytes else "it has no elements"
            )
        elif not held[position]:
            route, reason = "misc", "trainer: no rank has a shard rule for it"
        elif position in odd_source or position in odd_destination:
            route, reason = "misc", odd_source.get(position) or odd_destination[position]
        entries.append(ManifestEntry(spec, route, reason))
    return Manifest(tuple(entries))


def is_nccl_xfer_param(manifest: Manifest, name: str) -> bool:
    """Whether ``name`` travels shard to shard under ``manifest``.

    Raises:
        KeyError: the manifest does not know the name.
    """
    return manifest[name].route == "bulk"


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
