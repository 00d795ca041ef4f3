"""What stands between a vLLM worker's weights and those who would use them while they are not whole or not there.

vLLM itself runs a step with whatever the parameters hold: with weights that a refit wrote in part, with the undefined
memory that a level 2 sleep leaves, and with the random numbers of ``load_format=dummy``. And a step or a refit into
memory that is asleep is an access to unmapped memory, which takes the worker's CUDA context with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ....integration.errors import EngineDirty, RefitError
from ....integration.gpu_memory.driver import DriverError, call, driver, missing
from ....integration.session import ServingState

WEIGHTS = "weights"
# What sleep mode manages; vLLM wakes both where it is given no tags.
_TAGS = frozenset({WEIGHTS, "kv_cache"})
# The level from which the weights are not kept on the host.
_DISCARDING = 2


class WeightsGuard:
    """Follows one worker's sleep, and checks before each step and before each refit.

    Args:
        worker: vLLM's worker. Its ``sleep`` and ``wake_up``, and its model runner's ``execute_model``, are wrapped on
            the instance, which is where vLLM's executor looks them up.
        state: whose dirtiness forbids steps.
    """

    def __init__(self, worker: Any, state: ServingState) -> None:
        self._state = state
        self._worker = worker
        self._asleep: set[str] = set()
        dummy = worker.vllm_config.load_config.load_format == "dummy"
        # Why the weights are nobody's; empty if they are somebody's.
        self._undefined = "the engine was started with load_format=dummy" if dummy else ""
        _before(worker.model_runner, "execute_model", self.before_step)
        _after(worker, "sleep", self._slept)
        _after(worker, "wake_up", self._woke)

    @property
    def asleep(self) -> frozenset[str]:
        """What of ``weights`` and ``kv_cache`` has no memory at the moment."""
        return frozenset(self._asleep)

    def before_step(self, scheduler_output: Any, *_: Any, **__: Any) -> None:
        """To be called before each step; the error ends vLLM's engine core, which can't go on after any.

        A step without tokens computes nothing: by it a paused scheduler tells the worker of requests that ended.

        Raises:
            EngineDirty: as :meth:`require_servable`.
        """
        if scheduler_output.total_num_scheduled_tokens:
            self.require_servable()

    def require_servable(self) -> None:
        """To be called before anything is generated.

        Raises:
            EngineDirty: as :meth:`require_whole`, or weights or KV cache are asleep.
        """
        self.require_whole()
        if self._asleep:
            raise EngineDirty(
                f"{' and '.join(sorted(self._asleep))} of the engine are asleep: their memory is unmapped, and a step "
                f"would end the worker. Call wake_up(tags={sorted(self._asleep)}) before anything is generated",
                stage="generate",
            )

    def require_whole(self) -> None:
        """To be called by who asks for the version.

        Raises:
            EngineDirty: the weights were written in part, or are no version's yet.
        """
        self._state.require_clean()
        self.require_defined()

    def require_defined(self) -> None:
        """To be called by who changes the weights in part only.

        Raises:
            EngineDirty: the others are no version's yet.
        """
        if self._undefined:
            raise EngineDirty(
                f"{self._undefined} and no refit has brought weights since, so the engine would generate from undefined "
                "ones. Refit (after wake_up(tags=['weights']), if it sleeps), and wake the KV cache after that",
                stage="generate",
            )

    def require_awake(self) -> None:
        """To be called before a refit meets the other ranks.

        Raises:
            RefitError: the weights have no memory at the moment. No byte was written.
        """
        if WEIGHTS in self._asleep or self._unmapped():
            raise RefitError(
                "the engine's weights are asleep: their memory is unmapped and nothing can be written into it. Nothing "
                "has moved. Call wake_up(tags=['weights']), refit, then wake_up(tags=['kv_cache']), which lets queued "
                "requests run",
                stage="handshake",
            )

    def refitted(self) -> None:
        """To be called once a refit has committed."""
        self._undefined = ""

    def _slept(self, level: int = 1) -> None:
        self._asleep = set(_TAGS)
        if level >= _DISCARDING:
            self._undefined = f"a level {level} sleep discarded the weights"

    def _woke(self, tags: list[str] | None = None) -> None:
        self._asleep -= _TAGS if tags is None else set(tags)

    def _unmapped(self) -> bool:
        """Whether the first weight's address has no memory behind it: the sleep may be older than this guard."""
        first = next(self._worker.model_runner.get_model().parameters(), None)
        if first is None or first.device.type != "cuda" or not first.numel() or missing():
            return False
        with torch._C.DisableTorchFunctionSubclass():
            address = first.data_ptr()
        mapped = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
        try:
            return not call("cuPointerGetAttribute", mapped, address)
        except DriverError as error:
            if error.status != "CUDA_ERROR_INVALID_VALUE":
                raise
            return True  # an address that CUDA knows nothing about


def _before(owner: Any, name: str, check: Callable[..., None]) -> None:
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return wrapped(*args, **kwargs)

    setattr(owner, name, guarded)


def _after(owner: Any, name: str, note: Callable[..., None]) -> None:
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        note(*args, **kwargs)
        return result

    setattr(owner, name, noted)
