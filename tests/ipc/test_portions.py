"""An engine works on what has landed while the rest is on its way. The driver is played, all above it is real."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrefit.integration.errors import VerificationError
from rlrefit.integration.plan import Message, Segment
from rlrefit.integration.transport.ipc import IpcTransport
from rlrefit.integration.transport.ipc.portions import PORTIONS, last_portions, portions_of
from tests.ipc.played_driver import PlayedDriver

from .test_pulling import BF16, Ranks, Weights, change, message, require_equal
from .test_pulling import driver as driver  # a fixture

ENGINE = 2
NAMES = [f"w{n}" for n in range(12)]
SHAPE = (8, 24)


def of_bytes(sizes: list[int]) -> list[Message]:
    return [Message(0, 1, 0, (Segment(f"w{i}", ((0, n),), 0, n),), n + 16, 0) for i, n in enumerate(sizes)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 1 << 40), max_size=40))
def test_portions_follow_each_other_and_what_is_left_after_each_falls_by_squares(sizes: list[int]) -> None:
    found = portions_of(of_bytes(sizes))
    assert found == sorted(found)
    assert set(found) <= set(range(PORTIONS))
    for portion in range(PORTIONS):
        later = [n for n, its in zip(sizes, found, strict=True) if its > portion]
        # The next message would be beyond the portion's end.
        assert sum(later) * PORTIONS**2 <= (PORTIONS - 1 - portion) ** 2 * sum(sizes)


def test_many_equal_messages_are_cut_as_their_squares_are() -> None:
    found = portions_of(of_bytes([100] * 64))
    assert [found.count(portion) for portion in range(PORTIONS)] == [15, 13, 11, 9, 7, 5, 3, 1]
    assert portions_of(of_bytes([100])) == [0]


def test_a_weight_has_landed_with_the_last_of_its_parts_from_any_sender() -> None:
    first, second = of_bytes([100] * 64), of_bytes([100] * 64)[::-1]
    assert last_portions({0: first}) == {
        m.segments[0].name: p for m, p in zip(first, portions_of(first), strict=True)
    }
    assert last_portions({0: first, 1: second}) == {
        f"w{n}": max(portions_of(first)[n], portions_of(first)[63 - n]) for n in range(64)
    }


class Scene:
    """Two trainers, with half of the weights each, and an engine that changes all bytes of a weight once that has landed whole."""

    def __init__(self, driver: PlayedDriver):
        shapes = dict.fromkeys(NAMES, (SHAPE, BF16))
        self.trainers = [Weights(driver, rank, shapes, shareable=True) for rank in range(2)]
        self.engine = Weights(driver, ENGINE, shapes, shareable=True)
        plan = [message(n % 2, ENGINE, {name: shapes[name]}) for n, name in enumerate(NAMES)]
        self.ranks = Ranks(driver, self.trainers, [self.engine], plan, timeout_s=60.0, landed=self.landed)
        self.ranks.bind()
        self.portions = self.ranks.transports[ENGINE].portions
        self.heard: list[int] = []
        self.has_heard = [threading.Event() for _ in range(PORTIONS)]
        for one in self.ranks.transports[:2]:
            for portion, launches in enumerate(one._launches):
                launches.insert(0, SimpleNamespace(launch=partial(self.begins, portion)))  # type: ignore[arg-type]

    def sent(self, name: str) -> torch.Tensor:
        return self.trainers[NAMES.index(name) % 2].read(name).view(torch.uint8)

    def held(self, name: str) -> torch.Tensor:
        return self.engine.read(name).view(torch.uint8)

    def begins(self, portion: int) -> None:
        """A trainer writes a portion: not before the engine has heard of the one before."""
        assert portion == 0 or self.has_heard[portion - 1].wait(60.0)

    def landed(self, portion: int) -> None:
        self.heard.append(portion)
        for name, last in self.portions.items():
            if last == portion:
                assert torch.equal(self.held(name), self.sent(name)), f"{name} has not landed"
                self.engine.write(name, (~self.held(name)).view(BF16))
            elif last > portion + 1:
                assert (self.held(name) == 0xFF).all(), (
                    f"{name} is written before the engine has heard of others"
                )
        self.has_heard[portion].set()

    def refit(self, seed: int) -> list[Any]:
        for number, trainer in enumerate(self.trainers):
            change(trainer, 2 * seed + number)
        self.engine.poison()
        self.heard.clear()
        for event in self.has_heard:
            event.clear()
        for rank in range(3):
            self.ranks.on(rank, IpcTransport.synchronize)
        with ThreadPoolExecutor(3) as threads:
            return [result for [result] in threads.map(self.ranks.run, range(3))]


@pytest.fixture
def scene(driver: PlayedDriver) -> Scene:
    return Scene(driver)


def test_an_engine_works_on_each_portion_that_has_landed_and_been_added_up_before_the_next_one_is_written(
    scene: Scene,
) -> None:
    assert set(scene.portions) == set(NAMES)
    assert len(set(scene.portions.values())) > 3
    for seed in range(2):
        results = scene.refit(seed)
        assert scene.heard == list(range(PORTIONS))
        assert all(torch.equal(~scene.held(name), scene.sent(name)) for name in NAMES)
        assert [result.verified_bytes for result in results][ENGINE] == results[ENGINE].payload_bytes
    scene.ranks.close()


@pytest.mark.parametrize("portion", [0, 3])
def test_a_byte_of_an_early_portion_that_changes_on_the_way_is_found(scene: Scene, portion: int) -> None:
    scene.refit(0)
    name = next(name for name, last in scene.portions.items() if last == portion)
    add_up = scene.ranks.transports[ENGINE]._landing.add_up

    def damaged(number: int, portions: Sequence[int]) -> None:
        if portion in portions:
            scene.engine.flip(name)
        add_up(number, portions)

    scene.ranks.transports[ENGINE]._landing.add_up = damaged  # type: ignore[method-assign,assignment]
    scene.portions = {}  # else it would be missed there
    with pytest.raises(VerificationError) as raised:
        scene.refit(1)
    assert (raised.value.rank, raised.value.parameter) == (ENGINE, name)


def test_of_a_void_refit_an_engine_works_on_nothing_once_it_knows(scene: Scene) -> None:
    scene.refit(0)
    one = scene.ranks.transports[0]
    one._memory = SimpleNamespace(still_mapped=lambda: True)  # type: ignore[assignment]
    assert one.check_during_run(lambda: True)
    for event in scene.has_heard:
        event.set()
    scene.heard.clear()
    for rank in range(3):
        scene.ranks.on(rank, IpcTransport.synchronize)
    # One after the other: the engine looks when all is over.
    assert [result.void for result in scene.ranks.run()] == [True, False, True]
    assert scene.heard == []


def test_engines_that_wait_for_all_are_told_once_beside_others(driver: PlayedDriver) -> None:
    part = dict.fromkeys(NAMES, (SHAPE, BF16))
    trainer = Weights(driver, 0, part, shareable=True)
    engines = [Weights(driver, rank, part, shareable=True) for rank in (1, 2)]
    heard: list[int] = []
    plan = [message(0, rank, {name: part[name]}) for rank in (1, 2) for name in NAMES]
    ranks = Ranks(driver, [trainer], engines, plan, landed=heard.append)
    ranks.transports[1]._landed = None
    ranks.bind()
    assert ranks.transports[1].portions == {}
    for seed in range(2):
        change(trainer, seed)
        for engine in engines:
            engine.poison()
        ranks.refit()
        for engine in engines:
            require_equal(trainer, engine)
    assert heard == [*range(PORTIONS)] * 2
    ranks.close()
