"""An engine that wakes in parts runs no request before all of it is awake.

``wake_up`` of vLLM 0.21 resumes the scheduler whatever it woke. Between ``wake_up(tags=["weights"])`` and the refit,
queued requests would run: on discarded weights, and on a KV cache without memory, which ends the worker.
"""

from __future__ import annotations

import functools
from typing import Any

BACKEND = "rlrefit"
_MARK = "_waits_by_rlrefit"
# What wakes the scheduler alone, without memory.
_SCHEDULING = "scheduling"


def stay_paused_while_asleep() -> None:
    """Let engine cores of this process that refits may reach resume when nothing sleeps; safe to call again."""
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.wake_up
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wake_up(core: Any, tags: list[str] | None = None) -> None:
        if not may_be_refitted(core.vllm_config):
            original(core, tags)
            return
        memory = None if tags is None else [tag for tag in tags if tag != _SCHEDULING]
        if memory is None or memory:
            core.model_executor.wake_up(memory)
        if not core.model_executor.is_sleeping:
            core.resume_scheduler()

    setattr(wake_up, _MARK, True)
    EngineCore.wake_up = wake_up


def may_be_refitted(vllm_config: Any) -> bool:
    """Whether the engine has our backend, or a worker extension: whose, only the worker's process can tell."""
    transfer = vllm_config.weight_transfer_config
    ours = transfer is not None and transfer.backend == BACKEND
    return ours or bool(vllm_config.parallel_config.worker_extension_cls)
