"""The driver of an ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from ....integration.colocated.stages import StageRefused
from ....integration.config import RefitConfig
from ....integration.errors import EngineDirty, RefitError
from ..common.answers import raise_refit_errors
from .compat import SERVER, SERVER_HOLDS, require_driver
from .driver import BaseDriver, Generated, PauseMode, one_version
from .patches import DROPPED, require_kept_tokens

logger = logging.getLogger(__name__)


class AsyncVllmDriver(BaseDriver):
    """Drives a ``vllm.v1.engine.async_llm.AsyncLLM``; as :class:`~.driver.VllmDriver`.

    With data parallelism it drives all replicas that the engine manages: their workers are refitted together, and each
    answers for itself.

    Raises:
        RefitError: the engine was started without rlrefit's workers, with a cache that no refit drops (:mod:`.connectors`), or
            of a vLLM that lacks what the driver uses.
    """

    def __init__(self, engine: Any) -> None:
        require_driver(engine, SERVER, SERVER_HOLDS)
        super().__init__(engine.vllm_config)
        self._llm = engine
        self._cores = EngineCores(engine)
        # Closed while weights move, so that no request begins with an unknown version.
        self._admission = _Admission()
        # Where the outputs of running requests come.
        self._queues: dict[str, Any] = {}

    async def join_refit(
        self,
        rendezvous: dict[str, Any],
        first_rank: int,
        config: RefitConfig,
        engine: str = "nccl_xfer",
    ) -> list[dict[str, Any]]:
        """As :meth:`~.driver.VllmDriver.join_refit`."""
        try:
            await self.asleep()
        except RefitError:
            raise
        except Exception as error:
            raise self._no_answer(error) from error
        answers = await self._rpc("join_refit", rendezvous, first_rank, asdict(config), engine)
        self._met(engine, config)
        return answers

    async def refit(self, version: int, mode: PauseMode = "keep") -> list[dict[str, Any]]:
        """As :meth:`~.driver.VllmDriver.refit`; requests that come meanwhile wait.

        A caller that is cancelled is as :meth:`_Admission.alone` has it: the refit goes on to its end.
        """
        self._require_joined()
        if mode == "keep":
            require_kept_tokens(self._vllm_config)
        return await self._admission.alone(f"refit {version}", lambda: self._refit(version, mode))

    async def generate(
        self, prompt: Any, parameters: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Generated]:
        """Outputs of one request as they grow, as ``AsyncLLM.generate`` yields them; the last one is finished.

        Raises:
            ValueError: ``parameters.output_kind`` is ``DELTA``, whose outputs do not hold all tokens.
            EngineDirty: a refit failed, before or meanwhile, and left the engine paused.
        """
        if parameters.output_kind.name == "DELTA":
            raise ValueError(
                "parameters.output_kind: DELTA gives each token once, so that its place among the versions is not known; "
                "use CUMULATIVE or FINAL_ONLY"
            )
        async with self._admission.lock:
            self._require_usable()
            asked = self._asked(lora_request)
            queue = await self._llm.add_request(request_id, prompt, parameters, lora_request=asked)
            self._versions.begin(request_id, self.version)
            self._queues[request_id] = queue
        finished = False
        try:
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield self._versions.of(output)
        finally:
            self._versions.end(request_id)
            del self._queues[request_id]
            if not finished:
                await self._llm.abort(request_id)

    async def serving_version(self) -> int:
        """As :meth:`~.driver.VllmDriver.serving_version`."""
        return one_version(await self._rpc("refit_serving_version"))

    async def close_refit(self) -> None:
        """End the epoch on all workers."""
        await self._rpc("close_refit")
        self._engine = ""

    async def asleep(self) -> frozenset[str]:
        """As :meth:`~.driver.VllmDriver.asleep`."""
        return self._on_any_worker(await self._rpc("refit_asleep"))

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished, those too that wait for a paused engine."""
        return bool(self._llm.output_processor.request_states)

    async def sleep(self, level: int) -> None:
        """Give weights and KV cache back, as ``AsyncLLM.sleep`` does; running requests would be aborted.

        A refit under way ends first. Requests that come from here on wait until all is awake. A caller that is cancelled is
        as one of :meth:`refit`.
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
        """As :meth:`~.driver.VllmDriver.empty_cache`."""
        await self._rpc("refit_empty_cache")

    async def memory(self, *, restart: bool = False) -> list[dict[str, Any]]:
        """As :meth:`~.driver.VllmDriver.memory`."""
        return await self._rpc("refit_memory", restart)

    async def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        return raise_refit_errors(await self._cores.ask_workers(method, *arguments))

    async def _refit(self, version: int, mode: PauseMode) -> list[dict[str, Any]]:
        earlier, self._unusable = self._unusable, self._cut_off(version)
        received = False
        try:
            # What sleeps is paused, and has ended what ran. To be paused anew, data-parallel replicas take steps together,
            # without tokens and in memory that is not there.
            if not await self.asleep():
                await self._llm.pause_generation(mode=mode, clear_cache=False)
            await self._cores.outputs_processed()
            records = await self._rpc("refit", version)
            self.version, received = version, True
            await self._reset_caches()
            await self._rpc(DROPPED, version)
            self._versions.refitted(self._llm.output_processor.request_states, version)
            await self._resume()
        except BaseException as error:
            # Nothing more is asked of the engine where the event loop ends.
            asked = isinstance(error, Exception) and not received and earlier is None
            if not (asked and await self._serves_on(version)):
                self._end_requests(error)
            raise
        self._unusable = None
        return records

    async def _serves_on(self, version: int) -> bool:
        """Resume where all workers hold the weights whole that were there before a refit to ``version`` failed."""
        try:
            self.version = await self.serving_version()
            if self.version == version:
                return False
            await self._resume()
        except Exception as error:
            logger.warning(
                "after refit %d failed, the engine stays paused: %s", version, self._described(error)
            )
            return False
        self._unusable = None
        return True

    async def _resume(self) -> None:
        # Where memory sleeps, waking it resumes.
        if not await self.asleep():
            await self._llm.resume_generation()

    def _end_requests(self, error: BaseException) -> None:
        """End the waits of running requests: the engine stays paused."""
        self._unusable = error
        for queue in self._queues.values():
            queue.put(
                EngineDirty(
                    f"a refit failed in the middle of this request: {self._described(error)}",
                    stage="generate",
                )
            )

    async def _reset_caches(self) -> None:
        config = self._vllm_config
        try:
            done = await self._cores.reset_prefix_cache(connector=config.kv_transfer_config is not None)
        except Exception as error:
            raise self._stale_prefixes(error) from error
        if not done:
            raise self._stale_prefixes()
        if config.model_config.is_multimodal_model:
            await self._llm.reset_encoder_cache()


@asynccontextmanager
async def none_begins(drivers: Sequence[AsyncVllmDriver]) -> AsyncIterator[None]:
    """A context in which no request, refit or sleep of these engines begins."""
    async with AsyncExitStack() as held:
        for driver in drivers:
            await held.enter_async_context(driver._admission.lock)
        yield


class _Admission:
    """Lets either a request begin, or one call that changes the engine as a whole; each holds ``lock`` meanwhile."""

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


class EngineCores:
    """All engine cores of one ``AsyncLLM``, a core for each data-parallel replica that it manages.

    vLLM 0.21 has no public call for what a driver needs of them. With data parallelism ``AsyncLLM`` asks all cores and returns
    the first one's answer, whatever the others said. And its ``pause_generation`` returns 20 ms after the cores are idle, also where
    their outputs still wait to be read.
    """

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
        """What ``work`` returns. If the engine ends meanwhile, vLLM alone would let it wait for ever.

        Raises:
            RefitError: the engine ended meanwhile.
        """
        task = asyncio.ensure_future(work)
        # If the engine was built outside an event loop, the handler starts with the first request only. It ends with a core.
        self._llm._run_output_handler()
        try:
            await asyncio.wait({task, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RefitError(
                    "the engine ended before it answered, or its outputs are no longer read. vLLM's log has the cause. "
                    "Start the engine anew",
                    stage="engine",
                )
            return task.result()
        finally:
            task.cancel()


async def all_answers[Answer](asked: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """What all return. If one fails, the others are awaited all the same, since their workers are busy until then.

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
    """An entry of vLLM's own queue of outputs. When vLLM reads it, all outputs before it have been processed.

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
