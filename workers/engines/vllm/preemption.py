"""Running requests keep every token when their keys and values are dropped.

``reset_prefix_cache(reset_running_requests=True)``, by which vLLM 0.21 drops what was computed with old weights (also
within ``pause_generation(mode="keep")``), tells its asynchronous scheduler to discard each request's next token: one that
is still in flight will be computed again. A paused engine has none in flight. The token that is then discarded is the
first one after the pause, which the model has already taken as its next input: it is missing in the output, and the
context that later tokens came from is not the one that the trainer sees.
"""

from __future__ import annotations

import functools
from typing import Any

from ....integration.errors import RefitError

_MARK = "_keeps_tokens_by_rlrefit"


def keep_tokens_of_preempted_requests() -> None:
    """Let the scheduler of this process discard a token only where one is in flight; safe to call again.

    A vLLM whose scheduler knows no such flag is left alone.
    """
    scheduler_class = _discarding_scheduler()
    if scheduler_class is None or hasattr(scheduler_class.reset_prefix_cache, _MARK):
        return
    original = scheduler_class.reset_prefix_cache

    @functools.wraps(original)
    def reset_prefix_cache(scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        settled = [
            request
            for request in scheduler.running
            if not request.num_output_placeholders and not request.discard_latest_async_tokens
        ]
        done = original(scheduler, *args, **kwargs)
        for request in settled:
            request.discard_latest_async_tokens = False
        return done

    setattr(reset_prefix_cache, _MARK, True)
    scheduler_class.reset_prefix_cache = reset_prefix_cache


def require_kept_tokens(vllm_config: Any) -> None:
    """To be called before running requests of an engine are preempted.

    The engine's process loads the plug-ins that this one loads, so what holds here holds there.

    Raises:
        RefitError: they would lose a token.
    """
    if not vllm_config.scheduler_config.async_scheduling:
        return
    scheduler_class = _discarding_scheduler()
    if scheduler_class is not None and not hasattr(scheduler_class.reset_prefix_cache, _MARK):
        raise RefitError(
            "vLLM's asynchronous scheduler would lose one token of each running request, because rlrefit's plug-in is not "
            "loaded. Nothing has moved. Name rlrefit in VLLM_PLUGINS, or start the engine with async_scheduling=False, "
            "or refit between requests",
            stage="handshake",
        )


def _discarding_scheduler() -> Any:
    """vLLM's asynchronous scheduler, if it discards tokens after a preemption; else None."""
    try:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    except ImportError:
        return None
    update = getattr(AsyncScheduler, "_update_request_with_output", None)
    names = update.__code__.co_names if update is not None else ()
    return AsyncScheduler if "discard_latest_async_tokens" in names else None
