"""Whether requests of an ``AsyncLLM`` may begin: not while weights or memory change under them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)


class Admission:
    """Who holds ``lock`` begins a request, or does what changes the engine as a whole."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        # What is under way; the event loop alone would let go of it.
        self._task: asyncio.Task[Any] | None = None

    async def alone[Result](self, what: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """What ``work`` returns; requests that come meanwhile wait, and other calls of this method.

        A caller that is cancelled cannot stop the workers. The work then goes on to its end without it, requests wait until
        then, and the log tells how ``what`` ended.
        """
        await self.lock.acquire()
        task = self._task = asyncio.create_task(work())
        task.add_done_callback(lambda _: self.lock.release())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(_tell, what))
            raise


def _tell(what: str, task: asyncio.Task[Any]) -> None:
    """To the log: there is no caller left."""
    error = "the event loop ended" if task.cancelled() else task.exception()
    if error is None:
        logger.warning("%s, whose caller was cancelled, has succeeded", what)
    else:
        logger.error("%s, whose caller was cancelled, has failed: %s", what, error)
