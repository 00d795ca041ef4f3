"""The driver's side: calls the workers of running TensorRT-LLM engines.

``orchestrator_type="ray"`` with ``ray_worker_extension_cls=EXTENSION`` gives the workers
:class:`~.extension.TrtllmRefit`. :class:`~.sender.TrtllmSender` on the trainer's ranks does a refit through one driver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ....integration.colocated.memory import ProcessMemory
from ....integration.colocated.stages import KV_CACHE, TAGS, WEIGHTS, StageRefused
from ....integration.errors import RefitError, RefitMismatch, RefitTimeout
from ....integration.weights.manifest import TensorSpec
from ..common.answers import raise_refit_errors

EXTENSION = "rlrefit.workers.engines.trtllm.extension.TrtllmRefit"
# The sleep level after which a refit brings the weights.
DISCARDING = 2
# Futures of the workers' answers and seconds → the answers, in order; TimeoutError if they take longer.
Wait = Callable[[Sequence[Any], float], list[Any]]


class TrtllmDriver:
    """Drives ``tensorrt_llm.LLM`` or ``AsyncLLM`` engines, replicas of one model.

    It is a :class:`~rlrefit.integration.colocated.stages.SleepingEngine` too, for engines that were started with their sleep feature.

    Args:
        llms: the engines. All get the same weights, and none serves a version before all can.
        timeout_s: of each wait for the workers, which drain their running requests first.
        wait: for the answers; Ray's if left out.

    Attributes:
        devices: UUIDs of the GPUs of all workers.
        loads_in_parts: whether the model takes its weights in several buckets.
    """

    def __init__(self, *llms: Any, timeout_s: float = 300.0, wait: Wait | None = None) -> None:
        if not llms:
            raise RefitError(
                "no engine was given; give the LLM or AsyncLLM of each replica", stage="settings"
            )
        self._llms = llms
        self._timeout_s = timeout_s
        self._wait = wait or _wait_for_ray
        found = self._rpc("refit_describe")
        self.devices = [answer["device"] for answer in found]
        self.loads_in_parts = all(answer["in_parts"] for answer in found)
        self._tags: list[str] = list(found[0]["tags"])
        if len(set(self.devices)) != len(self.devices):
            raise RefitError(
                f"two workers share a GPU ({', '.join(sorted(self.devices))}), but each payload is addressed to one GPU; give each "
                "worker a GPU of its own",
                stage="settings",
            )

    @property
    def version(self) -> int:
        """Of the weights that all workers may serve.

        Raises:
            EngineDirty: they are not whole on a worker.
            RefitMismatch: workers hold different versions.
        """
        versions = {answer["version"] for answer in self._rpc("refit_serving_version")}
        if len(versions) > 1:
            raise RefitMismatch(
                f"workers hold the weights of versions {sorted(versions)}; refit all of them before anything is generated",
                stage="generate",
            )
        return int(versions.pop())

    def require_servable(self) -> None:
        """Check before requests are given to the engines, which otherwise report late that they can't serve.

        Raises:
            EngineDirty: weights are not whole, or memory is asleep.
        """
        self._rpc("refit_require_servable")

    def begin(self, version: int, specs: Sequence[TensorSpec]) -> None:
        """Let the engines end their requests, and refuse steps until these weights have committed as ``version``.

        Raises:
            RefitError: of the worker's kind; nothing was written.
        """
        self._rpc("refit_begin", version, [spec.to_json() for spec in specs])

    def load(self, handles: dict[str, str]) -> None:
        """Load a bucket on all workers: ``{device UUID: payload}``, whose memory may be freed afterwards.

        Raises:
            RefitError: of the worker's kind. The engines refuse to generate until a refit succeeds.
        """
        self._rpc("refit_load", handles)

    def finish(self) -> None:
        """After the last bucket: derived state, caches of the old weights. Raises as :meth:`load`."""
        self._rpc("refit_finish")

    def commit(self, version: int) -> None:
        """Serve ``version``; once all workers of all engines have finished. Raises as :meth:`load`."""
        self._rpc("refit_commit", version)

    def sleep(self, level: int = DISCARDING) -> None:
        """Release weights and KV cache, once the running requests have ended. :class:`~rlrefit.integration.colocated.stages.SleepingEngine`'s.

        Raises:
            StageRefused: level 1: TensorRT-LLM decides when it starts whether a sleep keeps the weights, and rlrefit assumes
                that it does not. Nothing has changed.
            RefitError: TensorRT-LLM was started without its sleep feature.
        """
        if level != DISCARDING:
            raise StageRefused(
                f"sleep level {level} would keep the weights in host memory, which TensorRT-LLM can't be asked for at a call. "
                f"Nothing has changed; use level {DISCARDING}, after which a refit brings the weights",
                stage="sleep",
            )
        self._rpc("refit_sleep", self._engine_tags(TAGS))

    def wake(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Take memory again: ``weights`` (all but the KV cache) before a refit, ``kv_cache`` once the trainer freed its own.

        Raises:
            StageRefused: a tag is unknown, or its memory is awake. Nothing has changed.
        """
        wrong = sorted(set(tags) - self.asleep())
        if wrong:
            raise StageRefused(
                f"{', '.join(wrong)} can't wake: each of {', '.join(sorted(TAGS))} wakes once after a sleep. Nothing has changed",
                stage="wake_up",
            )
        self._rpc("refit_wake", self._engine_tags(tags))

    def asleep(self) -> frozenset[str]:
        """Which of ``weights`` and ``kv_cache`` have no memory at the moment, on any worker."""
        found = {tag for answer in self._rpc("refit_asleep") for tag in answer["asleep"]}
        return frozenset(found & {KV_CACHE} | ({WEIGHTS} if found - {KV_CACHE} else set()))

    def empty_cache(self) -> None:
        """Have all workers give back what their allocators cache."""
        self._rpc("refit_empty_cache")

    def memory(self, *, restart: bool = False) -> list[ProcessMemory]:
        """Of each worker, with the peaks since the last restart; ``restart`` lets them count anew from here."""
        found = self._rpc("refit_memory", restart)
        return [ProcessMemory(**answer | {"process": f"engine rank {i}"}) for i, answer in enumerate(found)]

    def _engine_tags(self, tags: Collection[str]) -> list[str]:
        return [*(self._tags if WEIGHTS in tags else ()), *((KV_CACHE,) if KV_CACHE in tags else ())]

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        try:
            # All engines begin before any is waited for.
            futures = [
                future
                for llm in self._llms
                for future in llm._collective_rpc(method, args=args, non_block=True)
            ]
            answers = self._wait(futures, self._timeout_s)
        except TimeoutError as error:
            raise RefitTimeout(
                f"TensorRT-LLM's workers did not answer {method} within {self._timeout_s:.0f} s: a running request does not end, a "
                "worker died, or a refused step ended the executor. Weights that were written in part are not served; restart the "
                "engine, or raise timeout_s",
                stage="transfer",
            ) from error
        # Of any kind: Ray's, of a worker that died, and those of TensorRT-LLM's control action, which come before an answer.
        except Exception as error:
            raise RefitError(
                f"TensorRT-LLM's workers could not be asked for {method}: {type(error).__name__}: {error}. Those that had begun a "
                "refit refuse to generate until one commits; refit again, and restart the engine if its executor has ended",
                stage="transfer",
            ) from error
        return raise_refit_errors(answers, "TensorRT-LLM worker")


def _wait_for_ray(futures: Sequence[Any], timeout_s: float) -> list[Any]:
    import ray

    answers: list[Any] = ray.get(list(futures), timeout=timeout_s)  # its GetTimeoutError is a TimeoutError
    return answers
