"""Keeps an engine's worker from computing with weights that are incomplete, undefined or not in memory.

No engine checks this itself. vLLM, SGLang and TensorRT-LLM run a step with whatever the parameters hold: weights that a refit
has written in part, memory that a sleep has discarded, the random numbers of ``load_format=dummy``. And a step or a refit on
memory that is asleep accesses unmapped memory, which destroys the worker's CUDA context. Each engine's ``worker_refit`` says
which of its methods are guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from ....integration.colocated.stages import KV_CACHE
from ....integration.errors import EngineDirty, RefitError
from ....integration.session import ServingState


class WeightsGuard:
    """What is known of one worker's weights, and the checks before each step and each refit.

    Args:
        state: version and dirtiness of the weights.
        dummy: whether the engine was started with ``load_format=dummy``.
        is_unmapped: whether the weights have no memory although no sleep was noted, which a guard that was made after the
            sleep has to ask of the device.
    """

    def __init__(
        self, state: ServingState, dummy: bool = False, is_unmapped: Callable[[], bool] = lambda: False
    ) -> None:
        self._state = state
        self._is_unmapped = is_unmapped
        self._asleep: frozenset[str] = frozenset()
        self._undefined = "the engine was started with load_format=dummy" if dummy else ""
        self._losses = 0

    @property
    def asleep(self) -> frozenset[str]:
        """The engine's tags of the memory that is released at the moment."""
        return self._asleep

    @property
    def undefined(self) -> str:
        """Why the weights have no defined values; empty if a checkpoint or a refit has brought them."""
        return self._undefined

    @property
    def losses(self) -> int:
        """How often the weights were discarded so far."""
        return self._losses

    def require_servable(self) -> None:
        """Check before anything is generated.

        Raises:
            EngineDirty: as :meth:`require_whole`, or some of the engine's memory is asleep.
        """
        self.require_whole()
        if self._asleep:
            raise EngineDirty(
                f"{', '.join(sorted(self._asleep))} of the engine are asleep: their memory is unmapped, and a step would "
                "end the worker. Wake them before anything is generated",
                stage="generate",
            )

    def require_whole(self) -> None:
        """Check before the version is told.

        Raises:
            EngineDirty: the weights were written in part, or have no defined values yet.
        """
        self._state.require_clean()
        self.require_defined()

    def require_defined(self) -> None:
        """Check before some of the weights are changed.

        Raises:
            EngineDirty: the others have no defined values yet.
        """
        if self._undefined:
            raise EngineDirty(
                f"{self._undefined} and no refit has brought weights since, so the engine would generate from undefined "
                "values. Wake the weights if they are asleep, refit, then wake the KV cache",
                stage="generate",
            )

    def require_awake(self) -> None:
        """Check before a refit meets other ranks or writes.

        Raises:
            RefitError: the weights have no memory at the moment. Nothing was written.
        """
        asleep = self._asleep - {KV_CACHE}
        if asleep or self._is_unmapped():
            raise RefitError(
                f"{', '.join(sorted(asleep)) or 'weights'} of the engine are asleep: their memory is unmapped and can't be "
                "written. Nothing was written. Wake the weights, refit, then wake the KV cache, which lets queued requests run",
                stage="handshake",
            )

    def require_base(self) -> None:
        """Check before a refit meets other ranks that brings a LoRA adapter alone.

        Raises:
            RefitError: the weights that it belongs to have no defined values. Nothing was written.
        """
        if self._undefined:
            raise RefitError(
                f"{self._undefined}, and policy.refit.lora=adapter brings no weights of the base model, so the engine would generate "
                "from undefined values. Nothing was written. Give policy.refit.lora=merge on all ranks of both sides, or keep the "
                "weights: load_format=auto, and sleep_level 1",
                stage="handshake",
            )

    def slept(self, tags: Iterable[str]) -> None:
        """Note that memory was released, by the engine's tags."""
        self._asleep |= frozenset(tags)

    def woke(self, tags: Iterable[str]) -> None:
        """Note that memory is there again."""
        self._asleep -= frozenset(tags)

    def discarded(self, why: str) -> None:
        """Note that the weights have lost their values, and why."""
        self._undefined = why
        self._losses += 1

    def refitted(self) -> None:
        """Note that a refit has committed."""
        self._undefined = ""


def call_before(owner: Any, name: str, check: Callable[..., None]) -> None:
    """Wrap a method of ``owner`` on the instance, so that ``check`` is called first with the same arguments."""
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return wrapped(*args, **kwargs)

    setattr(owner, name, checked)


def call_after(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Wrap a method of ``owner`` on the instance, so that ``note`` is called with the same arguments once it has returned."""
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        note(*args, **kwargs)
        return result

    setattr(owner, name, noted)
