"""Trainer parameters that are offloaded between refits: sent from host memory, bit for bit, without coming back."""

from __future__ import annotations

import gc
import traceback
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlrefit.integration.control import Rendezvous, open_rendezvous

from .needs import needs
from .spawned import spawned

pytestmark = needs(gpus=2)

MB = 1 << 20
# Tables and checksums beside the buckets, and the allocator's rounding.
ALLOWANCE = 8 * MB
# Where the trainer's parameters are in each refit; some stay where they were.
JOURNEY = (
    "gpu",
    "pinned",
    "pinned",
    "gpu",
    "pageable",
    "pageable",
    "mixed",
    "gpu",
    "mixed",
    "pinned",
    "pageable",
)


@dataclass(frozen=True)
class Case:
    """A world of one trainer and one engine rank.

    Attributes:
        transport: that carries the weights.
        journey: a place of the trainer's parameters for each refit.
        weights: number of weights, ``[rows, 512]`` in BF16.
        rows: of each.
        gapless: whether the storages are contiguous, so that large ones travel without staging from GPU to GPU.
        bucket_mb: size of a bucket.
        engine_away: whether the engine's weights are in host memory.
    """

    transport: str
    journey: tuple[str, ...] = JOURNEY
    weights: int = 24
    rows: int = 4096
    gapless: bool = False
    bucket_mb: int = 4
    engine_away: bool = False

    @property
    def nbytes(self) -> int:
        return self.weights * self.rows * 512 * 2


def move(endpoint: Any, held: str, place: str, gapless: bool) -> None:
    """Put each storage of an endpoint somewhere else, with its values and its strides."""
    kinds = {"mixed": ("gpu", "pinned", "pageable")}.get(place, (place,))
    storages = getattr(endpoint, held)
    for index, (key, old) in enumerate(storages.items()):
        kind = kinds[index % len(kinds)]
        shape, stride = (old.shape, old.contiguous().stride()) if gapless else (old.shape, old.stride())
        device = endpoint.device if kind == "gpu" else torch.device("cpu")
        if old.device == device and kind == "gpu" and old.stride() == stride:
            continue
        new = torch.empty_strided(shape, stride, dtype=old.dtype, device=device, pin_memory=kind == "pinned")
        storages[key] = new.copy_(old)
    gc.collect()


def rank_main(rank: int, meeting: Rendezvous, case: Case, results: Any) -> None:
    try:
        results.put((rank, refits(rank, meeting, case)))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def refits(rank: int, meeting: Rendezvous, case: Case) -> list[dict[str, Any]]:
    from rlrefit.integration.config import RefitConfig
    from rlrefit.integration.session import RefitSession
    from rlrefit.integration.weights.manifest import TensorSpec
    from tests.refit.synthetic import SyntheticDestination, SyntheticSource, refit_changed

    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    specs = [TensorSpec(f"w{i}", (case.rows, 512), torch.bfloat16) for i in range(case.weights)]
    specs.append(TensorSpec("odd", (257, 31), torch.float32))
    whole = {spec.name: [tuple((0, n) for n in spec.shape)] for spec in specs}
    halves = {
        spec.name: [
            ((0, spec.shape[0]), (0, spec.shape[1] // 2)),
            ((0, spec.shape[0]), (spec.shape[1] // 2, spec.shape[1])),
        ]
        for spec in specs
    }
    wanted = whole if case.gapless else halves
    endpoint: Any = (
        SyntheticSource(specs, whole, device=device)
        if rank == 0
        else SyntheticDestination(specs, wanted, device)
    )
    held = "_held" if rank == 0 else "_wanted"
    first = case.journey[0] if rank == 0 else "pageable" if case.engine_away else "gpu"
    move(endpoint, held, first, case.gapless)
    config = RefitConfig(
        transport=case.transport, bucket_mb=case.bucket_mb, streams=1, timeout_s=60.0, verify="full"
    )
    session = RefitSession.open(meeting, rank, lambda: endpoint, config)
    rows: list[dict[str, Any]] = []
    for version, place in enumerate(case.journey, start=1):
        if rank == 0:
            if place == "freed":
                next(iter(endpoint._held.values())).untyped_storage().resize_(0)
            elif version > 1 and place != case.journey[version - 2]:
                move(endpoint, held, place, case.gapless)
        before = torch.cuda.memory_allocated()
        if place == "freed":
            session.refit(version)
        record, wrong = refit_changed(session, endpoint, version)
        rows.append(
            {
                "place": place,
                "wrong": wrong,
                "transport": record.transport,
                "verified": record.bytes_verified,
                # Counted from the refit's beginning, the trainer's parameters included.
                "peak": torch.cuda.max_memory_allocated(),
                "before": before,
            }
        )
    session.close()
    return rows


def run(case: Case) -> list[Any]:
    """What the trainer and the engine report: a row a refit, or the error."""
    server = open_rendezvous("127.0.0.1", 1, 1)
    ranks = [(r, server.rendezvous, case) for r in range(2)]
    with closing(server), spawned(rank_main, ranks) as results:
        found = dict(results.get(timeout=150) for _ in ranks)
    return [found[0], found[1]]


@pytest.mark.parametrize(
    "case",
    [
        Case("p2p"),
        Case("ipc", tuple(place for place in JOURNEY if place not in ("pageable", "mixed"))),
        Case("golden"),
        # From GPU to GPU without staging, and from the host all the same in buckets.
        Case("p2p", ("gpu", "pinned", "gpu", "pageable", "gpu"), 6, 36 * 1024, gapless=True, bucket_mb=40),
    ],
    ids=["p2p", "ipc", "golden", "p2p, large weights"],
)
def test_parameters_travel_from_wherever_they_are(case: Case) -> None:
    trainer, engine = run(case)
    assert isinstance(trainer, list), trainer
    assert isinstance(engine, list), engine
    assert [row["wrong"] for row in engine] == [[] for _ in case.journey]
    assert {row["transport"] for row in (*trainer, *engine)} == {case.transport}
    assert all(row["verified"] >= case.nbytes for row in engine)
    buckets = 0 if case.transport == "ipc" else 2 * case.bucket_mb * MB
    for row in trainer:
        # Nothing of the model comes back to the GPU, and what was there before is not kept by the session.
        on_gpu = {"gpu": 1.0, "mixed": 0.5}.get(row["place"], 0.0) * case.nbytes
        assert row["before"] <= row["peak"] <= on_gpu + buckets + ALLOWANCE, row


def test_where_host_memory_is_pageable_auto_takes_p2p_and_ipc_says_why() -> None:
    trainer, engine = run(Case("auto", ("pageable", "pageable", "gpu")))
    assert [row["wrong"] for row in engine] == [[], [], []]
    assert {row["transport"] for row in (*trainer, *engine)} == {"p2p"}
    # It was ipc to begin with, and does not come back to it.
    trainer, engine = run(Case("auto", ("gpu", "pageable", "gpu")))
    assert isinstance(trainer, list), trainer
    assert isinstance(engine, list), engine
    assert [row["wrong"] for row in engine] == [[], [], []]
    assert (
        [row["transport"] for row in trainer] == [row["transport"] for row in engine] == ["ipc", "p2p", "p2p"]
    )
    trainer, _ = run(Case("ipc", ("gpu", "pageable")))
    assert trainer.startswith("TransportUnavailable")
    assert "w0 lies on cpu" in trainer


@pytest.mark.parametrize("transport", ["p2p", "ipc"])
def test_storage_that_was_freed_is_an_error_that_names_the_weight(transport: str) -> None:
    trainer, engine = run(Case(transport, ("gpu", "pinned", "freed")))
    assert trainer.startswith("RefitError: this weight was offloaded with its storage freed")
    assert "parameter w0" in trainer
    assert engine.startswith("PeerLost")


@pytest.mark.parametrize("transport", ["p2p", "ipc", "golden"])
def test_an_engine_in_host_memory_is_refused_by_name(transport: str) -> None:
    trainer, engine = run(Case(transport, ("gpu",), engine_away=True))
    assert engine.startswith("RefitError: this weight of the engine lies on cpu")
    assert "parameter w0" in engine
    assert trainer.startswith("PeerLost")
