"""Endpoints over plain tensors, and refit worlds whose ranks are threads of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any
from unittest import mock

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import client, open_rendezvous
from rlrefit.integration.control import server as rendezvous_server
from rlrefit.integration.layout import Axes, Box, Fragment, box_of
from rlrefit.integration.layout.fragments import local_slice
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.integration.weights.endpoints import StorageLook
from rlrefit.integration.weights.manifest import TensorSpec

Layout = dict[str, list[Box]]
BF16, FP32 = torch.bfloat16, torch.float32


_one_at_a_time = threading.Lock()


def value_of(spec: TensorSpec, version: int) -> torch.Tensor:
    """The whole weight at a version: any two elements or versions differ wherever the dtype can tell. Nobody may write to it."""
    with _one_at_a_time:  # ranks are threads, and would all make it at once
        return _value_of(spec, version)


@lru_cache(maxsize=64)
def _value_of(spec: TensorSpec, version: int) -> torch.Tensor:
    seed = sum(ord(c) for c in spec.name) * 1009 + version
    generator = torch.Generator().manual_seed(seed)
    drawn = spec.dtype if spec.dtype.is_complex else torch.float32
    return torch.randn(spec.shape, generator=generator, dtype=drawn).to(spec.dtype)


class SyntheticSource:
    """A trainer rank that holds the given boxes, of weights that may be seen by axes; every view is strided."""

    prepares_alone = True

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        layout: Layout,
        refused: dict[str, str] | None = None,
        device: str = "cpu",
        axes: Mapping[str, Axes] | None = None,
    ):
        self.device = torch.device(device)
        self._axes = axes or {}
        self._specs = list(specs)
        self._by_name = {s.name: s for s in specs}
        self.refused = refused or {}
        self.version = 0
        self._look = StorageLook()
        self._held = {
            (name, box): _strided([b - a for a, b in box], self._by_name[name].dtype, self.device)
            for name, boxes in layout.items()
            for box in boxes
        }

    def set_version(self, version: int) -> None:
        """Change all weights, as an optimizer step does."""
        self.version = version
        for (name, box), storage in self._held.items():
            storage.copy_(_seen(value_of(self._by_name[name], version), self._axes.get(name), box))

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
        held = [
            Fragment(name, self._by_name[name].shape, box, storage, axes=self._axes.get(name))
            for (name, box), storage in self._held.items()
            if name not in self.refused
        ]
        return held, self.refused

    def prepare(self) -> None:
        self.prepared = self.version

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, value_of(self._by_name[name], self.version).to(self.device, copy=True)

    def storage_key(self) -> Hashable:
        return self._look.key(self._held.values())


class DivergedSource(SyntheticSource):
    """Another source, of which from version 2 on an element of a weight is no number, in whatever rank's part and in the export.

    Args:
        held: the other one.
        name: of the weight.
        value: of the element.
        at: its place in the whole weight.
    """

    def __init__(self, held: SyntheticSource, name: str, value: float, at: Sequence[int]):
        self.__dict__.update(held.__dict__)
        self._bad, self._value = name, value
        self._hole = torch.zeros(self._by_name[name].shape, dtype=torch.bool)
        self._hole[tuple(at)] = True

    def set_version(self, version: int) -> None:
        super().set_version(version)
        for fragment in self.fragments()[0]:
            if version >= 2 and fragment.name == self._bad:
                fragment.view[fragment.part_of(self._hole)] = self._value

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().export(names):
            if name == self._bad and self.version >= 2:
                tensor[self._hole] = self._value
            yield name, tensor


class SyntheticDestination:
    """A generation rank that wants the given boxes; starts as NaN."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        layout: Layout,
        device: str = "cpu",
        axes: Mapping[str, Axes] | None = None,
    ):
        self.device = torch.device(device)
        self._axes = axes or {}
        self._specs = {s.name: s for s in specs}
        self._look = StorageLook()
        self._wanted = {
            (name, box): _strided([b - a for a, b in box], self._specs[name].dtype, self.device)
            for name, boxes in layout.items()
            for box in boxes
        }
        self.finished: list[int] = []
        self.abandoned = False
        self.poison()

    def poison(self) -> None:
        for storage in self._wanted.values():
            storage.fill_(float("nan"))

    def wrong(self, version: int) -> list[str]:
        """Weights that are not, bit for bit, those of ``version``."""
        return [
            f"{name} {box}"
            for (name, box), storage in self._wanted.items()
            if not torch.equal(
                storage.cpu(), _seen(value_of(self._specs[name], version), self._axes.get(name), box)
            )
        ]

    def fragments(self, specs: Sequence[TensorSpec]) -> tuple[list[Fragment], dict[str, str]]:
        shapes = {s.name: s.shape for s in specs}
        wanted = [
            Fragment(name, shapes[name], box, storage, axes=self._axes.get(name))
            for (name, box), storage in self._wanted.items()
            if name in shapes
        ]
        return wanted, {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for (wanted, box), storage in self._wanted.items():
                if wanted == name:
                    storage.copy_(_seen(tensor, self._axes.get(name), box))

    def finish(self, version: int) -> None:
        self.finished.append(version)

    def abandon(self) -> None:
        self.abandoned = True

    @property
    def kept_bytes(self) -> int:
        return sum(s.numel() * s.element_size() for s in self._wanted.values())

    def storage_key(self) -> Hashable:
        return self._look.key(self._wanted.values())


def whole(specs: Iterable[TensorSpec]) -> Layout:
    """All of each weight."""
    return {spec.name: [box_of(spec.shape)] for spec in specs}


def pair(specs: Sequence[TensorSpec]) -> tuple[list[SyntheticSource], list[SyntheticDestination]]:
    """A trainer and an engine of one rank each, with whole weights."""
    return [SyntheticSource(specs, whole(specs))], [SyntheticDestination(specs, whole(specs))]


def held_by(endpoint: Any) -> dict[Any, torch.Tensor]:
    """The storages of a rank of either side, by name and box."""
    held: dict[Any, torch.Tensor] = getattr(endpoint, "_held" if hasattr(endpoint, "_held") else "_wanted")
    return held


def move(endpoint: Any) -> None:
    """All weights come to lie elsewhere with the same values, as after an offload."""
    held = held_by(endpoint)
    held.update({key: storage.clone() for key, storage in held.items()})


def rows(total: int, parts: int, index: int, columns: int) -> list[Any]:
    size = total // parts
    return [((index * size, (index + 1) * size), (0, columns))]


def columns(total: int, parts: int, index: int, rows: int) -> list[Any]:
    size = total // parts
    return [((0, rows), (index * size, (index + 1) * size))]


SPECS = [
    TensorSpec("column", (24, 10), BF16),
    TensorSpec("row", (7, 12), BF16),
    TensorSpec("norm", (5,), FP32),
    TensorSpec("odd", (13, 3), torch.float16),
    TensorSpec("router", (4, 6), BF16),
]


def layout_of(rank: int, size: int) -> Layout:
    """Two weights are cut by rows and by columns, all others are replicated."""
    cut = {"column": rows(24, size, rank, 10), "row": columns(12, size, rank, 7)}
    return whole(SPECS) | cut


def world(engines: int = 3) -> tuple[list[SyntheticSource], list[SyntheticDestination]]:
    """Two trainers, and engines; the router takes the misc path."""
    sources = [SyntheticSource(SPECS, layout_of(rank, 2), {"router": "MoE router"}) for rank in range(2)]
    return sources, [SyntheticDestination(SPECS, layout_of(rank, engines)) for rank in range(engines)]


def refit_versions(*versions: int) -> Callable[[int, RefitSession, Any], list[Any]]:
    """A rank's record, what is wrong, and the version that is served, after each refit."""

    def body(rank: int, session: RefitSession, endpoint: Any) -> list[Any]:
        return [(*refit_changed(session, endpoint, v), session.state.version) for v in versions]

    return body


def ended(session: RefitSession, version: int) -> BaseException | None:
    """What a refit ends with."""
    try:
        session.refit(version)
    except BaseException as error:
        return error
    return None


def refit_changed(session: RefitSession, endpoint: Any, version: int) -> tuple[Any, list[str]]:
    """Change the trainer's weights or poison the engine's, refit, and return the record and what is wrong."""
    if session.world.is_source:
        endpoint.set_version(version)
    else:
        endpoint.poison()
    record = session.refit(version)
    return record, [] if session.world.is_source else endpoint.wrong(version)


def run_world(
    sources: Sequence[Any],
    destinations: Sequence[Any],
    body: Callable[[int, RefitSession, Any], Any],
    config: RefitConfig | Sequence[RefitConfig] | None = None,
    engine: str = "nccl_xfer",
    states: Mapping[int, ServingState] | None = None,
) -> list[Any]:
    """Open a session on every rank, each in a thread, and return what ``body(rank, session, endpoint)``
    returns, or the exception that ended the rank. ``states`` are kept by engines over several worlds."""
    endpoints = [*sources, *destinations]
    config = config or RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", transport="p2p")
    configs = [config] * len(endpoints) if isinstance(config, RefitConfig) else config
    server = open_rendezvous("127.0.0.1", len(sources), len(destinations))

    def run(rank: int) -> Any:
        try:
            session = RefitSession.open(
                server.rendezvous,
                rank,
                lambda: endpoints[rank],
                configs[rank],
                engine=engine,
                state=(states or {}).get(rank),
            )
            try:
                return body(rank, session, endpoints[rank])
            finally:
                session.close()
        except BaseException as error:  # an interrupt of one rank is a result like others
            return error

    try:
        # Ranks share the interpreter, and what looks for an answer without a pause keeps all others from it.
        with (
            mock.patch.object(client, "SPIN_S", 0.0),
            mock.patch.object(rendezvous_server, "SPIN_S", 0.0),
            ThreadPoolExecutor(len(endpoints)) as pool,
        ):
            return list(pool.map(run, range(len(endpoints))))
    finally:
        server.close()


def _seen(tensor: torch.Tensor, axes: Axes | None, box: Box) -> torch.Tensor:
    """A box of a whole weight, which may be seen by axes."""
    seen = tensor if axes is None else axes.see(tensor)
    return seen[local_slice(box_of(seen.shape), box)]


def _strided(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Storage whose view of ``shape`` is not contiguous; one element lies in a column, which no stride of 1 leads along."""
    if shape == [1]:
        return torch.zeros(3, 7, dtype=dtype, device=device)[:1, 2]
    padded = torch.zeros([*shape[:-1], shape[-1] + 3] if shape else [3], dtype=dtype, device=device)
    return padded[..., : shape[-1]] if shape else padded[0]
