"""What an engine's actor answers of its sleep where a trainer shares its GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ...integration.colocated.memory import ProcessMemory
from ...integration.colocated.stages import SleepingEngine


class SleepCalls(ABC):
    """The methods that :class:`~..workers.colocated.called.CalledEngine` calls."""

    @property
    @abstractmethod
    def sleeper(self) -> SleepingEngine:
        """This process's engine, or its part of one."""

    def sleep(self, level: int) -> None:
        self.sleeper.sleep(level)

    def wake(self, tags: list[str]) -> None:
        self.sleeper.wake(tags)

    def asleep(self) -> frozenset[str]:
        return self.sleeper.asleep()

    def empty_cache(self) -> None:
        self.sleeper.empty_cache()

    def memory(self, restart: bool) -> list[ProcessMemory]:
        return list(self.sleeper.memory(restart=restart))
