"""The worker extension: what rlrefit adds to each TensorRT-LLM worker (``ray_worker_extension_cls``).

Start TensorRT-LLM with ``orchestrator_type="ray"`` and ``ray_worker_extension_cls=driver.EXTENSION``, and reach the
methods through :mod:`.driver`. TensorRT-LLM imports this module in its workers; nothing else does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

from ....integration.colocated.memory import empty_cache
from ....integration.weights.manifest import TensorSpec
from ..common.answers import answer
from . import compat
from .payload import APPROVED, Imports
from .worker_refit import WorkerRefit

_update_weights = compat.uncontrolled(WorkerExtension.update_weights)


@compat.control_action
def wait_for_engine_idle(self: Any) -> None:
    """Return when no request runs or waits."""


@compat.control_action
def reset_prefix_cache(self: Any) -> None:
    """Drop the cached prefixes, once no request holds one."""
    self.engine.reset_prefix_cache()


# Later TensorRT-LLM's, which verl's server calls.
_LATER = (wait_for_engine_idle, reset_prefix_cache)


class TrtllmRefit(WorkerExtension):
    """Mixed into TensorRT-LLM's worker, beside what its own extension offers.

    ``update_weights`` keeps TensorRT-LLM's contract and raises. The other methods answer with plain data, including
    errors, which :func:`..common.answers.raise_refit_errors` raises on the driver's side.
    """

    # Of TensorRT-LLM's worker.
    device_id: int
    sleep: Callable[[list[str]], None]
    wakeup: Callable[[list[str]], None]

    # What payloads may import; a subclass may approve more.
    refit_approved_imports: ClassVar[Imports] = APPROVED
    # How long update_weights(None) waits for the engine's other workers.
    refit_timeout_s: ClassVar[float] = 300.0

    def __init_subclass__(cls, **options: Any) -> None:
        """Guard the weights as soon as a worker has its engine, and give it the methods of later versions that it lacks.

        TensorRT-LLM makes a class of its worker's and the extension's (``RayWorkerWrapper._inject_worker_extension``), and
        an extension may have no method that the worker has. What it inherits may be wrapped there, though: ``setup_engine``
        (``BaseWorker``), after which ``engine`` exists, and before which no request can come, since
        ``RayExecutor.setup_engine_remote`` waits for all workers.
        """
        super().__init_subclass__(**options)
        setup = getattr(cls, "setup_engine", None)
        if setup is None:
            return  # an extension, not yet a worker

        @functools.wraps(setup)
        def setup_engine(self: TrtllmRefit) -> Any:
            result = setup(self)
            self._refit  # noqa: B018 - it is made here
            return result

        cls.setup_engine = setup_engine  # type: ignore[attr-defined]
        for method in _LATER:
            if not hasattr(cls, method.__name__):
                setattr(cls, method.__name__, method)

    @compat.control_action
    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        """Load a bucket, ``{device UUID: payload}``, or with None, on all workers, finalize and serve the weights.

        They are served once all workers of this engine have them. A worker that fails before it learns of that refuses to
        step until a refit has brought all workers to one version. Other replicas are not covered: with several, check each
        one before anything is generated, or use :mod:`.driver`.
        """
        self._refit.update_weights(ipc_handles)

    @compat.control_action
    def refit_begin(self, version: int, specs: list[list[Any]]) -> dict[str, Any]:
        """Refuse steps until ``version``, with weights ``[[name, shape, dtype], …]``, has committed."""
        return _done(lambda: self._refit.begin(version, list(map(TensorSpec.from_json, specs))))

    @compat.control_action
    def refit_load(self, ipc_handles: dict[str, Any]) -> dict[str, Any]:
        """Load a bucket: ``{"weights": number, "bytes": number}``."""
        return answer(lambda: self._refit.load(ipc_handles))

    @compat.control_action
    def refit_finish(self) -> dict[str, Any]:
        """Recompute what derives from the weights; an error if some are missing."""
        return _done(self._refit.finish)

    @compat.control_action
    def refit_commit(self, version: int) -> dict[str, Any]:
        """Serve the weights; called once all workers have finished."""
        return _done(lambda: self._refit.commit(version))

    def refit_describe(self) -> dict[str, Any]:
        """This worker's GPU, whether its model takes buckets, what the tag ``weights`` stands for, and its version."""
        return answer(
            lambda: {
                "device": compat.device_uuid(self.device_id),
                "in_parts": self._refit.in_parts,
                "tags": list(compat.memory_tags()),
                "version": self._refit.state.version,
            }
        )

    def refit_serving_version(self) -> dict[str, Any]:
        """``{"version": …}`` of the weights that may be served; an error if they are not whole."""

        def version() -> dict[str, Any]:
            self._refit.guard.require_whole()
            return {"version": self._refit.state.version}

        return answer(version)

    def refit_require_servable(self) -> dict[str, Any]:
        """An error if a step would compute with weights that are not whole, or with memory that is asleep."""
        return _done(self._refit.guard.require_servable)

    def refit_sleep(self, tags: list[str]) -> dict[str, Any]:
        """TensorRT-LLM's own ``sleep``, with an answer."""
        return _done(lambda: self.sleep(tags))

    def refit_wake(self, tags: list[str]) -> dict[str, Any]:
        """TensorRT-LLM's own ``wakeup``, with an answer."""
        return _done(lambda: self.wakeup(tags))

    def refit_asleep(self) -> dict[str, Any]:
        """``{"asleep": …}``: TensorRT-LLM's tags of what has no memory at the moment."""
        return answer(lambda: {"asleep": sorted(self._refit.guard.asleep)})

    def refit_empty_cache(self) -> dict[str, Any]:
        """Give back what this worker's allocator caches."""
        return _done(lambda: empty_cache(self._refit.device))

    def refit_memory(self, restart: bool) -> dict[str, Any]:
        """What this worker and its GPU hold, with the peaks since the last restart."""

        def read() -> dict[str, Any]:
            found = asdict(self._refit.memory.read(""))
            if restart:
                self._refit.memory.restart()
            return found

        return answer(read)

    @property
    def _refit(self) -> WorkerRefit:
        found: WorkerRefit | None = self.__dict__.get("refit_state_of_worker")
        if found is None:
            found = WorkerRefit(
                self,
                lambda handles: _update_weights(self, handles),
                self.refit_approved_imports,
                self.refit_timeout_s,
            )
            self.__dict__["refit_state_of_worker"] = found
        return found


def _done(call: Callable[[], None]) -> dict[str, Any]:
    def done() -> dict[str, Any]:
        call()
        return {}

    return answer(done)
