"""An engine and a trainer that share a device of limited memory, which is counted and not there."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rlrefit.integration.colocated.memory import ProcessMemory
from rlrefit.integration.colocated.stages import KV_CACHE, TAGS, WEIGHTS
from rlrefit.integration.records.record import RefitRecord

WEIGHTS_SIZE, KV_SIZE, OPTIMIZER_SIZE = 20, 60, 70


def in_a_loop(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(scene)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(scene(*arguments, **named), 60))

    return run


class OutOfMemory(RuntimeError):
    """As torch's, which is a RuntimeError too."""


class Device:
    """Counts what is held, by whom; caches stay until they are emptied.

    Attributes:
        calls: what was called, in order.
        fails: name of a call that breaks off, and how.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held: dict[str, int] = {}
        self.cached: dict[str, int] = {"trainer": 0, "engine": 0}
        self.peak = 0
        self.calls: list[str] = []
        self.fails: dict[str, BaseException] = {}

    @property
    def used(self) -> int:
        return sum(self.held.values()) + sum(self.cached.values())

    def take(self, what: str, size: int) -> None:
        if self.used + size > self.total:
            raise OutOfMemory(f"{what} takes {size}, and {self.total - self.used} of {self.total} are free")
        self.held[what] = size
        self.peak = max(self.peak, self.used)

    def give(self, what: str, owner: str) -> None:
        self.cached[owner] += self.held.pop(what, 0)

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails.pop(name)

    def told(self, process: str, restart: bool) -> list[ProcessMemory]:
        own = sum(size for what, size in self.held.items() if what.startswith(process.split()[0]))
        peak, total = self.peak, self.total
        if restart:
            self.peak = self.used
        return [ProcessMemory(process, "GPU-0", own, own, own, own, self.used, peak, total)]


class PoolEngine:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.level = 0
        self._asleep: set[str] = set()
        for tag in TAGS:
            device.take(f"engine {tag}", _SIZES[tag])

    def sleep(self, level: int) -> None:
        self._device.call("sleep")
        self.level = level
        for tag in TAGS:
            del self._device.held[f"engine {tag}"]
        self._asleep = set(TAGS)

    def wake(self, tags: Sequence[str]) -> None:
        self._device.call(f"wake {' '.join(tags)}")
        for tag in tags:
            self._device.take(f"engine {tag}", _SIZES[tag])
            self._asleep.remove(tag)

    def asleep(self) -> frozenset[str]:
        return frozenset(self._asleep)

    def empty_cache(self) -> None:
        self._device.call("empty engine")
        self._device.cached["engine"] = 0

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        return self._device.told("engine rank 0", restart)


class PoolTrainer:
    def __init__(self, device: Device) -> None:
        self._device = device

    def onload(self) -> None:
        self._device.call("onload")
        for what, size in (("weights", WEIGHTS_SIZE), ("optimizer", OPTIMIZER_SIZE)):
            if f"trainer {what}" not in self._device.held:
                self._device.take(f"trainer {what}", size)

    def offload(self) -> None:
        self._device.call("offload")
        self._device.give("trainer optimizer", "trainer")

    def free(self) -> None:
        self._device.call("free")
        self._device.give("trainer weights", "trainer")

    def empty_cache(self) -> None:
        self._device.call("empty trainer")
        self._device.cached["trainer"] = 0

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        return self._device.told("trainer rank 0", restart)


class TrainersElsewhere:
    """Trainer ranks that share no memory with the engine."""

    def onload(self) -> None:
        pass

    offload = free = empty_cache = onload

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        return []


def refit_on(device: Device) -> Callable[[int], list[RefitRecord]]:
    def refit(version: int) -> list[RefitRecord]:
        device.call(f"refit {version}")
        return [
            RefitRecord(version, 0, rank, role, "colocated_ipc", "ipc", 1, 0, 1, 0, 0.1)
            for rank, role in enumerate(("trainer", "generation"))
        ]

    return refit


_SIZES = {WEIGHTS: WEIGHTS_SIZE, KV_CACHE: KV_SIZE}
