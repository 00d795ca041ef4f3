"""The drivers' calls around vLLM's sleep mode, and what each of them leaves in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ....integration.colocated.stages import StageRefused
from ....integration.errors import RefitError
from .admission import Admission
from .engine_cores import EngineCores


class SleepCalls(ABC):
    """Of a driver of ``vllm.LLM``."""

    _llm: Any

    @abstractmethod
    def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Answers of all workers."""

    def asleep(self) -> frozenset[str]:
        """What of ``weights`` and ``kv_cache`` has no memory on any worker at the moment."""
        return _on_any_worker(self._rpc("refit_asleep"))

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._llm.llm_engine.has_unfinished_requests())

    @property
    def sleeps(self) -> bool:
        """Whether vLLM can give its memory back; without its sleep mode a sleep on a GPU is passed over in silence."""
        return _can_sleep(self._llm.llm_engine.vllm_config)

    def sleep(self, level: int) -> None:
        """Give weights and KV cache back, as ``LLM.sleep`` does; running requests would be aborted."""
        self._llm.sleep(level=level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory for ``weights``, ``kv_cache`` or both; requests run again once nothing sleeps."""
        self._llm.wake_up(tags=list(tags))

    def empty_cache(self) -> None:
        """Have all workers give back what their allocators cache."""
        self._rpc("refit_empty_cache")

    def memory(self, *, restart: bool = False) -> list[dict[str, Any]]:
        """Of each worker, fields of a ``ProcessMemory``; ``restart`` lets the peaks count anew from here."""
        return self._rpc("refit_memory", restart)


class AsyncSleepCalls(ABC):
    """Of a driver of ``AsyncLLM``, all of whose data-parallel replicas each call reaches."""

    _llm: Any
    _cores: EngineCores
    _admission: Admission
    _queues: dict[str, Any]
    _unusable: BaseException | None

    @abstractmethod
    async def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Answers of all workers."""

    @abstractmethod
    async def serving_version(self) -> int:
        """As the driver's."""

    async def asleep(self) -> frozenset[str]:
        """As :meth:`SleepCalls.asleep`."""
        return _on_any_worker(await self._rpc("refit_asleep"))

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished, those too that wait for a paused engine."""
        return bool(self._llm.output_processor.request_states)

    @property
    def sleeps(self) -> bool:
        """As :attr:`SleepCalls.sleeps`."""
        return _can_sleep(self._llm.vllm_config)

    async def sleep(self, level: int) -> None:
        """Give weights and KV cache back, as ``AsyncLLM.sleep`` does; running requests would be aborted.

        A refit under way ends first. Requests that come from here on wait until all is awake. A caller that is cancelled is
        as one of :meth:`~.driver_async.AsyncVllmDriver.refit`.
        """
        await self._admission.alone(f"sleep (level {level})", lambda: self.sleep_now(level))

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory for ``weights``, ``kv_cache`` or both; as :meth:`sleep`.

        Raises:
            StageRefused: as :meth:`require_runnable`.
        """

        async def wake_up() -> None:
            await self.require_runnable(tags)
            await self.wake_up_now(tags)

        await self._admission.alone(f"wake_up ({', '.join(tags)})", wake_up)

    async def sleep_now(self, level: int) -> None:
        """As :meth:`sleep`, where :func:`none_begins`."""
        await self._cores.while_alive(self._llm.sleep(level=level))

    async def wake_up_now(self, tags: Sequence[str]) -> None:
        """As :meth:`wake_up`, where :func:`none_begins` and after :meth:`require_runnable`."""
        await self._cores.while_alive(self._llm.wake_up(tags=list(tags)))

    async def require_runnable(self, tags: Sequence[str]) -> None:
        """To be called before a wake-up: with the last of it vLLM runs the requests that wait.

        Raises:
            StageRefused: there are such requests, and weights that are no version's, on which a step ends vLLM's core.
        """
        if self._unusable is not None and self._queues:
            # A refit's failure has told their callers already.
            await self._llm.abort(list(self._queues))
        if not self.busy or await self.asleep() - set(tags):
            return
        try:
            await self.serving_version()
        except RefitError as error:
            raise StageRefused(
                f"with {' and '.join(tags)} awake the engine would run the requests that wait, and it holds no version whole "
                f"({error}), so that the first step would end it. Nothing has changed; wake the weights alone and refit first, "
                "or end those requests",
                stage="wake_up",
            ) from error

    async def empty_cache(self) -> None:
        """As :meth:`SleepCalls.empty_cache`."""
        await self._rpc("refit_empty_cache")

    async def memory(self, *, restart: bool = False) -> list[dict[str, Any]]:
        """As :meth:`SleepCalls.memory`."""
        return await self._rpc("refit_memory", restart)


@asynccontextmanager
async def none_begins(drivers: Sequence[AsyncSleepCalls]) -> AsyncIterator[None]:
    """No request and no refit of these engines, nor a sleep of one alone, begins within it, nor is one beginning."""
    async with AsyncExitStack() as held:
        for driver in drivers:
            await held.enter_async_context(driver._admission.lock)
        yield


def _on_any_worker(answers: Sequence[dict[str, Any]]) -> frozenset[str]:
    return frozenset(tag for answer in answers for tag in answer["asleep"])


def _can_sleep(vllm_config: Any) -> bool:
    return bool(vllm_config.model_config.enable_sleep_mode) or vllm_config.device_config.device_type == "cpu"
