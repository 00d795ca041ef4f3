"""The order of what the benchmark does around a peer, on a device that works only when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlrefit.recipes.bench import measure
from rlrefit.recipes.bench.peers import PEERS, Peer
from rlrefit.recipes.bench.ranks import BenchRanks
from rlrefit.recipes.bench.scene import Scene


class OneRank(BenchRanks):
    """The only rank, whose kernels start in :attr:`queue` and run when the device is waited for at last."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def barrier(self) -> None:
        pass

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def maxima(self, numbers: Iterable[float]) -> list[float]:
        return list(numbers)

    def free(self) -> None:
        pass


class LazyScene:
    """A trainer and an engine with one number each as their weights."""

    def __init__(self) -> None:
        self.ranks = OneRank()
        self.options = SimpleNamespace(peer_refits=2)
        self.version, self.trainer, self.engine = 0, 0, -1
        self.opened = 0

    def advance(self) -> None:
        self.version += 1
        self.ranks.queue.append(lambda: setattr(self, "trainer", self.trainer + 1))

    def poison(self) -> None:
        self.ranks.queue.append(lambda: setattr(self, "engine", -1))

    def faults(self) -> list[str]:
        return [] if self.engine == self.version else [f"{self.engine} is not version {self.version}"]


class OtherStream(Peer):
    """Copies at once, whatever the benchmark's own stream still has to do."""

    name = "other-stream"

    @staticmethod
    def unavailable(scene: Scene) -> str:
        return ""

    def __init__(self, scene: Scene):
        self.scene = cast(Any, scene)
        self.scene.opened += 1

    def run(self) -> None:
        self.scene.engine = self.scene.trainer

    def close(self) -> None:
        self.scene.opened -= 1


class Forgetful(OtherStream):
    """Moves nothing."""

    name = "forgetful"

    def run(self) -> None:
        pass


def test_a_peer_with_streams_of_its_own_starts_when_the_weights_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PEERS, OtherStream.name, OtherStream)
    found = measure.peer(cast(Scene, LazyScene()), OtherStream.name)
    assert found.reason == ""
    assert found.timing is not None


def test_a_peer_whose_weights_are_wrong_is_closed_and_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, Forgetful.name, Forgetful)
    scene = LazyScene()
    found = measure.peer(cast(Scene, scene), Forgetful.name)
    assert found.timing is None
    assert found.reason == "not bit-exact in 1 places, the first on -1 is not version 1"
    assert scene.opened == 0
