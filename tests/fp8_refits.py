"""Refits of an engine in FP8 blocks, whose processes are the trainer as well: what tests of engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.errors import PlanError, RefitMismatch
from rlrefit.integration.records.record import RefitRecord
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.endpoints import WeightDestination, WeightSource

ENGINE_RANKS = 2
CONFIG = RefitConfig(bucket_mb=1, timeout_s=120.0, verify="full", transport="p2p", trainer_quantize_fp8=True)
State = dict[str, torch.Tensor]


class Source(WeightSource, Protocol):
    """A trainer rank with the weights of one checkpoint after the other."""

    def take_on(self, index: int) -> None:
        """Hold the weights of checkpoint ``index``."""


class Sessions:
    """This process as an engine rank of a refit, and beside it, in a thread, as the trainer rank that it has a source for."""

    def __init__(
        self,
        rank: int,
        engine: str,
        config: RefitConfig,
        source: Source | None,
        destination: WeightDestination,
        train_ranks: int,
    ) -> None:
        told: list[Any] = [None]
        ranks = torch.distributed.get_world_size()
        self._server = open_rendezvous("127.0.0.1", train_ranks, ranks) if rank == 0 else None
        if self._server is not None:
            told = [self._server.rendezvous.to_json()]
        torch.distributed.broadcast_object_list(told, 0)
        meeting = Rendezvous.from_json(told[0])
        self._source = source
        self._thread = ThreadPoolExecutor(1)
        if source is not None:
            opening = self._thread.submit(
                RefitSession.open, meeting, rank, lambda: source, config, engine=engine
            )
        self._engine = RefitSession.open(
            meeting, train_ranks + rank, lambda: destination, config, engine=engine
        )
        if source is not None:
            self._trainer = opening.result()

    def routes(self) -> dict[str, int]:
        """How many weights take each route from trainer ranks; codes and scales count as two."""
        return {route: len(self._engine.manifest.specs(route)) for route in ("bulk", "misc", "unused")}

    def refit(self, index: int, version: int) -> RefitRecord:
        if self._source is not None:
            self._source.take_on(index)
            sending = self._thread.submit(self._trainer.refit, version)
        record = self._engine.refit(version)
        if self._source is not None:
            sending.result()
        return record

    def __enter__(self) -> Sessions:
        return self

    def __exit__(self, *_: object) -> None:
        if self._source is not None:
            closing = self._thread.submit(self._trainer.close)
        self._engine.close()
        if self._source is not None:
            closing.result()
        self._thread.shutdown()
        torch.distributed.barrier()
        if self._server is not None:
            self._server.close()


def refit_by_both_engines(
    sessions_by: Callable[[str, RefitConfig], Sessions],
    poison: Callable[[], None],
    look: Callable[[str, int], None],
) -> dict[str, dict[str, int]]:
    """By each checkpoint engine three refits into poison: of the second weights, of the first, and of these again.

    Args:
        sessions_by: opens the sessions of an engine, with a configuration.
        poison: makes all that the engine holds worthless.
        look: called after each refit with its occasion and the index of the checkpoint that it brought.

    Returns:
        By engine, how many weights took each route.
    """
    routes = {}
    for engine in ("nccl_xfer", "packed_broadcast"):
        with sessions_by(engine, CONFIG) as sessions:
            routes[engine] = sessions.routes()
            for version, index in enumerate((1, 0, 0)):
                poison()
                sessions.refit(index, version)
                look(f"{engine} {version}", index)
    return routes


def refit_sparsely(
    sessions_by: Callable[[str, RefitConfig], Sessions], look: Callable[[str, int], None]
) -> list[bool]:
    """Four refits of the first weights, the second twice, and the first, where what did not change does not travel.

    Args:
        sessions_by, look: as of :func:`refit_by_both_engines`.

    Returns:
        Which of them were sparse.
    """
    sparse = []
    with sessions_by("nccl_xfer", replace(CONFIG, delta="always")) as sessions:
        for version, index in enumerate((0, 1, 1, 0)):
            sparse.append(sessions.refit(index, version).changed_share is not None)
            look(f"sparse {version}", index)
    return sparse


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """NaN, or -1 where there is none."""
    with torch.no_grad():
        for tensor in tensors:
            wrong = torch.full((), torch.nan) if tensor.dtype.is_floating_point else torch.full((), -1)
            tensor.copy_(wrong.to(tensor.dtype))


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> State:
    """Copies of their bytes."""
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for name, tensor in tensors.items()
    }


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same to the bit."""
    assert found.keys() == expected.keys()
    return [name for name, held in found.items() if not torch.equal(held, expected[name])]


def refusal(ask: Callable[[Any], object], specs: Any) -> str:
    """The text with which weights are refused; empty if they are not."""
    try:
        ask(specs)
    except (PlanError, RefitMismatch) as error:
        return str(error)
    return ""
