"""Which calls of a vLLM worker are guarded (:mod:`..common.guard`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ....integration.colocated.stages import TAGS, WEIGHTS
from ....integration.gpu_memory.driver import DriverError, call, driver, missing
from ....integration.session import ServingState
from ..common.guard import WeightsGuard, call_after, call_before
from .copies import Copies
from .drafters import live_drafter

# The level from which the weights are not kept on the host.
_DISCARDING = 2
# An attribute of workers that keep the buffers of their drafter through such a sleep.
_KEEPS_DRAFTERS = "_sleep_saved_draft_buffers"
# Keys and values, and what latent attention makes anew of each refit's weights.
_NOT_KEPT = ("kv_cache", "W_")
# Bytes. What is larger is memory to work in, of which a step needs nothing that was there before.
_LARGEST = 1 << 24


def guard_worker(worker: Any, state: ServingState) -> WeightsGuard:
    """Guard a worker's weights from here on.

    Args:
        worker: vLLM's worker. Its ``sleep``, ``wake_up``, ``reload_weights`` and ``compile_or_warm_up_model``, and its model
            runner's ``execute_model``, are wrapped on the instance, which is where vLLM's executor looks them up.
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

    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    copies = Copies(worker.model_runner.get_model())

    def before_sleep(level: int = 1) -> None:
        if level >= _DISCARDING and WEIGHTS not in guard.asleep:
            # Once the weights are undefined nothing tells any more what is a copy of them.
            copies.require_none()
            kept.extend((lost, lost.to("cpu", copy=True)) for lost in _lost_in_a_sleep(worker))

    def slept(level: int = 1) -> None:
        guard.slept(TAGS)
        if level >= _DISCARDING:
            guard.discarded(f"a level {level} sleep discarded the weights")

    def woke(tags: list[str] | None = None) -> None:
        woken = TAGS if tags is None else tags  # vLLM wakes all where it is given no tags
        guard.woke(woken)
        if WEIGHTS in woken:
            for lost, copy in kept:
                lost.data.copy_(copy)
            kept.clear()

    worker.compile_or_warm_up_model = warm_up
    call_before(worker.model_runner, "execute_model", before_step)
    call_before(worker, "sleep", before_sleep)
    call_after(worker, "sleep", slept)
    call_after(worker, "wake_up", woke)
    call_before(worker, "reload_weights", lambda *_, **__: state.replaced())
    return guard


def _lost_in_a_sleep(worker: Any) -> Iterator[torch.Tensor]:
    """What a sleep discards that neither vLLM keeps nor a refit brings.

    That is constants that modules or their kernels of attention hold beside parameters and buffers: the ones of a norm without a
    weight, scales of Gemma 3n's embeddings. And buffers of a drafter: vLLM keeps those of the model that it serves, and later
    releases the drafter's too.
    """
    runner = worker.model_runner
    served, drafter = runner.get_model(), live_drafter(runner)
    caches = [cache for cache in getattr(runner, "kv_caches", ()) if isinstance(cache, torch.Tensor)]
    yield from _constants(served, caches)
    if drafter is not None:
        yield from _constants(drafter, caches)
        if not hasattr(worker, _KEEPS_DRAFTERS):
            shared = {id(buffer) for buffer in served.buffers()}
            yield from (buffer for buffer in drafter.buffers() if id(buffer) not in shared)


def _constants(model: torch.nn.Module, caches: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    held = (*model.parameters(), *model.buffers())
    others = {tensor.untyped_storage()._cdata for tensor in (*held, *caches)}
    devices = {tensor.device for tensor in held}
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        kernel = getattr(getattr(module, "impl", None), "__dict__", {})
        for name, value in (*vars(module).items(), *kernel.items()):
            if isinstance(value, torch.Tensor) and value.device in devices and not name.startswith(_NOT_KEPT):
                found[id(value)] = value
    for value in found.values():
        if value.nbytes <= _LARGEST and value.untyped_storage()._cdata not in others:
            yield value


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
