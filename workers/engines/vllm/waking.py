"""An engine runs no request before all of it is awake, nor while it keeps what old weights made.

vLLM 0.21 resumes the scheduler whenever it is asked to, and with each ``wake_up``, whatever that woke. Between
``wake_up(tags=["weights"])`` and the last wake, queued requests would run: on discarded weights, and on a KV cache without
memory, which ends the worker. All ways lead through ``resume_scheduler``, so that is where an engine waits.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from ....integration.errors import RefitError

logger = logging.getLogger(__name__)

BACKEND = "rlrefit"
# An engine core's attribute: what it keeps of old weights, as text; missing or empty if nothing.
KEPT = "_kept_of_old_weights"
# What a driver calls on all workers once its refit has committed and nothing is left that older weights made.
DROPPED = "refit_caches_dropped"
_MARK = "_waits_by_rlrefit"


def stay_paused_while_asleep() -> None:
    """Let engine cores of this process that refits may reach resume when they can serve; safe to call again."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore

    alone, together = EngineCore.resume_scheduler, DPEngineCoreProc.resume_scheduler
    if hasattr(alone, _MARK):
        return

    @functools.wraps(alone)
    def resume_scheduler(core: Any) -> None:
        if may_be_refitted(core.vllm_config) and _has_to_wait(core):
            _stay_paused(core)
            return
        alone(core)

    @functools.wraps(together)
    def resume_with_replicas(core: Any) -> None:
        # While its replicas run, vLLM refuses or ignores the call. Else it waits for all of them, for ever where one does
        # not come, so all have to agree before.
        stopped = not (core.pending_pause or core.engines_running)
        if (
            stopped
            and may_be_refitted(core.vllm_config)
            and ParallelConfig.has_unfinished_dp(core.dp_group, _has_to_wait(core))
        ):
            _stay_paused(core)
            return
        together(core)

    setattr(resume_scheduler, _MARK, True)
    EngineCore.resume_scheduler = resume_scheduler
    DPEngineCoreProc.resume_scheduler = resume_with_replicas


def may_be_refitted(vllm_config: Any) -> bool:
    """Whether the engine has our backend, or a worker extension: whose, only the worker's process can tell."""
    transfer = vllm_config.weight_transfer_config
    ours = transfer is not None and transfer.backend == BACKEND
    return ours or bool(vllm_config.parallel_config.worker_extension_cls)


def require_nothing_kept(core: Any) -> None:
    """To be called before requests of a core run.

    Raises:
        RefitError: it keeps what old weights made.
    """
    if kept := getattr(core, KEPT, ""):
        raise RefitError(
            f"the engine stays paused: its weights are new, but vLLM keeps what the old ones made ({kept}), so requests "
            "would mix both. End what holds it (a KV connector's transfers), call finish_weight_update again, update anew "
            "or refit by a driver, and resume then",
            stage="post_load",
        )


def _has_to_wait(core: Any) -> bool:
    return bool(core.model_executor.is_sleeping or getattr(core, KEPT, ""))


def _stay_paused(core: Any) -> None:
    # First, or the wake that the next update needs would be an error.
    if core.model_executor.is_sleeping:
        logger.info("the engine stays paused until weights and KV cache are awake; the last wake resumes it")
        return
    require_nothing_kept(core)
    logger.info("the engine stays paused, since another of its data-parallel replicas has to")
