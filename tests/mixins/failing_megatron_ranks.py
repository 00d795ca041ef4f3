"""Two Megatron ranks at TP2 of which one fails alone; the engine's rank is a thread of the first one's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.control import Rendezvous, open_rendezvous
from rlrefit.integration.errors import RefitError
from rlrefit.integration.session import RefitSession, ServingState
from tests.refit.synthetic import SyntheticDestination, held_by, whole

TRAINERS, FAILS = 2, 1
TIMEOUT_S = 8.0
Told = tuple[str, str, int] | None


def run(rank: int, checkpoint: str) -> dict[str, dict[str, Any]]:
    """What this rank tells of each case: a failed refit, and the one of the next epoch. Before these, of a parameter that is replaced."""
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron
    from rlrefit.workers.trainers.megatron.source import MegatronSource

    made = build_megatron(checkpoint, MegatronLayout(tensor_parallel=2), wrap_with_ddp=False)
    source = MegatronSource(made.bridge, made.model)
    destination = SyntheticDestination(source.specs(), whole(source.specs()))
    state = ServingState()
    told: dict[str, dict[str, Any]] = {
        "replaced": {"values": _values_of_a_replaced_parameter(rank, made.model, source)}
    }
    export = made.bridge.export_hf_weights

    def refuse() -> None:
        del source.prepare  # type: ignore[method-assign]
        raise RefitError("no weights today", stage="export")

    def breaking(*args: Any, **kwargs: Any) -> Iterator[Any]:
        weights = export(*args, **kwargs)
        yield next(weights)
        raise ValueError("no memory for the next one")

    cases: dict[str, Callable[[], None]] = {
        "refuses": lambda: setattr(source, "prepare", refuse),
        "export": lambda: setattr(made.bridge, "export_hf_weights", breaking),
    }
    for number, (name, spoil) in enumerate(cases.items()):
        first, following = 10 * number, 10 * number + 1

        def turn(session: RefitSession, version: int, spoils: Callable[[], None] | None = None) -> Told:
            for part in made.model:
                for parameter in part.parameters():
                    with torch.no_grad():
                        parameter.add_(0.5)
            if spoils is not None and rank == FAILS:
                spoils()
            return _ended(session, version)

        def failing(session: RefitSession, *, versions: Any = (first, following), spoil: Any = spoil) -> Any:
            assert turn(session, versions[0]) is None
            dist.barrier()
            kept = {key: held.clone() for key, held in held_by(destination).items()}
            start = time.monotonic()
            error = turn(session, versions[1], spoil)
            return error, time.monotonic() - start, kept

        (error, seconds, kept), served = _epoch(
            rank, 2 * number, source, destination, state, failing, (first, following)
        )
        found: dict[str, Any] = {"error": error, "seconds": seconds}
        if rank == 0:
            same = all(torch.equal(held, kept[key]) for key, held in held_by(destination).items())
            found |= {"engine": served, "clean": not state.dirty, "same": same}
        made.bridge.export_hf_weights = export
        try:
            found["next"], _ = _epoch(
                rank,
                2 * number + 1,
                source,
                destination,
                state,
                lambda s, v=following: turn(s, v),
                (following,),
            )
        except RefitError as error:
            found["next"] = _told(error)
        if found["next"] is None:
            exported = dict(source.export([spec.name for spec in source.specs()]))
            found["wrong"] = rank == 0 and any(
                not torch.equal(held, exported[key[0]]) for key, held in held_by(destination).items()
            )
        told[name] = found
    return told


def _values_of_a_replaced_parameter(rank: int, model: Any, source: Any) -> list[float]:
    """What an engine holds of it after two refits, if a module gets another parameter between them."""
    from megatron.core.utils import unwrap_model

    destination = SyntheticDestination(source.specs(), whole(source.specs()))
    (chunk,) = unwrap_model(model)
    norm = chunk.decoder.final_layernorm

    def refits(session: RefitSession) -> None:
        session.refit(1)
        norm.weight = torch.nn.Parameter(torch.full_like(norm.weight, 7.0))
        session.refit(2)

    _epoch(rank, 100, source, destination, ServingState(), refits, (1, 2))
    held = {name: storage for (name, _), storage in held_by(destination).items()}
    found: list[float] = held["model.norm.weight"].unique().tolist()
    return found


def _epoch(
    rank: int,
    number: int,
    source: Any,
    destination: Any,
    state: ServingState,
    body: Callable[[RefitSession], Any],
    versions: tuple[int, ...],
) -> tuple[Any, list[Told]]:
    """What ``body`` returns on a trainer's rank, and how the engine's refits of the ``versions`` end."""
    server = open_rendezvous("127.0.0.1", TRAINERS, 1, epoch=number) if rank == 0 else None
    meeting = [server.rendezvous.to_json() if server is not None else None]
    dist.broadcast_object_list(meeting, 0)
    config = RefitConfig(bucket_mb=1, timeout_s=TIMEOUT_S, verify="full")

    def opened(of: int, endpoint: Any) -> RefitSession:
        there = Rendezvous.from_json(meeting[0])
        return RefitSession.open(
            there, of, lambda: endpoint, config, engine="packed_broadcast", state=state if of else None
        )

    def serve() -> list[Told]:
        try:
            session = opened(TRAINERS, destination)
        except RefitError as error:
            return [_told(error)]
        try:
            return [_ended(session, version) for version in versions]
        finally:
            session.close()

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve) if rank == 0 else None
        session = opened(rank, source)
        try:
            return body(session), serving.result() if serving is not None else []
        finally:
            session.close()


def _ended(session: RefitSession, version: int) -> Told:
    try:
        session.refit(version)
    except (RefitError, ValueError) as error:
        return _told(error)
    return None


def _told(error: Exception) -> Told:
    return type(error).__name__, getattr(error, "stage", ""), getattr(error, "blamed", -1)
