"""Blocking calls for coroutines, and coroutines for blocking calls: threads and an event loop that wait for each other.

The order of steps of a refit and of a colocated cycle is written once, in blocking code. For engines that are awaited (vLLM's
``AsyncLLM``, SGLang's coroutines) that code runs in a thread, while the event loop goes on to run the engine's coroutines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from ....integration.colocated.cycle import ColocatedCycle
from ....integration.colocated.stages import ColocatedTrainer, SleepingEngine, StageState
from ....integration.errors import RefitError
from ....integration.records.record import RefitRecord

logger = logging.getLogger(__name__)

# Seconds between two checks that the loop still runs.
_LOOK_S = 1.0


class Forwarded:
    """The public methods of another object, each called through ``run``.

    A property becomes a method without arguments, because reading it may wait as well.

    Args:
        target: the object.
        run: gets a method's name and the call to make, and returns the call's result or an awaitable of it.

    Attributes:
        blocking: the object.
    """

    def __init__(self, target: Any, run: Callable[[str, Callable[[], Any]], Any]) -> None:
        self.blocking = target
        self._run = run

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name == "blocking" or not hasattr(type(self.blocking), name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        def forwarded(*args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                found = getattr(self.blocking, name)
                return found(*args, **kwargs) if callable(found) else found

            return self._run(name, call)

        return forwarded


class AwaitedCycle(Forwarded):
    """:class:`~rlrefit.integration.colocated.cycle.ColocatedCycle` for coroutines. Make it with :meth:`open`.

    Every method of the cycle is a coroutine here. Calls made during a move raise as there. The callbacks of the cycle run in
    its threads.

    A caller that is cancelled waits until the move has ended, so that the stage is known then. The work of :meth:`train` and
    :meth:`generate` is cancelled too; every other move runs to its end, as the workers do.

    Attributes:
        blocking: the cycle, for threads.
    """

    def __init__(self, blocking: ColocatedCycle, calls: LoopCalls) -> None:
        super().__init__(blocking, in_thread)
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
        state: StageState = self.blocking.state
        return state

    async def train[Result](self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do the trainer's work, awaited in the loop: of a call that blocks, ``lambda: asyncio.to_thread(step)``."""
        return await self._worked("train", self.blocking.train, work)

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


class LoopCalls:
    """Runs coroutines in a running event loop, for threads beside it.

    Args:
        loop: the running one if left out.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()

    def wait[Result](
        self,
        work: Callable[[], Awaitable[Result]],
        begun: Callable[[concurrent.futures.Future[Result]], object] = lambda future: None,
    ) -> Result:
        """The result of ``work`` in the loop; ``begun`` gets the future by which it can be cancelled.

        Raises:
            CancelledError: asyncio's, which is an interrupt: the work was cancelled, and has ended.
            RefitError: called in the loop's own thread, which would wait for itself; or the loop no longer runs.
        """
        if _running() is self._loop:
            raise RefitError(
                "a blocking call was made in the event loop that has to answer it, and would wait for itself. Nothing was asked; "
                "call it in a thread (asyncio.to_thread), or await rlrefit.workers.engines.common.awaited.AwaitedCycle there",
                stage="settings",
            )
        self._require_running()

        async def awaited() -> Result:
            return await work()

        future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        begun(future)
        while not concurrent.futures.wait([future], _LOOK_S).done:
            self._require_running()
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise asyncio.CancelledError(str(error)) from error

    def _require_running(self) -> None:
        if not self._loop.is_running():
            raise RefitError(
                "the event loop in which the engine is awaited no longer runs, so nothing answers. Keep it running until the cycle's "
                "calls have returned, and start a new engine and a new cycle in the next loop",
                stage="engine",
            )


async def in_thread[Result](
    name: str, work: Callable[[], Result], cancelled: Callable[[], object] = lambda: None
) -> Result:
    """The result of ``work`` in a thread with the caller's CUDA device, while the loop goes on.

    A thread can't be cancelled. If the caller is, ``cancelled`` is called, which may end the work early; the caller then waits
    for the end, and a failure is logged with ``name``.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    steps = asyncio.ensure_future(asyncio.to_thread(_on_device, device, work))
    try:
        return await asyncio.shield(steps)
    except asyncio.CancelledError:
        cancelled()
        # In a loop, because each further cancellation ends the wait.
        while not steps.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([steps])
        if not steps.cancelled() and (error := steps.exception()) is not None:
            logger.warning("%s, whose caller was cancelled, has failed: %s", name, error)
        raise


def _on_device[Result](device: int | None, work: Callable[[], Result]) -> Result:
    """A new thread has the first device, whatever the caller's is."""
    if device is not None:
        torch.cuda.set_device(device)
    return work()


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
