"""Weights of which a share changes from version to version, on both sides of refits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.layout import flat_bytes
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec
from tests.refit.synthetic import BF16, FP32, SyntheticDestination, SyntheticSource, columns, rows, whole

CONFIG = RefitConfig(bucket_mb=1, timeout_s=20.0, transport="p2p", delta="always")
SPECS = [
    TensorSpec("column", (240, 100), BF16),
    TensorSpec("row", (70, 120), BF16),
    TensorSpec("norm", (5,), FP32),
    TensorSpec("one", (1,), FP32),
    TensorSpec("code", (130, 30), torch.float8_e4m3fn),
    TensorSpec("large", (700, 900), BF16),
    TensorSpec("router", (4, 6), BF16),
]
BULK = sum(spec.nbytes for spec in SPECS if spec.name != "router")


_one_at_a_time = threading.Lock()


def value(spec: TensorSpec, share: float, version: int) -> torch.Tensor:
    """A weight of which a share changes from each version to the next; never a NaN. Nobody may write to it."""
    with _one_at_a_time:  # ranks are threads, and would all make it at once
        return _value(spec, share, version)


@lru_cache(maxsize=32)
def _value(spec: TensorSpec, share: float, version: int) -> torch.Tensor:
    return (_eighths(spec, share, version)[0] / 8).to(spec.dtype)


@lru_cache(maxsize=32)
def _eighths(spec: TensorSpec, share: float, version: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`value` has of an eighth, and the generator's state for the version after it."""
    generator = torch.Generator()
    if version == 0:
        generator.manual_seed(len(spec.name))
        eighths = torch.randint(0, 50, spec.shape, generator=generator)
    else:
        before, state = _eighths(spec, share, version - 1)
        generator.set_state(state)
        eighths = before + (torch.rand(spec.shape, generator=generator) < share)
    return eighths, generator.get_state()


class Source(SyntheticSource):
    share = 0.01

    def set_version(self, version: int) -> None:
        self.version = version
        for (name, box), storage in self._held.items():
            whole_value = value(self._by_name[name], self.share, version)
            storage.copy_(whole_value[tuple(slice(a, b) for a, b in box)])

    def export(self, names: Any) -> Any:
        for name in names:
            yield name, value(self._by_name[name], self.share, self.version).to(self.device)


class Destination(SyntheticDestination):
    share = 0.01
    gives_memory_back = False

    def rewritten(self, specs: Any) -> dict[str, str]:
        return {}

    def poison(self) -> None:
        for storage in self._wanted.values():
            storage.unsqueeze(-1).view(torch.uint8).fill_(0x7F)

    def wrong(self, version: int) -> list[str]:
        return [
            f"{name} {box}"
            for (name, box), storage in self._wanted.items()
            if not torch.equal(
                flat_bytes(storage.cpu().contiguous()),
                flat_bytes(
                    value(self._specs[name], self.share, version)[
                        tuple(slice(a, b) for a, b in box)
                    ].contiguous()
                ),
            )
        ]


def layout(rank: int, size: int) -> Any:
    cut = {
        "column": rows(240, size, rank, 100),
        "row": columns(120, size, rank, 70),
        "large": columns(900, size, rank, 700),
    }
    return whole(SPECS) | cut


def source(rank: int, trainers: int, device: str = "cpu") -> Source:
    """A trainer rank, whose router takes the misc path."""
    return Source(SPECS, layout(rank, trainers), {"router": "MoE router"}, device)


def world(trainers: int = 2, engines: int = 3) -> tuple[list[Any], list[Any]]:
    return [source(r, trainers) for r in range(trainers)], [
        Destination(SPECS, layout(r, engines)) for r in range(engines)
    ]


def refit(session: RefitSession, endpoint: Any, version: int) -> Any:
    """The record and what is wrong; an engine's weights stay what the refit before has left."""
    if session.world.is_source:
        with session.recording_changes():
            endpoint.set_version(version)
    record = session.refit(version)
    return record, [] if session.world.is_source else endpoint.wrong(version)


def refits(*versions: int) -> Callable[[int, RefitSession, Any], list[Any]]:
    return lambda rank, session, endpoint: [refit(session, endpoint, version) for version in versions]
