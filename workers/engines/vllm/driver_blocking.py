"""The driver of a ``vllm.LLM``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ....integration.config import RefitConfig
from ....integration.errors import RefitError
from ..common.answers import raise_refit_errors
from .compat import SCRIPT, SCRIPT_HOLDS, require_driver
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
from .patches import DROPPED, require_kept_tokens
from .sleeping import SleepCalls
from .token_versions import Generated

logger = logging.getLogger(__name__)


class VllmDriver(SleepCalls, DriverState):
    """Drives a ``vllm.LLM`` whose workers have :class:`~.extension.VllmRefitExtension`.

    Start it with ``worker_extension_cls=driver.EXTENSION``, or with ``weight_transfer_config=plugin.transfer_config()``.

    Raises:
        RefitError: it was started with neither, or with a cache that no refit drops (:mod:`.connectors`), or is of a vLLM that
            lacks what the driver uses.
    """

    def __init__(self, llm: Any) -> None:
        require_driver(llm, SCRIPT, SCRIPT_HOLDS)
        super().__init__(llm.llm_engine.vllm_config)
        self._llm = llm
        self._paused = False
        self._finished: list[Any] = []
        # Here and not in the first refit: an engine without rlrefit's workers has nothing that guards its weights.
        try:
            self._rpc("refit_asleep")
        except RefitError:
            raise
        except Exception as error:
            raise others_workers(error) from error

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
            RefitError: of the kind that the worker raised. Where the old weights are not whole on all workers, or
                prefixes of them could not be dropped, the engine stays paused, :meth:`generate` refuses, and the next
                refit that succeeds resumes it.
            Exception: vLLM's own, where the engine fails; what follows is the same.
        """
        method, engine = self._method, self._llm.llm_engine
        # Nothing runs while memory sleeps, so that there is nothing to wait for and nothing to end.
        mode = "keep" if self.asleep() else mode
        running = engine.has_unfinished_requests()
        if running and mode == "keep":
            require_kept_tokens(engine.vllm_config)
        # So that an exception of any kind, an interrupt too, leaves an engine that generate() refuses.
        earlier, self._unusable = self._unusable, cut_off(version)
        try:
            if running:
                self._pause(mode)
                self._drain()
            records = self._rpc(method, version)
        except Exception as error:
            if earlier is not None or not self._serves_on(version):
                self._stay_paused(error)
            raise
        self.version = version
        try:
            self._reset_caches()
            self._rpc(DROPPED, version)
            # Also where the engine was paused past this driver: the core does so itself where a server call left prefixes.
            self._paused = self._paused or engine.is_sleeping()
        except Exception as error:
            self._stay_paused(error)
            raise
        self._versions.refitted(engine.output_processor.request_states, version)
        self._resume()
        self._unusable = None
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
        return one_version(self._rpc("refit_serving_version"))

    def close_refit(self) -> None:
        """End the epoch on all workers."""
        self._rpc("close_refit")
        self._engine = ""

    def _rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        return raise_refit_errors(self._llm.collective_rpc(method, args=arguments))

    def _serves_on(self, version: int) -> bool:
        """Resume where all workers hold the weights whole that were there before a refit to ``version`` failed."""
        try:
            self.version = self.serving_version()
            if self.version == version:
                return False
            self._resume()
        except Exception as error:
            logger.warning("after refit %d failed, the engine stays paused: %s", version, described(error))
            return False
        self._unusable = None
        return True

    def _stay_paused(self, error: Exception) -> None:
        """Let nothing run, also of who asks the engine and not the driver."""
        self._unusable = error
        try:
            self._pause("keep")
        except Exception:
            # The error that led here is the one to raise; an engine that can't be paused has ended.
            logger.exception("the engine could not be paused after its refit failed; generate() refuses")

    def _pause(self, mode: PauseMode) -> None:
        # First, so that an interrupted call is taken back by the next refit.
        self._paused = True
        self._llm.sleep(level=0, mode=mode)

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
        try:
            done = self._llm.reset_prefix_cache(
                reset_running_requests=True, reset_connector=config.kv_transfer_config is not None
            )
        except Exception as error:
            raise stale_prefixes(described(error)) from error
        if not done:
            raise stale_prefixes(KEPT)
        if config.model_config.is_multimodal_model:
            # The workers dropped their encoder outputs; the scheduler must not count on them.
            self._llm.llm_engine.reset_encoder_cache()
