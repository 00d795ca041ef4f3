"""What exists: names, shapes and dtypes of all weights in the Hugging Face name space, and their routes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod
from typing import Literal, NamedTuple

import torch

Route = Literal["bulk", "misc", "unused"]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as it travels, e.g. ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def dtype_of(name: str) -> torch.dtype:
    """The dtype that ``dtype_name`` named.

    Raises:
        ValueError: torch has no dtype of that name (a peer of another version, or a malformed message).
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} names no torch dtype; do both sides run the same torch version?")
    return found


class TensorSpec(NamedTuple):
    """One weight as the trainer exports it: Hugging Face name, full shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[object]:
        """``[name, shape, dtype]`` as plain data."""
        return [self.name, list(self.shape), dtype_name(self.dtype)]

    @staticmethod
    def from_json(data: Sequence[object]) -> TensorSpec:
        """Inverse of :meth:`to_json`."""
        name, shape, dtype = data
        if not isinstance(name, str) or not isinstance(shape, list) or not isinstance(dtype, str):
            raise ValueError(f"malformed tensor record {data!r}")
        return TensorSpec(name, tuple(map(int, shape)), dtype_of(dtype))


@dataclass(frozen=True)
class ManifestEntry:
    """A weight, the route that carries it, and why if it is not the bulk path."""

    spec: TensorSpec
    route: Route
    reason: str = ""


@dataclass(frozen=True)
class Manifest:
    """All weights in the order in which the trainer exports them. Misc tensors travel in this order."""

    entries: tuple[ManifestEntry, ...]
    _by_name: dict[str, ManifestEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, ManifestEntry] = {}
        for entry in self.entries:
            if entry.spec.name in by_name:
                raise ValueError(
                    f"{entry.spec.name} stands twice in the manifest; an engine would load one of two values. "
                    "The trainer's export must yield each name once."
                )
            by_name[entry.spec.name] = entry
        object.__setattr__(self, "_by_name", by_name)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[ManifestEntry]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> ManifestEntry:
        return self._by_name[name]

    def specs(self, route: Route | None = None) -> list[TensorSpec]:
        """The weights of one route, in order, or all."""
        return [e.spec for e in self.entries if route is None or e.route == route]

    def bytes_of(self, route: Route) -> int:
        """Full (global) bytes of the weights of one route."""
        return sum(spec.nbytes for spec in self.specs(route))

    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes, order and routes; equal on all ranks or nothing moves."""
        lines = [[*e.spec.to_json(), e.route] for e in self.entries]
        return hashlib.sha256(json.dumps(lines, separators=(",", ":")).encode()).hexdigest()


def first_difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str:
    """One sentence about the first weight in which two enumerations differ; empty if they are equal."""
    by_name = {spec.name: spec for spec in theirs}
    for spec in ours:
        other = by_name.get(spec.name)
        if other is None:
            return f"{spec.name} is missing on the other side"
        if other != spec:
            return (
                f"{spec.name} is {dtype_name(spec.dtype)}{list(spec.shape)} here "
                f"and {dtype_name(other.dtype)}{list(other.shape)} on the other side"
            )
    here = {spec.name for spec in ours}
    for spec in theirs:
        if spec.name not in here:
            return f"{spec.name} exists only on the other side"
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.name != b.name:
            return (
                f"at position {position} stands {a.name} here and {b.name} on the other side (another order)"
            )
    return ""
