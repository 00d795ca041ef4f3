"""Weights whose memory does not hold their values, or holds several of them in one place: they travel right, or are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, PlanError, RefitMismatch
from rlrefit.integration.layout import box_of
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec

from .synthetic import (
    SyntheticDestination,
    SyntheticSource,
    ended,
    held_by,
    pair,
    refit_changed,
    refit_versions,
    run_world,
)

CONJUGATE = TensorSpec("conjugate", (4, 6), torch.complex64)
NEGATIVE = TensorSpec("negative", (5, 3), torch.bfloat16)
LARGE = TensorSpec("complex", (3, 7), torch.complex128)
PLAIN = TensorSpec("plain", (7, 2), torch.float32)
SPECS = [CONJUGATE, PLAIN, NEGATIVE, LARGE]
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "p2p": ("nccl_xfer", {"transport": "p2p"}),
    "golden": ("nccl_xfer", {"transport": "golden"}),
    "delta": ("nccl_xfer", {"transport": "p2p", "delta": "always"}),
    "delta by masks": ("nccl_xfer", {"transport": "p2p", "delta": "always", "delta_base": "optimizer"}),
    "colocated buckets": ("colocated_ipc", {"transport": "p2p"}),
    "broadcast": ("packed_broadcast", {}),
}


class Engine(SyntheticDestination):
    """Leaves alone what a refit has written."""

    def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        return {}


def world() -> tuple[SyntheticSource, Engine]:
    (source,), (destination,) = pair(SPECS)
    destination.__class__ = Engine
    return source, destination  # type: ignore[return-value]


def make_lazy(endpoint: Any, *specs: TensorSpec) -> None:
    """These weights of a rank show the conjugate or negative of what their memory holds."""
    held = held_by(endpoint)
    for spec in specs:
        key = spec.name, box_of(spec.shape)
        held[key] = held[key].conj() if spec.dtype.is_complex else torch._neg_view(held[key])
        assert held[key].is_conj() or held[key].is_neg()


def config(fields: dict[str, str]) -> RefitConfig:
    return RefitConfig(bucket_mb=1, timeout_s=20.0, verify="full", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("way", WAYS)
def test_lazy_conjugates_and_negatives_and_elements_of_16_bytes_land_bit_for_bit(way: str, side: str) -> None:
    source, destination = world()
    make_lazy(source if side == "trainer" else destination, CONJUGATE, NEGATIVE)
    engine, fields = WAYS[way]

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        routes = {entry.spec.name: entry.route for entry in session.manifest}
        return routes, [wrong for _, wrong, _ in refit_versions(1, 2, 3)(rank, session, endpoint)]

    results = run_world([source], [destination], body, config(fields), engine)
    assert [wrong for _, wrong in results] == [[[]] * 3] * 2
    misc = {"conjugate", "negative"} | ({"complex"} if "delta" in fields else set())
    if engine != "packed_broadcast":
        assert {name for name, route in results[1][0].items() if route == "misc"} == misc


@pytest.mark.parametrize("way", WAYS)
def test_an_expanded_weight_of_an_engine_is_refused_by_name_before_anything_is_planned(way: str) -> None:
    source, destination = world()
    held_by(destination)["plain", box_of(PLAIN.shape)] = torch.zeros(1, 2).expand(*PLAIN.shape)
    engine, fields = WAYS[way]
    lost, refused = run_world([source], [destination], lambda *_: None, config(fields), engine)
    assert (type(refused), refused.parameter, refused.stage) == (PlanError, "plain", "plan")
    assert (type(lost), lost.blamed) == (PeerLost, 1)


@pytest.mark.parametrize("way", ["p2p", "golden", "delta", "delta by masks"])
def test_an_expanded_weight_of_a_trainer_is_read_as_it_shows(way: str) -> None:
    source, destination = world()
    key = "plain", box_of(PLAIN.shape)
    row = torch.zeros(1, 2)
    held_by(source)[key] = row.expand(*PLAIN.shape)

    def body(rank: int, session: RefitSession, endpoint: Any) -> list[bool]:
        found = []
        for version in (1, 2, 3):
            if rank == 0:
                row.fill_(version)
            else:
                endpoint.poison()
            session.refit(version)
            found.append(rank == 0 or bool((held_by(endpoint)[key] == version).all()))
        return found

    assert run_world([source], [destination], body, config(WAYS[way][1])) == [[True] * 3] * 2


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("transport", ["p2p", "golden"])
def test_a_weight_that_becomes_lazy_or_expanded_within_an_epoch_is_refused_by_name_and_nothing_is_written(
    transport: str, side: str
) -> None:
    source, destination = world()

    def become(endpoint: Any) -> None:
        held = held_by(endpoint)
        held["negative", box_of(NEGATIVE.shape)] = torch._neg_view(
            held["negative", box_of(NEGATIVE.shape)].clone()
        )

    def body(rank: int, session: RefitSession, endpoint: Any) -> Any:
        refit_changed(session, endpoint, 1)
        if (side == "trainer") == (rank == 0):
            become(endpoint)
        return ended(session, 2), session.state.dirty

    results = run_world([source], [destination], body, config({"transport": transport}))
    blamed = 0 if side == "trainer" else 1
    for error, dirty in results:
        assert (type(error), error.parameter, error.blamed) == (RefitMismatch, "negative", blamed)
        assert not dirty
