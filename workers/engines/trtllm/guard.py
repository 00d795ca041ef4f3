"""What stands between a TensorRT-LLM worker's weights and those who would use them while they are not whole or not there.

TensorRT-LLM loads bucket by bucket, and between two buckets runs whatever was asked of it meanwhile, on weights of two
versions. ``sleep`` unmaps memory, and does not restore weights unless its configuration says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from ....integration.colocated.stages import KV_CACHE
from ....integration.errors import EngineDirty, RefitError
from ....integration.session import ServingState


class WeightsGuard:
    """Follows one worker's sleep, and checks before each step and before each refit.

    Args:
        worker: TensorRT-LLM's worker. Its ``sleep`` and ``wakeup``, and its model engine's ``forward``, are wrapped on
            the instance.
        state: whose dirtiness forbids steps.
    """

    def __init__(self, worker: Any, state: ServingState) -> None:
        self._state = state
        self._asleep: set[str] = set()
        load_format = getattr(worker.llm_args, "load_format", "")
        dummy = "dummy" in str(getattr(load_format, "name", load_format)).lower()
        self._undefined = "the engine was started with load_format=dummy" if dummy else ""
        self._losses = 0
        _wrap(worker.engine.model_engine, "forward", before=self._before_step)
        _wrap(worker, "sleep", after=self._slept)
        _wrap(worker, "wakeup", after=self._woke)

    @property
    def asleep(self) -> frozenset[str]:
        """TensorRT-LLM's tags of what has no memory at the moment."""
        return frozenset(self._asleep)

    @property
    def undefined(self) -> str:
        """Why the weights are nobody's; empty if a checkpoint or a refit has brought them."""
        return self._undefined

    @property
    def losses(self) -> int:
        """How often weights have lost their memory so far."""
        return self._losses

    def require_servable(self) -> None:
        """To be called before anything is generated.

        Raises:
            EngineDirty: as :meth:`require_whole`, or something of the engine is asleep.
        """
        self.require_whole()
        if self._asleep:
            raise EngineDirty(
                f"{', '.join(sorted(self._asleep))} of the engine are asleep: their memory is unmapped, and a step would "
                "end the worker. Wake them before anything is generated",
                stage="generate",
            )

    def require_whole(self) -> None:
        """To be called by who asks for the version.

        Raises:
            EngineDirty: the weights were written in part, or are no version's yet.
        """
        self._state.require_clean()
        if self._undefined:
            raise EngineDirty(
                f"{self._undefined} and no refit has brought weights since, so the engine would generate from undefined "
                "ones. Wake the weights if they sleep, refit, and wake the KV cache after that",
                stage="generate",
            )

    def require_awake(self) -> None:
        """To be called before anything is written.

        Raises:
            RefitError: the weights have no memory at the moment. No byte was written.
        """
        asleep = self._asleep - {KV_CACHE}
        if asleep:
            raise RefitError(
                f"{', '.join(sorted(asleep))} of the engine are asleep: their memory is unmapped and nothing can be "
                "written into it. Nothing was written. Wake the weights, refit, then wake the KV cache",
                stage="handshake",
            )

    def refitted(self) -> None:
        """To be called once a refit has committed."""
        self._undefined = ""

    def _before_step(self, *_: Any, **__: Any) -> None:
        # TensorRT-LLM answers all running requests with the error's text; some versions' executors end with it.
        self.require_servable()

    def _slept(self, sleep_tags: Iterable[str]) -> None:
        self._asleep |= set(sleep_tags)
        if self._asleep - {KV_CACHE}:
            self._undefined = "weights of the engine have slept, which does not keep them"
            self._losses += 1

    def _woke(self, wakeup_tags: Iterable[str]) -> None:
        self._asleep -= set(wakeup_tags)


def _wrap(
    owner: Any,
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = wrapped(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, watched)
