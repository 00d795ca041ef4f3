"""The driver of an ``AsyncLLM``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from ....integration.config import RefitConfig
from ....integration.errors import EngineDirty, RefitError
from ..common.answers import raise_refit_errors
from .admission import Admission
from .compat import SERVER, SERVER_HOLDS, require_driver
from .driver_state import (
    KEPT,
    DriverState,
    PauseMode,
    cut_off,
    described,
    one_version,
    others_workers,
    stale_prefixes,
)
from .engine_cores import EngineCores
from .patches import DROPPED, require_kept_tokens
from .sleeping import AsyncSleepCalls
from .token_versions import Generated

logger = logging.getLogger(__name__)


class AsyncVllmDriver(AsyncSleepCalls, DriverState):
    """Drives a ``vllm.v1.engine.async_llm.AsyncLLM``; as :class:`~.driver_blocking.VllmDriver`.

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
        self._admission = Admission()
        # Where the outputs of running requests come.
        self._queues: dict[str, Any] = {}

    async def init_refit(
        self,
        rendezvous: dict[str, Any],
        first_rank: int,
        config: RefitConfig,
        engine: str = "nccl_xfer",
    ) -> list[dict[str, Any]]:
        """As :meth:`~.driver_blocking.VllmDriver.init_refit`."""
        arguments = (rendezvous, first_rank, asdict(config), self._checked(engine))
        try:
            await self.asleep()
        except RefitError:
            raise
        except Exception as error:
            raise others_workers(error) from error
        answers = await self._rpc("init_per_pp_refit_comm_group", *arguments)
        self._engine, self._adapter = engine, config.lora == "adapter"
        return answers

    async def refit(self, version: int, mode: PauseMode = "keep") -> list[dict[str, Any]]:
        """As :meth:`~.driver_blocking.VllmDriver.refit`; requests that come meanwhile wait.

        A caller that is cancelled is as :meth:`~.admission.Admission.alone` has it: the refit goes on to its end.
        """
        method = self._method
        if mode == "keep":
            require_kept_tokens(self._llm.vllm_config)
        return await self._admission.alone(f"refit {version}", lambda: self._refit(method, version, mode))

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
        """As :meth:`~.driver_blocking.VllmDriver.serving_version`."""
        return one_version(await self._rpc("refit_serving_version"))

    async def close_refit(self) -> None:
        """End the epoch on all workers."""
        await self._rpc("close_refit")
        self._engine = ""

    async def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        return raise_refit_errors(await self._cores.ask_workers(method, *arguments))

    async def _refit(self, method: str, version: int, mode: PauseMode) -> list[dict[str, Any]]:
        earlier, self._unusable = self._unusable, cut_off(version)
        received = False
        try:
            # What sleeps is paused, and has ended what ran. To be paused anew, data-parallel replicas take steps together,
            # without tokens and in memory that is not there.
            if not await self.asleep():
                await self._llm.pause_generation(mode=mode, clear_cache=False)
            await self._cores.outputs_processed()
            records = await self._rpc(method, version)
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
            logger.warning("after refit %d failed, the engine stays paused: %s", version, described(error))
            return False
        self._unusable = None
        return True

    async def _resume(self) -> None:
        # Where memory sleeps, waking it resumes.
        if not await self.asleep():
            await self._llm.resume_generation()

    def _end_requests(self, error: BaseException) -> None:
        """Let nobody wait for tokens of an engine that stays paused."""
        self._unusable = error
        for queue in self._queues.values():
            queue.put(
                EngineDirty(
                    f"a refit failed in the middle of this request: {described(error)}", stage="generate"
                )
            )

    async def _reset_caches(self) -> None:
        config = self._llm.vllm_config
        try:
            done = await self._cores.reset_prefix_cache(connector=config.kv_transfer_config is not None)
        except Exception as error:
            raise stale_prefixes(described(error)) from error
        if not done:
            raise stale_prefixes(KEPT)
        if config.model_config.is_multimodal_model:
            await self._llm.reset_encoder_cache()
