"""A vLLM engine whose memory sleeps while a trainer has the GPUs.

Start it before the trainer takes memory, with ``enable_sleep_mode=True`` and :data:`~..vllm.driver.EXTENSION`: vLLM
measures what is free when it starts, and sizes its KV cache by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...integration.errors import RefitError
from ...integration.stage_memory import ProcessMemory
from ...integration.stages import TAGS, StageRefused
from ..vllm.driver import VllmDriver


class VllmSleeper:
    """One or more vLLM engines as the cycle sees them.

    Args:
        drivers: of the engines that share GPUs with the trainer.

    Raises:
        RefitError: an engine was started without sleep mode.
    """

    def __init__(self, drivers: Sequence[VllmDriver]) -> None:
        self._drivers = list(drivers)
        if still := [number for number, driver in enumerate(self._drivers) if not driver.sleeps]:
            raise RefitError(
                f"engine {', '.join(map(str, still))} was started without enable_sleep_mode: vLLM would pass over every sleep in "
                "silence, and the trainer would find no memory. Start it with enable_sleep_mode=True",
                stage="settings",
            )

    def sleep(self, level: int) -> None:
        """As :meth:`~...integration.stages.SleepingEngine.sleep`.

        Raises:
            StageRefused: requests are unfinished, whose tokens vLLM would drop.
        """
        if busy := [number for number, driver in enumerate(self._drivers) if driver.busy]:
            raise StageRefused(
                f"engine {', '.join(map(str, busy))} has unfinished requests, and sleep would abort them: their tokens "
                "would be lost. Nothing has changed; let generate() return first",
                stage="sleep",
            )
        for driver in self._drivers:
            driver.sleep(level)

    def wake(self, tags: Sequence[str]) -> None:
        """As :meth:`~...integration.stages.SleepingEngine.wake`; CUDA graphs of vLLM never sleep.

        Raises:
            StageRefused: vLLM knows no such tag, or its memory is there already: it would pass over the call.
        """
        wrong = sorted(set(tags) - TAGS)
        there = sorted({tag for driver in self._drivers for tag in set(tags) & TAGS - driver.asleep()})
        if wrong or there:
            raise StageRefused(
                f"vLLM would pass over this wake-up of {', '.join(tags)} as a whole: "
                + (f"it knows no {', '.join(wrong)}" if wrong else f"{', '.join(there)} is awake already")
                + f". Nothing has changed; its tags are {', '.join(sorted(TAGS))}, each once after a sleep",
                stage="wake_up",
            )
        for driver in self._drivers:
            driver.wake_up(tags)

    def asleep(self) -> frozenset[str]:
        """As :meth:`~...integration.stages.SleepingEngine.asleep`."""
        return frozenset().union(*(driver.asleep() for driver in self._drivers))

    def empty_cache(self) -> None:
        """As :meth:`~...integration.stages.SleepingEngine.empty_cache`."""
        for driver in self._drivers:
            driver.empty_cache()

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """As :meth:`~...integration.stages.SleepingEngine.memory`."""
        found = [answer for driver in self._drivers for answer in driver.memory(restart=restart)]
        return [ProcessMemory(**{**answer, "process": f"engine rank {i}"}) for i, answer in enumerate(found)]
