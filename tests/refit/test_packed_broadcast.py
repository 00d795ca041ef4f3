"""The packed broadcast of whole refits: two buckets at a time, whatever the loader does with what it gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rlrefit.integration.broadcast.buckets import Buckets
from rlrefit.integration.config import RefitConfig
from rlrefit.integration.errors import PeerLost, RefitError, VerificationError
from rlrefit.integration.layout import box_of
from rlrefit.integration.plan import CHECKSUM_BYTES
from rlrefit.integration.session import RefitSession
from rlrefit.integration.weights.manifest import TensorSpec

from .synthetic import Layout, SyntheticDestination, SyntheticSource, refit_changed, run_world, value_of

# Three weights fill a bucket of 1 MiB, and the large one has a bucket of its own.
SMALL = [TensorSpec(f"layers.{i}.weight", (75_000 - i,), torch.float32) for i in range(13)]
LARGE = TensorSpec("embedding", (700, 1000), torch.float32)
SPECS = [*SMALL[:7], LARGE, *SMALL[7:], TensorSpec("odd", (7, 3), torch.bfloat16)]
CONFIG = RefitConfig(bucket_mb=1, timeout_s=60.0, verify="full")

Weights = Iterable[tuple[str, torch.Tensor]]


class Engine(SyntheticDestination):
    """Loads as its ``loader`` does."""

    def __init__(self, specs: Sequence[TensorSpec], loader: Callable[[Engine, Weights], None]):
        super().__init__(specs, layout(specs))
        self.loader = loader
        self.kept: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, weights: Weights) -> None:
        self.loader(self, weights)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weights([(name, tensor)])


class Trainer(SyntheticSource):
    """Exports every weight; ``drawn`` is called before each."""

    def __init__(self, specs: Sequence[TensorSpec], drawn: Callable[[str], object] = lambda name: None):
        super().__init__(specs, layout(specs), {spec.name: "as the test wants it" for spec in specs})
        self.drawn = drawn

    def export(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().export(names):
            self.drawn(name)
            yield name, tensor


def layout(specs: Sequence[TensorSpec]) -> Layout:
    return {spec.name: [box_of(spec.shape)] for spec in specs}


def loads_at_once(engine: Engine, weights: Weights) -> None:
    for name, tensor in weights:
        engine.load(name, tensor)


def keeps_all(engine: Engine, weights: Weights) -> None:
    """As an engine that loads a layer once it is complete."""
    found = list(weights)
    engine.kept += found
    for name, tensor in found:
        engine.load(name, tensor)


def keeps_some(engine: Engine, weights: Weights) -> None:
    for place, (name, tensor) in enumerate(weights):
        engine.load(name, tensor)
        if place % 4 == 0:
            engine.kept.append((name, tensor.view(-1)[1:3]))


@pytest.mark.parametrize("engine", ["packed_broadcast", "nccl_xfer", "colocated_ipc"])
@pytest.mark.parametrize("loader", [loads_at_once, keeps_all, keeps_some])
def test_changed_weights_land_and_what_a_loader_keeps_stays_as_it_was(
    engine: str, loader: Callable[[Engine, Weights], None]
) -> None:
    def body(rank: int, session: RefitSession, endpoint: Any) -> None:
        for version in (1, 2, 3):
            record, wrong = refit_changed(session, endpoint, version)
            assert wrong == []
            if rank == 1:
                assert record.bytes_verified == record.bytes_misc == sum(spec.nbytes for spec in SPECS)

    engines = [Engine(SPECS, loader), Engine(SPECS, loads_at_once)]
    assert run_world([Trainer(SPECS)], engines, body, CONFIG, engine) == [None, None, None]
    by_name = {spec.name: spec for spec in SPECS}
    each = len(engines[0].kept) // 3
    for place, (name, tensor) in enumerate(engines[0].kept):
        whole = value_of(by_name[name], 1 + place // each)
        assert torch.equal(tensor, whole if loader is keeps_all else whole.view(-1)[1:3])


def test_two_buckets_are_taken_once_and_a_larger_weight_has_one_for_the_refit_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[list[int]] = [[], []]
    new = Buckets._new

    def counted(self: Buckets, nbytes: int) -> torch.Tensor:
        taken[self._rank].append(nbytes)
        return new(self, nbytes)

    monkeypatch.setattr(Buckets, "_new", counted)
    large = LARGE.nbytes + CHECKSUM_BYTES

    def body(rank: int, session: RefitSession, endpoint: Any) -> None:
        room = taken[rank][0]
        assert room <= 1 << 20
        assert taken[rank] == [room, room]
        for version in (1, 2, 3):
            refit_changed(session, endpoint, version)
            assert taken[rank] == [room, room] + [large] * version
        assert session.engine.held_bytes == 2 * room
        assert session.engine.staging_bytes == 2 * room + large

    worlds = [Trainer(SPECS)], [Engine(SPECS, loads_at_once)]
    assert run_world(*worlds, body, CONFIG, "packed_broadcast") == [None, None]


def test_a_rank_that_gives_memory_back_between_refits_holds_no_bucket() -> None:
    class Sleeper(Engine):
        gives_memory_back = True

    def body(rank: int, session: RefitSession, endpoint: Any) -> int:
        for version in (1, 2):
            assert refit_changed(session, endpoint, version)[1] == []
        return session.engine.held_bytes

    held = run_world([Trainer(SPECS)], [Sleeper(SPECS, loads_at_once)], body, CONFIG, "packed_broadcast")
    assert held[0] > 0
    assert held[1] == 0


def test_the_trainer_packs_a_bucket_while_one_travels_and_the_engine_loads_one_while_the_next_arrives() -> (
    None
):
    drawn = {name: threading.Event() for name in ("layers.5.weight", "layers.9.weight")}
    seen: list[bool] = []

    def loader(engine: Engine, weights: Weights) -> None:
        if not seen:
            # The end of the second bucket, before anybody takes the first one.
            seen.append(drawn["layers.5.weight"].wait(20))
        for name, tensor in weights:
            if name == "layers.1.weight" and len(seen) == 1:
                # The fourth bucket is packed once the second one has left; it arrived beside this one.
                seen.append(drawn["layers.9.weight"].wait(20))
            engine.load(name, tensor)

    trainer = Trainer(SMALL, lambda name: drawn[name].set() if name in drawn else None)
    results = run_world(
        [trainer],
        [Engine(SMALL, loader)],
        lambda rank, session, end: refit_changed(session, end, 1)[1],
        CONFIG,
        "packed_broadcast",
    )
    assert results == [[], []]
    assert seen == [True, True]


@pytest.mark.parametrize("engine", ["packed_broadcast", "colocated_ipc"])
@pytest.mark.parametrize("who", ["loader", "export"])
def test_a_fault_in_the_middle_of_the_second_refit_ends_it_on_all_ranks_at_once(
    who: str, engine: str
) -> None:
    """A bucket is on its way then, on one side or the other."""

    def loader(engine: Engine, weights: Weights) -> None:
        for name, tensor in weights:
            if who == "loader" and broken and name == "layers.4.weight":
                raise MemoryError("no room")
            engine.load(name, tensor)

    def drawn(name: str) -> None:
        if who == "export" and broken and name == "layers.7.weight":
            raise MemoryError("no room")

    broken: list[bool] = []
    trainer, engines = Trainer(SPECS, drawn), [Engine(SPECS, loader), Engine(SPECS, loads_at_once)]
    failed: list[float] = []

    def body(rank: int, session: RefitSession, endpoint: Any) -> None:
        assert refit_changed(session, endpoint, 1)[1] == []
        if rank == (1 if who == "loader" else 0):
            broken.append(True)
        try:
            refit_changed(session, endpoint, 2)
        finally:
            failed.append(time.monotonic())

    results = run_world([trainer], engines, body, CONFIG, engine)
    first = 1 if who == "loader" else 0
    assert isinstance(results[first], MemoryError)
    for error in results[:first] + results[first + 1 :]:
        assert isinstance(error, PeerLost)
        assert "no room" in str(error)
    assert max(failed) - min(failed) < 20


def test_bytes_that_change_on_the_way_name_a_weight_of_their_bucket_and_are_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived, count = Buckets.arrived, [0]

    def damaged(self: Buckets) -> torch.Tensor:
        bucket = arrived(self)
        count[0] += 1
        if count[0] == 2:
            bucket[100] ^= 1
        return bucket

    monkeypatch.setattr(Buckets, "arrived", damaged)
    loaded: list[str] = []

    def loader(engine: Engine, weights: Weights) -> None:
        for name, _ in weights:
            loaded.append(name)

    def body(rank: int, session: RefitSession, endpoint: Any) -> None:
        refit_changed(session, endpoint, 1)

    sent, found = run_world([Trainer(SMALL)], [Engine(SMALL, loader)], body, CONFIG, "packed_broadcast")
    assert isinstance(found, VerificationError)
    assert (found.parameter, found.rank, found.stage) == ("layers.3.weight", 1, "verify")
    assert loaded == [spec.name for spec in SMALL[:3]]
    assert isinstance(sent, RefitError)
