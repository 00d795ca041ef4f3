"""What a driver needs of an ``AsyncLLM`` that vLLM 0.21 has no public call for: every replica's answers, and its last output.

With data parallelism ``AsyncLLM`` asks all engine cores and returns the first one's answer, whatever the others said. And
``pause_generation`` returns 20 ms after the cores are idle, also where their outputs still wait to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from ....integration.errors import RefitError


class EngineCores:
    """All engine cores of one ``AsyncLLM``, a core for each data-parallel replica that it manages."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Answers of all workers of all replicas, in the order of their refit ranks.

        Raises:
            RefitError: the engine ended meanwhile.
        """
        answers = await self._ask("collective_rpc", method, None, arguments, None)
        return [answer for of_replica in answers for answer in of_replica]

    async def reset_prefix_cache(self, *, connector: bool) -> bool:
        """Have all replicas drop their prefixes, those of running requests too; False if one keeps some.

        Raises:
            RefitError: the engine ended meanwhile.
            Exception: vLLM's own, where blocks stay held.
        """
        return all(await self._ask("reset_prefix_cache", True, connector))

    async def outputs_processed(self) -> None:
        """Return once all outputs have been processed that the cores gave before.

        Raises:
            RefitError: the engine ended meanwhile.
        """
        core = self._llm.engine_core
        mark = _Mark(core.engine_ranks_managed[0])
        core.outputs_queue.put_nowait(mark)
        await self.while_alive(mark.reached)

    async def _ask(self, utility: str, *arguments: Any) -> list[Any]:
        core = self._llm.engine_core
        asked = (core._call_utility_async(utility, *arguments, engine=engine) for engine in core.core_engines)
        return await self.while_alive(all_answers(asked))

    async def while_alive[Answer](self, work: Awaitable[Answer]) -> Answer:
        """What ``work`` gives; of an engine that has ended vLLM would let it wait for ever.

        Raises:
            RefitError: the engine ended meanwhile.
        """
        task = asyncio.ensure_future(work)
        # Of an engine built outside an event loop it starts with the first request only, and it alone ends with a core.
        self._llm._run_output_handler()
        try:
            await asyncio.wait({task, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RefitError(
                    "the engine ended, or its outputs are read no longer, before it answered; vLLM's log has the cause. "
                    "Start it anew",
                    stage="engine",
                )
            return task.result()
        finally:
            task.cancel()


async def all_answers[Answer](asked: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """What all give; also where one fails, the others' answers are awaited: until then their workers are at work.

    Raises:
        BaseException: the first that failed, in the order of asking.
    """
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: list[Answer] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    return found


class _Mark:
    """Stands behind all outputs that came before it, in vLLM's own queue; who looks at it has processed those.

    To vLLM it is a core's step without outputs and statistics.
    """

    scheduler_stats = None
    timestamp = 0.0

    def __init__(self, engine_index: int) -> None:
        self.engine_index = engine_index
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def outputs(self) -> tuple[()]:
        if not self.reached.done():
            self.reached.set_result(None)
        return ()
