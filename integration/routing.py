"""Routes: which weight goes shard to shard, which takes the packed misc path, and why.

A whitelist: a weight is bulk only if some trainer rank holds fragments of it, no trainer rank and no
engine rank refuses it, and the dtypes on both sides are equal. Whatever nobody vouches for is misc.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .layout import Box
from .manifest import Manifest, ManifestEntry, Route, TensorSpec, dtype_name, dtype_of


@dataclass(frozen=True)
class Holdings:
    """What one rank holds (a trainer) or wants (an engine), as plain data that every rank reads.

    Attributes:
        rank: the rank in the refit world.
        boxes: Hugging Face name to the boxes that the rank's fragments hold, in the order of its fragments.
        dtypes: Hugging Face name to the dtype of the local storage.
        refused: Hugging Face name to the reason why it must not go shard to shard on this rank.
    """

    rank: int
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Plain data for the rendezvous."""
        return {
            "rank": self.rank,
            "boxes": self.boxes,
            "dtypes": {name: dtype_name(dtype) for name, dtype in self.dtypes.items()},
            "refused": self.refused,
        }

    @staticmethod
    def from_json(data: dict[str, object]) -> Holdings:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: the data is not of the form that :meth:`to_json` gives.
        """
        rank, boxes, dtypes, refused = (data.get(k) for k in ("rank", "boxes", "dtypes", "refused"))
        if not (
            isinstance(rank, int)
            and isinstance(boxes, dict)
            and isinstance(dtypes, dict)
            and isinstance(refused, dict)
        ):
            raise ValueError(
                f"malformed holdings with keys {sorted(data)}; do both sides run the same rlrefit?"
            )
        return Holdings(
            rank,
            {n: [tuple((int(a), int(b)) for a, b in box) for box in bs] for n, bs in boxes.items()},
            {n: dtype_of(d) for n, d in dtypes.items()},
            {str(n): str(r) for n, r in refused.items()},
        )


def decide_routes(
    specs: Sequence[TensorSpec], sources: Sequence[Holdings], destinations: Sequence[Holdings]
) -> Manifest:
    """Give each weight its route. Every rank computes the same manifest from the same published data."""
    return Manifest(tuple(_entry(spec, sources, destinations) for spec in specs))


def is_nccl_xfer_param(manifest: Manifest, name: str) -> bool:
    """Whether ``name`` travels shard to shard under ``manifest``.

    Raises:
        KeyError: the manifest does not know the name.
    """
    return manifest[name].route == "bulk"


def _entry(spec: TensorSpec, sources: Sequence[Holdings], destinations: Sequence[Holdings]) -> ManifestEntry:
    route, reason = _route(spec, sources, destinations)
    return ManifestEntry(spec, route, reason)


def _route(
    spec: TensorSpec, sources: Sequence[Holdings], destinations: Sequence[Holdings]
) -> tuple[Route, str]:
    name = spec.name
    for side, who in ((sources, "trainer"), (destinations, "engine")):
        for holdings in side:
            if name in holdings.refused:
                return "misc", f"{who}: {holdings.refused[name]}"
    if not any(h.boxes.get(name) for h in destinations):
        return "unused", "engine: its loader ignores this name on every rank"
    if not any(h.boxes.get(name) for h in sources):
        return "misc", "trainer: no rank has a shard rule for it"
    for side, who in ((sources, "trainer"), (destinations, "engine")):
        for holdings in side:
            dtype = holdings.dtypes.get(name, spec.dtype)
            if dtype != spec.dtype:
                return "misc", f"{who} stores {dtype_name(dtype)}, the export is {dtype_name(spec.dtype)}"
    return "bulk", ""
