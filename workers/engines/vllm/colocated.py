"""vLLM engines whose memory sleeps while a trainer has the GPUs.

Start them before the trainer takes memory, with ``enable_sleep_mode=True`` and :data:`~.driver.EXTENSION`: vLLM
measures what is free when it starts, and sizes its KV cache by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from ....integration.colocated.memory import ProcessMemory
from ....integration.colocated.stages import TAGS, StageRefused
from ....integration.errors import RefitError
from ..common.awaited import LoopCalls
from .async_driver import AsyncVllmDriver, all_answers, none_begins
from .driver import VllmDriver


class VllmSleeper:
    """One or more engines of ``vllm.LLM`` as the cycle sees them.

    Args:
        drivers: of the engines that share GPUs with the trainer.

    Raises:
        RefitError: an engine was started without sleep mode.
    """

    def __init__(self, drivers: Sequence[VllmDriver]) -> None:
        self._drivers = list(drivers)
        _require_sleep_mode(self._drivers)

    def sleep(self, level: int) -> None:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.sleep`.

        Raises:
            StageRefused: requests are unfinished, whose tokens vLLM would drop.
        """
        _require_idle(self._drivers)
        for driver in self._drivers:
            driver.sleep(level)

    def wake(self, tags: Sequence[str]) -> None:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.wake`; CUDA graphs of vLLM never sleep.

        Raises:
            StageRefused: vLLM knows no such tag, or its memory is there already: it would pass over the call.
        """
        _require_asleep(tags, [driver.asleep() for driver in self._drivers])
        for driver in self._drivers:
            driver.wake_up(tags)

    def asleep(self) -> frozenset[str]:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.asleep`."""
        return frozenset().union(*(driver.asleep() for driver in self._drivers))

    def empty_cache(self) -> None:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.empty_cache`."""
        for driver in self._drivers:
            driver.empty_cache()

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """As :meth:`~rlrefit.integration.colocated.stages.SleepingEngine.memory`."""
        return _numbered(driver.memory(restart=restart) for driver in self._drivers)


class AwaitedVllmSleeper:
    """One or more engines of ``AsyncLLM``, each with all its data-parallel replicas, as the cycle sees them.

    Its calls block and are for other threads than the event loop's, which has to answer them: those of
    :class:`~..common.awaited.AwaitedCycle`, or of a blocking cycle beside the loop.

    Args:
        drivers: as :class:`VllmSleeper`'s.
        loop: the engines'; the running one if left out.

    Raises:
        RefitError: as :class:`VllmSleeper`'s.
    """

    def __init__(
        self, drivers: Sequence[AsyncVllmDriver], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._drivers = list(drivers)
        _require_sleep_mode(self._drivers)
        self._calls = LoopCalls(loop)

    def sleep(self, level: int) -> None:
        """As :meth:`VllmSleeper.sleep`; requests that come from here on wait until all is awake."""

        async def sleep() -> None:
            async with none_begins(self._drivers):
                _require_idle(self._drivers)
                await self._on_all(lambda driver: driver.sleep_now(level))

        self._calls.wait(sleep)

    def wake(self, tags: Sequence[str]) -> None:
        """As :meth:`VllmSleeper.wake`; with the last of it the requests run that wait.

        Raises:
            StageRefused: as there, or such requests would run on weights that are no version's.
        """

        async def wake() -> None:
            async with none_begins(self._drivers):
                _require_asleep(tags, await self._on_all(lambda driver: driver.asleep()))
                await self._on_all(lambda driver: driver.require_runnable(tags))
                await self._on_all(lambda driver: driver.wake_up_now(tags))

        self._calls.wait(wake)

    def asleep(self) -> frozenset[str]:
        """As :meth:`VllmSleeper.asleep`."""
        found = self._calls.wait(lambda: self._on_all(lambda driver: driver.asleep()))
        return frozenset().union(*found)

    def empty_cache(self) -> None:
        """As :meth:`VllmSleeper.empty_cache`."""
        self._calls.wait(lambda: self._on_all(lambda driver: driver.empty_cache()))

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """As :meth:`VllmSleeper.memory`; of each engine's replicas in turn."""
        return _numbered(
            self._calls.wait(lambda: self._on_all(lambda driver: driver.memory(restart=restart)))
        )

    async def _on_all[Answer](self, call: Callable[[AsyncVllmDriver], Awaitable[Answer]]) -> list[Answer]:
        return await all_answers([call(driver) for driver in self._drivers])


def _require_sleep_mode(drivers: Sequence[VllmDriver | AsyncVllmDriver]) -> None:
    if still := [number for number, driver in enumerate(drivers) if not driver.sleeps]:
        raise RefitError(
            f"engine {', '.join(map(str, still))} was started without enable_sleep_mode: vLLM would pass over every sleep in "
            "silence, and the trainer would find no memory. Start it with enable_sleep_mode=True",
            stage="settings",
        )


def _require_idle(drivers: Sequence[VllmDriver | AsyncVllmDriver]) -> None:
    if busy := [number for number, driver in enumerate(drivers) if driver.busy]:
        raise StageRefused(
            f"engine {', '.join(map(str, busy))} has unfinished requests, and sleep would abort them: their tokens "
            "would be lost. Nothing has changed; let generate() return first",
            stage="sleep",
        )


def _require_asleep(tags: Sequence[str], asleep: Sequence[frozenset[str]]) -> None:
    wrong = sorted(set(tags) - TAGS)
    there = sorted({tag for of_engine in asleep for tag in set(tags) & TAGS - of_engine})
    if wrong or there:
        raise StageRefused(
            f"vLLM would pass over this wake-up of {', '.join(tags)} as a whole: "
            + (f"it knows no {', '.join(wrong)}" if wrong else f"{', '.join(there)} is awake already")
            + f". Nothing has changed; its tags are {', '.join(sorted(TAGS))}, each once after a sleep",
            stage="wake_up",
        )


def _numbered(answers: Iterable[Sequence[dict[str, Any]]]) -> list[ProcessMemory]:
    found = [answer for of_engine in answers for answer in of_engine]
    return [ProcessMemory(**{**answer, "process": f"engine rank {i}"}) for i, answer in enumerate(found)]
