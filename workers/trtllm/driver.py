"""The driver's side: reach the workers of running TensorRT-LLM engines.

``orchestrator_type="ray"`` with ``ray_worker_extension_cls=EXTENSION`` gives the workers
:class:`~.extension.TrtllmRefit`. :class:`~.sender.TrtllmSender` on the trainer's ranks does a refit through one driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...integration.errors import RefitError, RefitMismatch, RefitTimeout
from ...integration.manifest import TensorSpec
from ..vllm.answers import raise_refit_errors
from .compat import KV_CACHE

EXTENSION = "rlrefit.workers.trtllm.extension.TrtllmRefit"
WEIGHTS = "weights"
# Futures of the workers' answers and seconds → the answers, in order; TimeoutError if they take longer.
Wait = Callable[[Sequence[Any], float], list[Any]]


class TrtllmDriver:
    """Drives ``tensorrt_llm.LLM`` or ``AsyncLLM`` engines, replicas of one model.

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
        # Here and not in the first refit: from the first call on, the workers guard their weights.
        found = self._rpc("refit_describe")
        self.devices = [answer["device"] for answer in found]
        self.loads_in_parts = all(answer["in_parts"] for answer in found)
        self._tags: list[str] = list(found[0]["tags"])
        if len(set(self.devices)) != len(self.devices):
            raise RefitError(
                f"two workers share a GPU ({', '.join(sorted(self.devices))}), and payloads are told apart by GPU; give "
                "each worker one of its own",
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
        """To be called before requests are given to the engines, which answer late what they can't serve.

        Raises:
            EngineDirty: weights are not whole, or memory is asleep.
        """
        self._rpc("refit_require_servable")

    def begin(self, version: int, specs: Sequence[TensorSpec]) -> None:
        """Let the engines end their requests and refuse steps until ``version``, these weights, has committed.

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

    def sleep(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Release memory; ``weights`` is all but the KV cache. Slept weights are served again only after a refit.

        TensorRT-LLM has to be started with its sleep feature on.
        """
        self._rpc("sleep", self._engine_tags(tags), plain=True)

    def wake(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Take memory again: ``("weights",)`` before a refit, ``("kv_cache",)`` when the trainer has freed its own."""
        self._rpc("wakeup", self._engine_tags(tags), plain=True)

    def _engine_tags(self, tags: Sequence[str]) -> list[str]:
        known = {WEIGHTS: self._tags, KV_CACHE: [KV_CACHE]}
        unknown = sorted(set(tags) - known.keys())
        if unknown:
            raise RefitError(
                f"{', '.join(map(repr, unknown))}: no such part of an engine's memory; there are {', '.join(known)}",
                stage="settings",
            )
        return [tag for part in known if part in tags for tag in known[part]]

    def _rpc(self, method: str, *args: Any, plain: bool = False) -> list[Any]:
        # All engines begin before any is waited for.
        futures = [
            future for llm in self._llms for future in llm._collective_rpc(method, args=args, non_block=True)
        ]
        try:
            answers = self._wait(futures, self._timeout_s)
        except TimeoutError as error:
            raise RefitTimeout(
                f"TensorRT-LLM's workers did not answer {method} within {self._timeout_s:.0f} s: a running request that "
                "does not end, a worker that died, or a step that was refused and ended the executor. Weights that were "
                "being written are served by nobody; start the engine anew, or raise timeout_s",
                stage="transfer",
            ) from error
        return answers if plain else raise_refit_errors(answers, "TensorRT-LLM worker")


def _wait_for_ray(futures: Sequence[Any], timeout_s: float) -> list[Any]:
    import ray

    answers: list[Any] = ray.get(list(futures), timeout=timeout_s)  # its GetTimeoutError is a TimeoutError
    return answers
