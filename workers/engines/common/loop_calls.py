"""From threads into an event loop, and from an event loop into threads, each waiting for the other's end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Awaitable, Callable

import torch

from ....integration.errors import RefitError

logger = logging.getLogger(__name__)

# Between two looks whether a loop still runs that something is waited for.
_LOOK_S = 1.0


class LoopCalls:
    """Has a running event loop do coroutines, for threads beside it.

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
        """What ``work`` gives in the loop; ``begun`` is told what cancels it.

        Raises:
            CancelledError: asyncio's, which is an interrupt: the work was cancelled, and has ended.
            RefitError: called in the loop's own thread, which would wait for itself; or the loop runs no longer.
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
                "the event loop in which the engine is awaited runs no longer, so that nothing answers. Keep it running until the "
                "cycle's calls have returned, and start the engine and the cycle anew in the next one",
                stage="engine",
            )


async def in_thread[Result](
    name: str, work: Callable[[], Result], cancelled: Callable[[], object] = lambda: None
) -> Result:
    """What ``work`` gives in a thread, with this one's CUDA device, while the loop goes on.

    Threads can't be cancelled: where the caller is, it waits for the end, and the log tells of a failure by ``name``.
    ``cancelled`` is called then, which may lead to the end.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    steps = asyncio.ensure_future(asyncio.to_thread(_on_device, device, work))
    try:
        return await asyncio.shield(steps)
    except asyncio.CancelledError:
        cancelled()
        # Often, since each further cancellation ends the wait.
        while not steps.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([steps])
        if not steps.cancelled() and (error := steps.exception()) is not None:
            logger.warning("%s, whose caller was cancelled, has failed: %s", name, error)
        raise


def _on_device[Result](device: int | None, work: Callable[[], Result]) -> Result:
    """A thread begins with the first device, whatever the caller's is."""
    if device is not None:
        torch.cuda.set_device(device)
    return work()


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
