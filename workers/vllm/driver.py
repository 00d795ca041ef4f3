"""The driver's side: refit a running ``LLM`` or ``AsyncLLM``, also in the middle of requests.

A refit pauses the scheduler, has the workers receive the weights, drops what was computed with the old ones (prefixes,
encoder outputs), and resumes. The keys and values of running requests are computed anew before their next token, so
every token comes from one version alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from ...integration.config import RefitConfig
from ...integration.errors import EngineDirty, RefitError
from .answers import raise_refit_errors
from .preemption import require_kept_tokens
from .sleeping import SleepCalls
from .token_versions import Generated, TokenVersions

EXTENSION = "rlrefit.workers.vllm.extension.VllmRefitExtension"
# keep: requests go on with the new weights; wait: they end with the old ones first; abort: they end as they are.
PauseMode = Literal["keep", "wait", "abort"]
_METHODS = {
    "nccl_xfer": "nccl_xfer_refit",
    "colocated_ipc": "nccl_xfer_refit",
    "packed_broadcast": "update_weights_from_collective",
}


class _Driver:
    """What both kinds share.

    Attributes:
        version: of the weights that the engine serves, or -1 before the first refit.
    """

    def __init__(self) -> None:
        self.version = -1
        self._engine = ""
        # Whether the refits bring an adapter, which a request has to ask for.
        self._adapter = False
        self._versions = TokenVersions()
        # What a refit left that failed: until one succeeds, nothing is generated.
        self._unusable: RefitError | None = None

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise EngineDirty(
                f"the last refit failed and left the engine paused, so that nothing would be generated: "
                f"{self._unusable}. Refit again, which resumes it, or start the engine anew",
                stage="generate",
            )

    def _asked(self, lora_request: Any) -> Any:
        """The adapter of a request: the trainer's where refits bring one and the caller names none."""
        if lora_request is not None or not self._adapter:
            return lora_request
        from .lora import lora_request as trainers

        return trainers(self.version)

    @property
    def _method(self) -> str:
        if not self._engine:
            raise RefitError(
                "no trainer has been met: call init_refit with the rendezvous that trainer rank 0 opened",
                stage="handshake",
            )
        return _METHODS[self._engine]

    @staticmethod
    def _checked(engine: str) -> str:
        if engine not in _METHODS:
            raise RefitError(f"engine: {engine!r} is not one of {', '.join(_METHODS)}", stage="settings")
        return engine


class VllmDriver(SleepCalls, _Driver):
    """Drives a ``vllm.LLM`` whose workers have :class:`~.extension.VllmRefitExtension`.

    Start it with ``worker_extension_cls=driver.EXTENSION``, or with ``weight_transfer_config=plugin.transfer_config()``.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._llm = llm
        self._paused = False
        self._finished: list[Any] = []
        # Here and not in the first refit: an engine without rlrefit's workers has nothing that guards its weights.
        self._rpc("refit_asleep")

    def init_refit(
        self,
        rendezvous: dict[str, Any],
        first_rank: int,
        config: RefitConfig,
        engine: str = "nccl_xfer",
    ) -> list[dict[str, Any]]:
        """Have all workers meet the trainer; ``first_rank`` is the refit rank of the first of them.

        Raises:
            RefitError: of the kind that the worker raised. Nothing has been written.
        """
        arguments = (rendezvous, first_rank, asdict(config), self._checked(engine))
        answers = self._rpc("init_per_pp_refit_comm_group", *arguments)
        self._engine, self._adapter = engine, config.lora == "adapter"
        return answers

    def refit(self, version: int, mode: PauseMode = "keep") -> list[dict[str, Any]]:
        """Have all workers receive the weights, and serve ``version`` from here on.

        Args:
            version: the same as on the trainer.
            mode: what becomes of running requests.

        Returns:
            The workers' records.

        Raises:
            RefitError: of the kind that the worker raised. If weights were written in part the engine stays paused,
                :meth:`generate` refuses, and the next refit that succeeds resumes it.
        """
        method, engine = self._method, self._llm.llm_engine
        # Nothing runs while memory sleeps, so that there is nothing to wait for and nothing to end.
        mode = "keep" if self.asleep() else mode
        if engine.has_unfinished_requests():
            if mode == "keep":
                require_kept_tokens(engine.vllm_config)
            self._pause(mode)
            self._drain()
        try:
            records = self._rpc(method, version)
        except RefitError as error:
            if self._servable():
                self._resume()
            else:
                self._unusable = error
            raise
        self.version = version
        try:
            self._reset_caches()
        except RefitError as error:
            self._pause("keep")
            self._unusable = error
            raise
        self._versions.refitted(engine.output_processor.request_states, version)
        self._unusable = None
        self._resume()
        return records

    def generate(
        self,
        prompts: Sequence[Any],
        parameters: Any,
        between_steps: Callable[[], None] | None = None,
        lora_request: Any = None,
    ) -> list[Generated]:
        """Generate as ``LLM.generate`` does; results are in the order of the prompts.

        Args:
            prompts: as vLLM takes them.
            parameters: one ``SamplingParams``, or one for each prompt; their ``output_kind`` is vLLM's default here.
            between_steps: called after each step of the engine's output; it may call :meth:`refit`.
            lora_request: as vLLM takes it. None is the trainer's adapter where refits bring one, else the base model.

        Raises:
            EngineDirty: the engine may not generate, or a refit in ``between_steps`` failed and left it so. The
                requests of this call are aborted, as they are by any exception of ``between_steps``.
        """
        self._require_usable()
        self._rpc("refit_require_servable")
        asked = self._asked(lora_request)
        requests = self._llm.enqueue(prompts, parameters, lora_request=asked, use_tqdm=False)
        names = [self._external_name(request) for request in requests]
        for name in names:
            self._versions.begin(name, self.version)
        engine = self._llm.llm_engine
        try:
            while engine.has_unfinished_requests():
                self._take(engine.step())
                if between_steps is not None:
                    between_steps()
                    self._require_usable()
            own = set(names)
            outputs = {
                output.request_id: self._versions.of(output)
                for output in self._finished
                if output.request_id in own
            }
        finally:
            engine.abort_request(requests, internal=True)
            self._finished.clear()
            for name in names:
                self._versions.end(name)
        return [outputs[name] for name in names]

    def serving_version(self) -> int:
        """Version of the weights that all workers may serve.

        Raises:
            EngineDirty: a worker holds weights that are not whole.
            RefitError: the workers hold different versions.
        """
        found = [answer["version"] for answer in self._rpc("refit_serving_version")]
        return _one_version(found)

    def close_refit(self) -> None:
        """End the epoch on all workers."""
        self._rpc("close_refit")
        self._engine = ""

    def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        return raise_refit_errors(self._llm.collective_rpc(method, args=arguments))

    def _servable(self) -> bool:
        try:
            self.serving_version()
        except RefitError:
            return False
        return True

    def _pause(self, mode: PauseMode) -> None:
        self._llm.sleep(level=0, mode=mode)
        self._paused = True

    def _resume(self) -> None:
        if self._paused and not self.asleep():
            # Only the scheduler: level 0 put nothing else to sleep. Where memory sleeps, waking it resumes.
            self._llm.wake_up(tags=["scheduling"])
        self._paused = False

    def _external_name(self, request: str) -> str:
        """The name under which outputs of a queued request come."""
        processor = self._llm.llm_engine.output_processor
        found = processor.request_states.get(request) or processor.parent_requests[request]
        return str(found.external_req_id)

    def _drain(self) -> None:
        """Process all that the paused engine generated before it paused."""
        engine = self._llm.llm_engine
        core = engine.engine_core
        in_process = getattr(core, "engine_core", None)
        pending = (
            core.outputs_queue.qsize if in_process is None else lambda: len(in_process.batch_queue or ())
        )
        while pending():
            self._take(engine.step())

    def _take(self, outputs: Sequence[Any]) -> None:
        self._finished.extend(output for output in outputs if output.finished)

    def _reset_caches(self) -> None:
        config = self._llm.llm_engine.vllm_config
        done = self._llm.reset_prefix_cache(
            reset_running_requests=True, reset_connector=config.kv_transfer_config is not None
        )
        if not done:
            raise _stale_prefixes()
        if config.model_config.is_multimodal_model:
            # The workers dropped their encoder outputs; the scheduler must not count on them.
            self._llm.llm_engine.reset_encoder_cache()


class AsyncVllmDriver(_Driver):
    """Drives a ``vllm.v1.engine.async_llm.AsyncLLM``; as :class:`VllmDriver`.

    With data parallelism vLLM returns the answers of the first replica's workers only; a refit that fails anywhere fails
    there too.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._llm = engine
        # Held while weights move, so that no request begins with an unknown version.
        self._admission = asyncio.Lock()
        # Where the outputs of running requests come.
        self._queues: dict[str, Any] = {}

    async def init_refit(
        self,
        rendezvous: dict[str, Any],
        first_rank: int,
        config: RefitConfig,
        engine: str = "nccl_xfer",
    ) -> list[dict[str, Any]]:
        """As :meth:`VllmDriver.init_refit`."""
        arguments = (rendezvous, first_rank, asdict(config), self._checked(engine))
        answers = await self._rpc("init_per_pp_refit_comm_group", *arguments)
        self._engine, self._adapter = engine, config.lora == "adapter"
        return answers

    async def refit(self, version: int, mode: PauseMode = "keep") -> list[dict[str, Any]]:
        """As :meth:`VllmDriver.refit`; requests that come meanwhile wait."""
        method = self._method
        if mode == "keep":
            require_kept_tokens(self._llm.vllm_config)
        async with self._admission:
            if await self._asleep():
                mode = "keep"
            await self._llm.pause_generation(mode=mode, clear_cache=False)
            try:
                records = await self._rpc(method, version)
            except RefitError as error:
                if await self._servable():
                    await self._resume()
                else:
                    self._end_requests(error)
                raise
            self.version = version
            try:
                await self._reset_caches()
            except RefitError as error:
                self._end_requests(error)
                raise
            self._versions.refitted(self._llm.output_processor.request_states, version)
            self._unusable = None
            await self._resume()
        return records

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
        async with self._admission:
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
        """As :meth:`VllmDriver.serving_version`."""
        return _one_version([answer["version"] for answer in await self._rpc("refit_serving_version")])

    async def close_refit(self) -> None:
        """End the epoch on all workers."""
        await self._rpc("close_refit")
        self._engine = ""

    async def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        return raise_refit_errors(await self._llm.collective_rpc(method, args=arguments))

    async def _servable(self) -> bool:
        try:
            await self.serving_version()
        except RefitError:
            return False
        return True

    async def _asleep(self) -> bool:
        return any(answer["asleep"] for answer in await self._rpc("refit_asleep"))

    async def _resume(self) -> None:
        # Where memory sleeps, waking it resumes.
        if not await self._asleep():
            await self._llm.resume_generation()

    def _end_requests(self, error: RefitError) -> None:
        """Let nobody wait for tokens of an engine that stays paused."""
        self._unusable = error
        for queue in self._queues.values():
            queue.put(EngineDirty(f"a refit failed in the middle of this request: {error}", stage="generate"))

    async def _reset_caches(self) -> None:
        config = self._llm.vllm_config
        done = await self._llm.reset_prefix_cache(
            reset_running_requests=True, reset_connector=config.kv_transfer_config is not None
        )
        if not done:
            raise _stale_prefixes()
        if config.model_config.is_multimodal_model:
            await self._llm.reset_encoder_cache()


def _one_version(found: Sequence[int]) -> int:
    if len(set(found)) != 1:
        raise RefitError(
            f"the workers of one engine hold different versions: {list(found)}; what it generates is no version's. "
            "Refit again",
            stage="commit",
        )
    return found[0]


def _stale_prefixes() -> RefitError:
    return RefitError(
        "vLLM keeps cached prefixes of the old weights, so new requests would mix both; the engine is paused and "
        "generate() refuses. End what holds them (a KV connector's transfers) and refit again",
        stage="post_load",
    )
