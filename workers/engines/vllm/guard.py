"""Which calls of a vLLM worker are guarded (:mod:`..common.guard`)."""

from __future__ import annotations

from typing import Any

import torch

from ....integration.colocated.stages import TAGS, WEIGHTS
from ....integration.gpu_memory.driver import DriverError, call, driver, missing
from ....integration.session import ServingState
from ..common.guard import WeightsGuard, call_after, call_before
from .drafters import live_drafter

# The level from which the weights are not kept on the host.
_DISCARDING = 2
# An attribute of workers that keep the buffers of their drafter through such a sleep.
_KEEPS_DRAFTERS = "_sleep_saved_draft_buffers"


def guard_worker(worker: Any, state: ServingState) -> WeightsGuard:
    """Guard a worker's weights from here on.

    Args:
        worker: vLLM's worker. Its ``sleep``, ``wake_up`` and ``compile_or_warm_up_model``, and its model runner's
            ``execute_model``, are wrapped on the instance, which is where vLLM's executor looks them up.
        state: whose dirtiness forbids steps.
    """
    guard = WeightsGuard(
        state,
        dummy=worker.vllm_config.load_config.load_format == "dummy",
        is_unmapped=lambda: _is_unmapped(worker.model_runner.get_model()),
    )

    warming_up, own_warm_up = False, worker.compile_or_warm_up_model

    def before_step(scheduler_output: Any, *_: Any, dummy_run: bool = False, **__: Any) -> None:
        # An error here ends vLLM's engine core, as any error in a step does. A step without tokens computes nothing: by it a
        # paused scheduler tells the worker of requests that ended. Model Runner V2 also measures memory and warms up by
        # steps, of made-up tokens, whose outputs nobody reads.
        if scheduler_output.total_num_scheduled_tokens and not (dummy_run or warming_up):
            guard.require_servable()

    def warm_up(*args: Any, **kwargs: Any) -> Any:
        nonlocal warming_up
        warming_up = True
        try:
            return own_warm_up(*args, **kwargs)
        finally:
            warming_up = False

    kept: dict[str, torch.Tensor] = {}

    def before_sleep(level: int = 1) -> None:
        # vLLM keeps those of the model that it serves, and later releases the drafter's too.
        if level >= _DISCARDING and WEIGHTS not in guard.asleep and not hasattr(worker, _KEEPS_DRAFTERS):
            buffers = _drafters_buffers(worker.model_runner)
            kept.update((name, buffer.to("cpu", copy=True)) for name, buffer in buffers.items())

    def slept(level: int = 1) -> None:
        guard.slept(TAGS)
        if level >= _DISCARDING:
            guard.discarded(f"a level {level} sleep discarded the weights")

    def woke(tags: list[str] | None = None) -> None:
        woken = TAGS if tags is None else tags  # vLLM wakes all where it is given no tags
        guard.woke(woken)
        if kept and WEIGHTS in woken:
            for name, buffer in _drafters_buffers(worker.model_runner).items():
                buffer.data.copy_(kept[name])
            kept.clear()

    worker.compile_or_warm_up_model = warm_up
    call_before(worker.model_runner, "execute_model", before_step)
    call_before(worker, "sleep", before_sleep)
    call_after(worker, "sleep", slept)
    call_after(worker, "wake_up", woke)
    return guard


def _drafters_buffers(runner: Any) -> dict[str, torch.Tensor]:
    """Buffers of the drafter alone, by name."""
    drafter = live_drafter(runner)
    if drafter is None:
        return {}
    shared = {id(buffer) for buffer in runner.get_model().buffers()}
    return {name: buffer for name, buffer in drafter.named_buffers() if id(buffer) not in shared}


def _is_unmapped(model: torch.nn.Module) -> bool:
    """Whether the first weight's address has no memory behind it: the sleep may be older than the guard."""
    first = next(model.parameters(), None)
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
        return True  # CUDA does not know the address
