"""The driver's side of vLLM: refit a running engine, also in the middle of requests.

A refit pauses the scheduler, has the workers receive the weights, drops what was computed with the old ones (prefixes,
encoder outputs), and resumes. The keys and values of running requests are computed anew before their next token, so
every token comes from one version alone.

:class:`VllmDriver` is for ``vllm.LLM``, :class:`~.async_driver.AsyncVllmDriver` for ``AsyncLLM``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ....integration.config import RefitConfig
from ....integration.errors import EngineDirty, RefitError
from ..common.answers import raise_refit_errors
from .compat import SCRIPT, SCRIPT_HOLDS, require_driver
from .connectors import require_droppable_caches
from .patches import DROPPED, may_be_refitted, require_kept_tokens

logger = logging.getLogger(__name__)

EXTENSION = "rlrefit.workers.engines.vllm.extension.VllmRefitExtension"
# keep: requests go on with the new weights; wait: they end with the old ones first; abort: they end as they are.
PauseMode = Literal["keep", "wait", "abort"]
_REMEDY = (
    f'Start the engine with worker_extension_cls="{EXTENSION}" (driver.EXTENSION), or with '
    "weight_transfer_config=plugin.transfer_config()"
)


@dataclass(frozen=True)
class Generated:
    """What vLLM returned for one prompt.

    Attributes:
        output: vLLM's ``RequestOutput``.
        versions: for each of its completions the version that generated each token.
    """

    output: Any
    versions: tuple[tuple[int, ...], ...]


class TokenVersions:
    """Which version of the weights generated each token of one engine's requests.

    vLLM 0.21 has no place for it in a response: neither its outputs nor its server's answers carry a field that a worker or
    a driver may fill. So the driver notes, at every refit, how far each running request has come. Of a server, whose requests
    no driver sees, ``refit_serving_version`` tells what it serves now (``POST /collective_rpc`` in its development mode).
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        # By request and completion: (tokens there were, version from there on).
        self._turns: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def begin(self, request: str, version: int) -> None:
        """``request`` has been queued, and ``version`` is served."""
        self._first[request] = version

    def refitted(self, states: Mapping[str, Any], version: int) -> None:
        """``version`` is served from here on; ``states`` are the output processor's states of all live requests.

        To be called while the engine is paused and all that it generated before has been processed.
        """
        for state in states.values():
            request = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
            if request in self._first:
                turn = (state.detokenizer.num_output_tokens(), version)
                self._turns.setdefault((request, state.request_index), []).append(turn)

    def of(self, output: Any) -> Generated:
        """Versions of the tokens that ``output`` holds (all since the request's beginning)."""
        found = tuple(self._completion(output.request_id, c) for c in output.outputs)
        return Generated(output, found)

    def end(self, request: str) -> None:
        """``request`` is over."""
        self._first.pop(request, None)
        for key in [key for key in self._turns if key[0] == request]:
            del self._turns[key]

    def _completion(self, request: str, completion: Any) -> tuple[int, ...]:
        versions = [self._first[request]] * len(completion.token_ids)
        for start, version in self._turns.get((request, completion.index), []):
            versions[start:] = [version] * (len(versions) - start)
        return tuple(versions)


class BaseDriver:
    """What both drivers share: the engine's trainer, its version, and whether anything may be generated with it.

    Attributes:
        version: of the weights that the engine holds as far as the driver knows, or -1 before the first refit.

    Raises:
        RefitError: the engine was started without rlrefit's workers, or keeps what its weights made where no refit drops it.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        if not may_be_refitted(vllm_config):
            raise RefitError(
                f"the engine was started without rlrefit's workers, so nothing could receive weights. {_REMEDY}",
                stage="start",
            )
        require_droppable_caches(vllm_config)
        self.version = -1
        self._engine = ""
        # Whether the refits bring an adapter, which a request has to ask for.
        self._adapter = False
        self._versions = TokenVersions()
        # What a refit left that did not succeed: until one does, nothing is generated.
        self._unusable: BaseException | None = None

    @property
    def sleeps(self) -> bool:
        """Whether vLLM can give its memory back; without its sleep mode a sleep on a GPU is passed over in silence."""
        config = self._vllm_config
        return bool(config.model_config.enable_sleep_mode) or config.device_config.device_type == "cpu"

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise EngineDirty(
                f"the last refit failed and left the engine paused, so that nothing would be generated: "
                f"{self._described(self._unusable)}. Refit again, which resumes it, or start the engine anew",
                stage="generate",
            )

    def _asked(self, lora_request: Any) -> Any:
        """The adapter of a request: the trainer's where refits bring one and the caller names none."""
        if lora_request is not None or not self._adapter:
            return lora_request
        from .lora import lora_request as trainers

        return trainers(self.version)

    def _require_joined(self) -> None:
        if not self._engine:
            raise RefitError(
                "no trainer has been met: call join_refit with the rendezvous that trainer rank 0 opened",
                stage="handshake",
            )

    def _met(self, engine: str, config: RefitConfig) -> None:
        """The workers have met a trainer."""
        self._engine, self._adapter = engine, config.lora == "adapter"

    @staticmethod
    def _described(error: BaseException) -> str:
        """What happened; of errors that are not rlrefit's also their kind, since their text may be empty."""
        return str(error) if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"

    @staticmethod
    def _cut_off(version: int) -> RefitError:
        """What is left by a refit that neither succeeds nor raises an ordinary error."""
        return RefitError(
            f"refit {version} was interrupted, so the engine may hold the weights before it, or its own, beside cached "
            "prefixes of the others",
            stage="commit",
        )

    def _no_answer(self, error: Exception) -> RefitError:
        """The workers don't know the refit's methods: they have another extension, or the engine ended."""
        return RefitError(
            f"the engine's workers do not answer the refit's first question, refit_asleep ({self._described(error)}). If their "
            f"worker_extension_cls does not inherit rlrefit's: {_REMEDY}",
            stage="start",
        )

    def _stale_prefixes(self, error: Exception | None = None) -> RefitError:
        """Why the engine may not serve the weights that it holds; without ``error`` vLLM answered False."""
        cause = "a part of its cache was not reset" if error is None else self._described(error)
        return RefitError(
            f"vLLM keeps cached prefixes of the old weights ({cause}), so new requests would mix both; the engine is "
            "paused and generate() refuses. End what holds them (a KV connector's transfers) and refit again",
            stage="post_load",
        )

    @staticmethod
    def _on_any_worker(answers: Sequence[dict[str, Any]]) -> frozenset[str]:
        """What sleeps on any of the workers that answered ``refit_asleep``."""
        return frozenset(tag for answer in answers for tag in answer["asleep"])


def one_version(answers: Sequence[dict[str, Any]]) -> int:
    """The version that all workers answered.

    Raises:
        RefitError: they hold different ones.
    """
    found = [answer["version"] for answer in answers]
    if len(set(found)) != 1:
        raise RefitError(
            f"the workers of one engine hold different versions: {found}; what it generates is no version's. "
            "Refit again",
            stage="commit",
        )
    return int(found[0])


class VllmDriver(BaseDriver):
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
            raise self._no_answer(error) from error

    def join_refit(
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
        answers = self._rpc("join_refit", rendezvous, first_rank, asdict(config), engine)
        self._met(engine, config)
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
        self._require_joined()
        engine = self._llm.llm_engine
        # Nothing runs while memory sleeps, so that there is nothing to wait for and nothing to end.
        mode = "keep" if self.asleep() else mode
        running = engine.has_unfinished_requests()
        if running and mode == "keep":
            require_kept_tokens(self._vllm_config)
        # So that an exception of any kind, an interrupt too, leaves an engine that generate() refuses.
        earlier, self._unusable = self._unusable, self._cut_off(version)
        try:
            if running:
                self._pause(mode)
                self._drain()
            records = self._rpc("refit", version)
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

    def asleep(self) -> frozenset[str]:
        """What of ``weights`` and ``kv_cache`` has no memory on any worker at the moment."""
        return self._on_any_worker(self._rpc("refit_asleep"))

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._llm.llm_engine.has_unfinished_requests())

    def sleep(self, level: int) -> None:
        """Give weights and KV cache back, as ``LLM.sleep`` does; running requests would be aborted."""
        self._llm.sleep(level=level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory for ``weights``, ``kv_cache`` or both; requests run again once nothing sleeps."""
        self._llm.wake_up(tags=list(tags))

    def seed(self, seed: int) -> None:
        """Have all workers draw from here on as those of an engine that was started with ``seed``, below 4294967296."""
        self._rpc("refit_seed", seed)

    def empty_cache(self) -> None:
        """Have all workers give back what their allocators cache."""
        self._rpc("refit_empty_cache")

    def memory(self, *, restart: bool = False) -> list[dict[str, Any]]:
        """Of each worker, fields of a ``ProcessMemory``; ``restart`` lets the peaks count anew from here."""
        return self._rpc("refit_memory", restart)

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
            logger.warning(
                "after refit %d failed, the engine stays paused: %s", version, self._described(error)
            )
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
        config = self._vllm_config
        try:
            done = self._llm.reset_prefix_cache(
                reset_running_requests=True, reset_connector=config.kv_transfer_config is not None
            )
        except Exception as error:
            raise self._stale_prefixes(error) from error
        if not done:
            raise self._stale_prefixes()
        if config.model_config.is_multimodal_model:
            # The workers dropped their encoder outputs; the scheduler must not count on them.
            self._llm.llm_engine.reset_encoder_cache()
