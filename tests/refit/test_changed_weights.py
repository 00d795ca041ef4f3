"""Weights that change within an epoch: followed bit for bit, or refused by name on all ranks with nothing written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitMismatch
from rlrefit.integration.layout import Fragment
from rlrefit.integration.packing import Cast
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec
from rlrefit.workers.engines.transformers.destination import TransformersDestination
from rlrefit.workers.trainers.fsdp.source import FSDPSource
from tests.fsdp.models import smallest
from tests.spawn import run_ranks

from .synthetic import (
    SyntheticDestination,
    SyntheticSource,
    ended,
    held_by,
    move,
    refit_changed,
    rows,
    run_world,
    whole,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Change = Callable[[torch.Tensor], torch.Tensor]

SPECS = [
    TensorSpec("first", (6, 8), BF16),
    TensorSpec("changed", (12, 8), BF16),
    TensorSpec("router", (4, 8), BF16),
]
# Every way that carries weights on a CPU: (engine, transport).
WAYS = [
    ("nccl_xfer", "p2p"),
    ("nccl_xfer", "golden"),
    ("colocated_ipc", "auto"),
    ("packed_broadcast", "auto"),
]


def restrided(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory by other strides: columns that lie where rows lay."""
    return tensor.as_strided(tensor.shape, (1, tensor.shape[0]))


# What becomes something else than was agreed on, and what only lies otherwise.
OTHERS: dict[str, Change] = {
    "cast to another dtype": lambda t: t.to(FP16),
    "cast to a wider dtype": lambda t: t.to(FP32),
    "the same memory in another dtype": lambda t: t.view(FP16),
    "reshaped": lambda t: t.reshape(t.shape[::-1]),
    "cut": lambda t: t[:-1],
}
MOVES: dict[str, Change] = {
    "elsewhere": torch.clone,
    "the same memory by other strides": restrided,
}


def world() -> tuple[list[SyntheticSource], list[SyntheticDestination]]:
    """Two trainer ranks with a half each, and an engine; the router takes the misc path."""
    halves = [{s.name: rows(s.shape[0], 2, rank, 8) for s in SPECS} for rank in range(2)]
    sources = [SyntheticSource(SPECS, half, {"router": "MoE router"}) for half in halves]
    return sources, [SyntheticDestination(SPECS, whole(SPECS))]


def after_a_change(
    rank: int, change: Change, way: tuple[str, str], *, trains: bool
) -> list[tuple[BaseException | None, bool, int, bool, list[str]]]:
    """A refit, a change of one rank's weight, and a refit: the error of the latter if it has one, and what it left."""

    def body(own: int, session: RefitSession, endpoint: Any) -> Any:
        assert refit_changed(session, endpoint, 1)[1] == []
        held = held_by(endpoint)
        if own == rank:
            held.update({key: change(held[key]) for key in held if key[0] == "changed"})
        if session.world.is_source and trains:
            endpoint.set_version(2)
        before = {key: tensor.clone() for key, tensor in held.items()}
        error = ended(session, 2)
        same = all(torch.equal(tensor, before[key]) for key, tensor in held.items())
        wrong = [] if session.world.is_source or error else endpoint.wrong(2)
        return error, session.state.dirty, session.state.version, same, wrong

    return run_world(*world(), body, config_of(way), way[0])


def config_of(way: tuple[str, str]) -> RefitConfig:
    return RefitConfig(transport=way[1], bucket_mb=1, timeout_s=20.0, verify="full")


@pytest.mark.parametrize("way", WAYS, ids="/".join)
@pytest.mark.parametrize("rank", [1, 2], ids=["trainer", "engine"])
@pytest.mark.parametrize("move", MOVES)
def test_weights_that_only_lie_otherwise_are_followed_bit_for_bit(
    move: str, rank: int, way: tuple[str, str]
) -> None:
    error, dirty, version, _, wrong = after_a_change(rank, MOVES[move], way, trains=True)[2]
    assert (error, dirty, version, wrong) == (None, False, 2, [])


@pytest.mark.parametrize(
    ("rank", "way"),
    [(2, way) for way in WAYS] + [(1, way) for way in WAYS if way[0] != "packed_broadcast"],
    ids=lambda value: "/".join(value) if isinstance(value, tuple) else ("trainer", "engine")[value - 1],
)
@pytest.mark.parametrize("change", OTHERS)
def test_a_weight_that_becomes_another_is_named_on_all_ranks_and_nothing_is_written(
    change: str, rank: int, way: tuple[str, str]
) -> None:
    results = after_a_change(rank, OTHERS[change], way, trains=False)
    for error, *_ in results:
        assert isinstance(error, RefitMismatch)
        assert (error.parameter, error.stage) == ("changed", "bind")
    _, dirty, version, same, _ = results[2]
    assert (dirty, version, same) == (False, 1, True)


@pytest.mark.parametrize("way", WAYS, ids="/".join)
def test_an_export_in_another_dtype_is_refused_by_name_and_the_engine_is_dirty(way: tuple[str, str]) -> None:
    def body(own: int, session: RefitSession, endpoint: Any) -> Any:
        assert refit_changed(session, endpoint, 1)[1] == []
        if session.world.is_source:
            export = endpoint.export
            endpoint.export = lambda names: ((n, t.half() if n == "router" else t) for n, t in export(names))
        return ended(session, 2), session.state.dirty

    results = run_world(*world(), body, config_of(way), way[0])
    for error, _ in results[:2]:
        assert isinstance(error, RefitMismatch | PeerLost)
    # One of the trainer ranks sees it first, and the others may see it too or hear of that.
    assert "router" in {error.parameter for error, _ in results[:2]}
    assert isinstance(results[2][0], PeerLost)
    assert results[2][1]


def test_a_weight_that_moves_on_one_rank_and_changes_on_another_is_named_on_all() -> None:
    def body(own: int, session: RefitSession, endpoint: Any) -> Any:
        assert refit_changed(session, endpoint, 1)[1] == []
        move(endpoint)
        if own == 2:
            held = held_by(endpoint)
            held.update({key: held[key].to(FP16) for key in held if key[0] == "changed"})
        return ended(session, 2)

    for error in run_world(*world(), body):
        assert isinstance(error, RefitMismatch)
        assert error.parameter == "changed"


@pytest.mark.parametrize(("transport", "delta"), [("p2p", "off"), ("golden", "off"), ("p2p", "always")])
def test_a_weight_whose_place_another_tensor_has_taken_is_encoded_from_there(
    transport: str, delta: str
) -> None:
    spec, kept = SPECS[0], np.zeros(SPECS[0].shape, dtype=np.float32)

    class Casting(SyntheticSource):
        """One that keeps in FP32 what it sends in BF16, always at one address, in a new tensor for each version."""

        def set_version(self, version: int) -> None:
            [key] = self._held
            self._held.clear()
            self._held[key] = torch.from_numpy(kept)
            super().set_version(version)

        def fragments(self) -> tuple[list[Fragment], dict[str, str]]:
            held, refused = super().fragments()
            return [replace(fragment, encoding=Cast(BF16)) for fragment in held], refused

    class Promising(SyntheticDestination):
        def rewritten(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
            return {}

        def poison(self) -> None:
            """Not between refits: a sparse one builds on what is there."""

    def body(own: int, session: RefitSession, endpoint: Any) -> list[Any]:
        return [refit_changed(session, endpoint, version)[1] for version in (1, 2, 3)]

    config = RefitConfig(transport=transport, delta=delta, bucket_mb=1, timeout_s=20.0, verify="full")
    source = Casting([spec], whole([spec]))
    source.set_version(0)
    assert run_world([source], [Promising([spec], whole([spec]))], body, config) == [[[]] * 3] * 2


class Pair:
    """A transformers model as an FSDP trainer of one rank, and another as an engine, in threads of this process."""

    def __init__(self, dtype: torch.dtype | None = None):
        self.trained, self.served = smallest().to(BF16), smallest().to(BF16)
        for model in (self.trained, self.served):
            model.register_buffer("shift", torch.zeros(3, dtype=BF16))
        self.source = FSDPSource(self.trained, dtype)
        self.destination = TransformersDestination(self.served, 0, 1)

    def step(self) -> None:
        """Change all weights of the trainer, and poison the engine's."""
        with torch.no_grad():
            for tensor in self.trained.state_dict().values():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.copy_(torch.randn(local.shape))
            for tensor in self.served.state_dict().values():
                tensor.fill_(float("nan"))

    def differing(self) -> list[str]:
        """Weights of the engine that are not, bit for bit, what the trainer exports."""
        exported = dict(self.source.export([spec.name for spec in self.source.specs()]))
        served = self.served.state_dict()
        return [name for name, tensor in exported.items() if not torch.equal(tensor, served[name])]

    def refit_around(
        self, change: Callable[[Pair], object], way: tuple[str, str]
    ) -> tuple[list[BaseException | None], bool]:
        """A refit, a change, and a refit: the errors of the latter on both ranks, and whether the engine is dirty."""
        self.step()

        def body(rank: int, session: RefitSession, _: Any) -> Any:
            session.refit(1)
            if rank == 1:
                assert self.differing() == []
                change(self)
                self.step()
            # The trainer goes on once the engine's thread has changed both models.
            session._channel.barrier("changed")
            return ended(session, 2), session.state.dirty

        results = run_world([self.source], [self.destination], body, config_of(way), way[0])
        return [error for error, _ in results], results[1][1]


def replaced(model: torch.nn.Module, path: str, dtype: torch.dtype) -> None:
    """Put a new parameter object in the place of one, as quantizers and adapters do."""
    owner, _, leaf = path.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, leaf, torch.nn.Parameter(getattr(module, leaf).detach().to(dtype, copy=True)))


def transposed(model: torch.nn.Module, path: str) -> None:
    parameter = model.get_parameter(path)
    parameter.data = restrided(parameter.data)


HEAD = "lm_head.weight"


def reviewed(pair: Pair) -> None:
    pair.served.lm_head.weight.data = pair.served.lm_head.weight.data.view(FP16)


REFUSED: dict[str, Callable[[Pair], object]] = {
    "all": lambda pair: pair.served.half(),
    "a new parameter": lambda pair: replaced(pair.served, HEAD, FP16),
    "a buffer": lambda pair: pair.served.register_buffer("shift", pair.served.shift.half()),
    "the same memory": reviewed,
}
FOLLOWED: dict[str, Callable[[Pair], object]] = {
    "the engine's new parameter": lambda pair: replaced(pair.served, HEAD, BF16),
    "the engine's new buffer": lambda pair: pair.served.register_buffer("shift", pair.served.shift.clone()),
    "the engine's strides": lambda pair: transposed(pair.served, HEAD),
    "the trainer's new parameter": lambda pair: replaced(pair.trained, HEAD, BF16),
    "the trainer's strides": lambda pair: transposed(pair.trained, HEAD),
    # The shards are cast to what was agreed on as they are packed.
    "the trainer's dtype": lambda pair: pair.trained.half(),
    "the trainer's wider dtype": lambda pair: pair.trained.float(),
}


# What a model of each side makes of it does not depend on the way: the other tests go all of them.
@pytest.mark.parametrize("way", [WAYS[0], WAYS[-1]], ids="/".join)
@pytest.mark.parametrize("change", [*REFUSED, *FOLLOWED])
def test_models_that_hold_their_weights_otherwise_are_followed_bit_for_bit_or_refused_by_name_and_clean(
    change: str, way: tuple[str, str]
) -> None:
    pair = Pair()
    errors, dirty = pair.refit_around((REFUSED | FOLLOWED)[change], way)
    assert not dirty
    if change in FOLLOWED:
        assert errors == [None, None]
        assert pair.differing() == []
    for error in errors:
        assert change in FOLLOWED or (isinstance(error, RefitMismatch) and error.parameter)


def _under_fsdp2(_: int) -> dict[str, Any]:
    """What becomes of the weights of a trainer whose parameters are DTensors, one world after another in this process."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {}
    changes: dict[str, Change] = {**MOVES, "dtype": torch.Tensor.half, "same memory": lambda t: t.view(FP16)}
    for name, change in changes.items():
        pair = Pair()
        fully_shard(pair.trained)
        pair.source = FSDPSource(pair.trained)

        def changed(pair: Pair, change: Change = change) -> None:
            parameter = pair.trained.get_parameter(HEAD)
            assert isinstance(parameter.data, DTensor)
            parameter._local_tensor.data = change(parameter._local_tensor.data)

        errors, dirty = pair.refit_around(changed, ("nccl_xfer", "p2p"))
        found[name] = list(map(repr, errors)), dirty, [] if any(errors) else pair.differing()
    return found


def test_shards_under_fsdp2_that_lie_otherwise_are_followed_bit_for_bit() -> None:
    (found,) = run_ranks(_under_fsdp2, 1)
    assert [*found.values()] == [(["None", "None"], False, [])] * 4
