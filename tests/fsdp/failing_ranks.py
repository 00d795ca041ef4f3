"""Trainer ranks under FSDP2 of which one fails alone, and an engine rank; all in one gloo world of three processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.integration.session import RefitSession, ServingState
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from tests.refit.synthetic import SyntheticDestination, whole

TRAINERS, FAILS, ENGINE = 2, 1, 2
# Of a refit. That of the trainer's own process group is torch's, half an hour.
TIMEOUT_S = 8.0
WEIGHTS = 4


@dataclass(frozen=True)
class Ended:
    """How a refit ended on one rank, and how the refit of the next epoch did.

    Attributes:
        error: type, stage and blamed rank.
        seconds: that the refit took.
        clean: whether the engine would serve after it.
        held: whether the engine held the weights of the version before.
        next: as ``error``, of the next epoch; None if it committed.
        right: whether the engine holds all weights of the version that it serves.
    """

    error: tuple[str, str, int] | None
    seconds: float
    clean: bool = True
    held: bool = True
    next: tuple[str, str, int] | None = None
    right: bool = True


def refuse(source: Any, session: Any) -> None:
    """In ``prepare``: a module of the model was replaced."""
    model = source._model
    kept = model[0]
    model[0] = torch.nn.Linear(6, 6, bias=False)
    source.mend = lambda: model.__setitem__(0, kept)


def fail_in_the_export(source: Any, session: Any) -> None:
    """Before a gather in which the other rank waits."""
    whole_of = source._whole

    def failing(name: str) -> torch.Tensor:
        if name.startswith("2"):
            raise ValueError("no memory for this one")
        return whole_of(name)

    source._whole = failing
    source.mend = lambda: setattr(source, "_whole", whole_of)


def fail_beside_the_export(source: Any, session: Any) -> None:
    """In what the refit does with the weights, before all of them are drawn."""

    def send(weights: Iterator[Any], clock: Any) -> None:
        next(weights)
        raise ValueError("the card fell off")

    session.engine._misc.send = send


def fail_in_the_engine(destination: Any, session: Any) -> None:
    """As it loads."""
    load = destination.load_weights

    def failing(weights: Iterable[Any]) -> None:
        destination.load_weights = load
        next(iter(weights))
        raise ValueError("the loader does not like it")

    destination.load_weights = failing


CASES: dict[str, tuple[int, Callable[[Any, Any], None]]] = {
    "refuses": (FAILS, refuse),
    "engine": (ENGINE, fail_in_the_engine),
    "beside": (FAILS, fail_beside_the_export),
    # Last: the trainer's ranks are out of step after it.
    "export": (FAILS, fail_in_the_export),
}


def run(rank: int) -> dict[str, Ended]:
    """All cases, one after another; by name, how they ended on this rank."""
    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", torch.arange(TRAINERS))
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(WEIGHTS)))
    if rank < TRAINERS:
        fully_shard(model, mesh=mesh)
    source = FSDPSource(model) if rank < TRAINERS else None
    values: list[dict[str, torch.Tensor]] = []
    ends: dict[str, Ended] = {}
    state = ServingState()
    destination = None
    for epoch, (name, (fails, spoil)) in enumerate(CASES.items()):
        first = 10 * epoch
        session = _open(rank, 2 * epoch, source, destination, state)
        destination = destination or session._endpoint
        _step(model, first, rank, values)
        session.refit(first)
        _step(model, first + 1, rank, values)
        if rank == fails:
            spoil(session._endpoint, session)
        start = time.monotonic()
        error = _ended(session.refit, first + 1)
        seconds = time.monotonic() - start
        clean, held = not state.dirty, _holds(destination, first)
        session.close()
        if hasattr(source, "mend"):
            source.mend()
        following = _ended(_again, rank, 2 * epoch + 1, source, destination, state, first + 1)
        right = state.dirty or _holds(destination, state.version)
        ends[name] = Ended(error, seconds, clean, held, following, right)
    # The rendezvous ends with rank 0's process, and who comes late is still to be told by it.
    dist.barrier()
    return ends


def _open(rank: int, epoch: int, source: Any, destination: Any, state: ServingState) -> RefitSession:
    told: list[Any] = [None]
    if rank == 0:
        server = open_rendezvous("127.0.0.1", TRAINERS, 1, epoch=epoch)
        _servers.append(server)
        told = [server.rendezvous.to_json()]
    dist.broadcast_object_list(told, 0)
    if rank >= TRAINERS and destination is None:
        from rlrefit.integration.weights.manifest import TensorSpec

        specs = [TensorSpec(f"{i}.weight", (6, 6), torch.float32) for i in range(WEIGHTS)]
        destination = SyntheticDestination(specs, whole(specs))
    config = RefitConfig(bucket_mb=1, timeout_s=TIMEOUT_S, verify="full")
    endpoint = source if rank < TRAINERS else destination
    return RefitSession.open(
        Rendezvous.from_json(told[0]), rank, lambda: endpoint, config, engine="packed_broadcast", state=state
    )


_servers: list[Any] = []


def _again(rank: int, epoch: int, source: Any, destination: Any, state: ServingState, version: int) -> None:
    session = _open(rank, epoch, source, destination, state)
    try:
        session.refit(version)
    finally:
        session.close()


def _step(model: torch.nn.Module, version: int, rank: int, values: list[Any]) -> None:
    """All ranks know what all weights come to be, without a collective."""
    if rank < TRAINERS:
        for index, parameter in enumerate(model.parameters()):
            with torch.no_grad():
                parameter.to_local().copy_(value(version, index).chunk(TRAINERS)[rank])


def value(version: int, index: int) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(100 * version + index))


def _holds(destination: Any, version: int) -> bool:
    if not isinstance(destination, SyntheticDestination):
        return True
    held = {name: storage for (name, _), storage in destination._wanted.items()}
    return all(torch.equal(held[f"{i}.weight"], value(version, i)) for i in range(WEIGHTS))


def _ended(refit: Callable[..., Any], *args: Any) -> tuple[str, str, int] | None:
    try:
        refit(*args)
    except (RefitError, ValueError) as error:
        return type(error).__name__, getattr(error, "stage", ""), getattr(error, "blamed", -1)
    return None
