"""The colocated cycle for coroutines: of engines that are awaited, vLLM's ``AsyncLLM`` first.

The blocking cycle runs in a thread while the event loop, in which the engine's own coroutines have to run, goes on. No order of
moves is written here, so that nothing which one of the two does can be missing in the other.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ....integration.colocated.cycle import ColocatedCycle
from ....integration.colocated.stages import ColocatedTrainer, SleepingEngine, StageState
from ....integration.records.record import RefitRecord
from .loop_calls import LoopCalls, in_thread


class AwaitedCycle:
    """:class:`~...integration.colocated.ColocatedCycle` for coroutines: the same calls, awaited. Make it with :meth:`open`.

    What is asked for while a move is under way is refused as there. The callbacks of the cycle run in its threads.

    A caller that is cancelled waits until the move has ended, so that the stage is known then. Work of :meth:`train` and
    :meth:`generate` is cancelled too; every other move goes on to its end, as the workers do.

    Attributes:
        blocking: the cycle, for threads.
    """

    def __init__(self, blocking: ColocatedCycle, calls: LoopCalls) -> None:
        self.blocking = blocking
        self._calls = calls

    @staticmethod
    async def open(
        engine: SleepingEngine,
        trainer: ColocatedTrainer,
        refit: Callable[[int], Awaitable[Sequence[RefitRecord]]],
        **settings: Any,
    ) -> AwaitedCycle:
        """Make one in the running loop.

        Args:
            engine: as :class:`ColocatedCycle`'s; called in threads (:class:`~..vllm.colocated.AwaitedVllmSleeper`).
            trainer: the same; called in threads.
            refit: as there, awaited in the loop.
            settings: as there.

        Raises:
            StageError: as there.
        """
        calls = LoopCalls()

        def make() -> ColocatedCycle:
            return ColocatedCycle(
                engine, trainer, lambda version: calls.wait(lambda: refit(version)), **settings
            )

        return AwaitedCycle(await in_thread("the cycle's start", make), calls)

    @property
    def state(self) -> StageState:
        """The present stage, and what may follow."""
        return self.blocking.state

    async def to_training(self) -> None:
        """As the blocking cycle's."""
        await in_thread("to_training", self.blocking.to_training)

    async def to_generation(self, version: int) -> list[RefitRecord]:
        """As the blocking cycle's."""
        return await in_thread("to_generation", lambda: self.blocking.to_generation(version))

    async def sleep(self) -> None:
        """As the blocking cycle's."""
        await in_thread("sleep", self.blocking.sleep)

    async def load_trainer(self) -> None:
        """As the blocking cycle's."""
        await in_thread("load_trainer", self.blocking.load_trainer)

    async def train[Result](self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do the trainer's work, awaited in the loop: of a call that blocks, ``lambda: asyncio.to_thread(step)``."""
        return await self._worked("train", self.blocking.train, work)

    async def offload_trainer(self) -> None:
        """As the blocking cycle's."""
        await in_thread("offload_trainer", self.blocking.offload_trainer)

    async def wake_weights(self) -> None:
        """As the blocking cycle's."""
        await in_thread("wake_weights", self.blocking.wake_weights)

    async def wake_all(self) -> None:
        """As the blocking cycle's."""
        await in_thread("wake_all", self.blocking.wake_all)

    async def refit(self, version: int) -> list[RefitRecord]:
        """As the blocking cycle's."""
        return await in_thread("refit", lambda: self.blocking.refit(version))

    async def free_trainer(self) -> None:
        """As the blocking cycle's."""
        await in_thread("free_trainer", self.blocking.free_trainer)

    async def wake_kv_cache(self) -> None:
        """As the blocking cycle's."""
        await in_thread("wake_kv_cache", self.blocking.wake_kv_cache)

    async def generate[Result](self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do the engine's work, awaited in the loop; all that is to run at once goes into one call."""
        return await self._worked("generate", self.blocking.generate, work)

    async def _worked[Result](
        self,
        name: str,
        move: Callable[[Callable[[], Result]], Result],
        work: Callable[[], Awaitable[Result]],
    ) -> Result:
        futures: list[concurrent.futures.Future[Result]] = []
        stopped = False

        def begun(future: concurrent.futures.Future[Result]) -> None:
            futures.append(future)
            if stopped:
                future.cancel()

        def stop() -> None:
            nonlocal stopped
            stopped = True
            for future in futures:
                future.cancel()

        return await in_thread(name, lambda: move(lambda: self._calls.wait(work, begun)), stop)
