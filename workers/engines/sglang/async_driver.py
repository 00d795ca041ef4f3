"""Refits of SGLang engines for coroutines.

The blocking driver runs in a thread while the event loop, in which SGLang's own coroutines have to run, goes on. No order of steps
is written here, so that nothing which one of the two does can be missing in the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ....integration.colocated.stages import KV_CACHE, WEIGHTS
from ....integration.config import RefitConfig
from ..common.loop_calls import in_thread
from .callers import EngineCaller
from .driver import DISCARDING, PauseMode, SglangRefit


class AsyncSglangRefit:
    """:class:`SglangRefit` for coroutines: the same calls, awaited. Make it with :meth:`open`."""

    def __init__(self, refit: SglangRefit) -> None:
        self.blocking = refit
        # A step at a time; SGLang's own locks know nothing of an order of steps.
        self._turn = asyncio.Lock()

    @staticmethod
    async def open(engine: Any, timeout_s: float = 300.0) -> AsyncSglangRefit:
        """For an ``sglang.Engine`` whose asynchronous methods are awaited in the running loop.

        Args:
            engine: the engine, or a :class:`~.callers.Caller` (of a server, say).
            timeout_s: as :class:`SglangRefit`'s.
        """
        caller = engine if hasattr(engine, "call") else EngineCaller(engine, asyncio.get_running_loop())
        return AsyncSglangRefit(await asyncio.to_thread(SglangRefit, caller, timeout_s))

    async def init_refit(
        self, rendezvous: dict[str, Any], first_rank: int, config: RefitConfig, engine: str = "nccl_xfer"
    ) -> list[dict[str, Any]]:
        """As :meth:`SglangRefit.init_refit`."""
        return await self.run(self.blocking.init_refit, rendezvous, first_rank, config, engine)

    async def refit(self, version: int, mode: PauseMode = "wait") -> list[dict[str, Any]]:
        """As :meth:`SglangRefit.refit`."""
        return await self.run(self.blocking.refit, version, mode)

    async def version(self) -> int:
        """As :attr:`SglangRefit.version`."""
        return await self.run(lambda: self.blocking.version)

    async def weight_version(self) -> str:
        """As :meth:`SglangRefit.weight_version`."""
        return await self.run(self.blocking.weight_version)

    async def require_servable(self) -> None:
        """As :meth:`SglangRefit.require_servable`."""
        await self.run(self.blocking.require_servable)

    async def asleep(self) -> frozenset[str]:
        """As :meth:`SglangRefit.asleep`."""
        return await self.run(self.blocking.asleep)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """As :meth:`SglangRefit.pause`."""
        await self.run(self.blocking.pause, mode)

    async def resume(self) -> None:
        """As :meth:`SglangRefit.resume`."""
        await self.run(self.blocking.resume)

    async def sleep(self, level: int = DISCARDING, mode: PauseMode | None = None) -> None:
        """As :meth:`SglangRefit.sleep`."""
        await self.run(self.blocking.sleep, level, mode)

    async def wake(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """As :meth:`SglangRefit.wake`."""
        await self.run(self.blocking.wake, tags)

    async def run[Result](self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Any blocking call that uses :attr:`blocking` (a sender's refit, a cycle's move), in a thread, with this one's CUDA device."""
        async with self._turn:
            # Steps that have begun go on in their thread, and others must not begin beside them.
            return await in_thread("a call of SGLang's driver", lambda: call(*arguments))
