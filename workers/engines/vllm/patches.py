"""All that rlrefit changes in vLLM's own classes. Each patch is applied once per process and is safe to apply again.

=============================================== ======================================================== ===================
what is changed                                 why                                                      when
=============================================== ======================================================== ===================
``WeightTransferConfig.backend`` of vLLM 0.21   takes the name ``rlrefit`` too                           plug-in [1]_
``Executor.__init__``,                          tells a core and a client that are made for an engine    plug-in
``EngineCoreClient.make_async_mp_client``       of ours, for the next six
``AsyncScheduler.reset_prefix_cache`` [5]_      running requests would lose one token each               core [6]_
``EngineCore.resume_scheduler`` (and of         requests would run while memory sleeps, or beside what   core
``DPEngineCoreProc``)                           old weights made
``EngineCore.collective_rpc``                   vLLM's own weight updates leave what old weights made    core
``AsyncLLM.pause_generation``                   a pause would wait 20 ms, in each refit                  client [6]_
``FastAPI.include_router``                      a refit would take seven calls (:mod:`.refit_route`)     client
``Worker.load_model``                           weights are guarded from the moment they are loaded      worker [2]_
``_custom_ops._supports_onednn`` (CPU)          packed weights have no bytes that can be written         worker
``cpu_fused_moe._CPU_MOE_ACT_FN`` (CPU) [4]_    the fallback of experts fails outside of construction    worker
``linear._POSSIBLE_NVFP4_KERNELS`` (CPU) [7]_   it names none for CPUs, where the emulation computes     worker
``Worker``'s four weight-transfer calls         they go to rlrefit's engine                              backend [3]_
=============================================== ======================================================== ===================

.. [1] By :mod:`.plugin` in every vLLM process. Nothing else is changed in one that makes no engine of ours.
.. [2] As a worker's process imports :mod:`.extension`, before its model is loaded.
.. [3] As a worker makes its :class:`~.transfer_engine.RlrefitTransferEngine`.
.. [4] Of a vLLM that has it; later ones pack all experts on CPUs, which take the misc path.
.. [5] Of a vLLM that loses it; later ones count the tokens in flight.
.. [6] As a process makes the core, or the client, of an engine that has our backend or a worker extension.
.. [7] 0.21 takes the emulation by its environment, too; later ones by nothing.

:mod:`.guard` wraps a worker's ``sleep``, ``wake_up``, ``reload_weights`` and ``execute_model`` besides, on the instance. :func:`end_with_parents`
patches nothing: it starts a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ....integration.errors import RefitError
from ..common.answers import REFIT_ERROR, answer, told
from .compat import (
    CPU_EXPERTS,
    CPU_LINEAR,
    CPU_NVFP4,
    FIRST,
    LAST,
    PAUSING,
    REFITTING,
    has,
    require_core,
    require_supported_runner,
)
from .connectors import require_droppable_caches

logger = logging.getLogger(__name__)

# The name of our backend of vLLM's weight transfer.
BACKEND = "rlrefit"
# What a driver calls on all workers once its refit has committed and nothing is left that older weights made.
DROPPED = "refit_caches_dropped"
# An engine core's attribute: what it keeps of old weights, as text; missing or empty if nothing.
KEPT = "_kept_of_old_weights"
_MARK = "_patched_by_rlrefit"
# What a request's constructor sets, where vLLM discards a token whether or not one is in flight.
_DISCARD = "discard_latest_async_tokens"
_UPDATE = "update_weights"
_NEED_REST = ("start_weight_update", _UPDATE)
_FINISH = "finish_weight_update"
_SERVABLE = "refit_require_servable"
# Names that vLLM's launcher gives its processes. An engine inside of its driver's process has neither.
_CORE, _WORKER = "EngineCore", "VllmWorker"
_watching = threading.Event()


class Refitted:
    """Among the bases of workers that rlrefit refits, by which they are told from others of the same process."""


def may_be_refitted(vllm_config: Any) -> bool:
    """Whether the engine has our backend, or a worker extension: whose, only the worker's process can tell."""
    return _has_our_backend(vllm_config) or bool(vllm_config.parallel_config.worker_extension_cls)


def _has_our_backend(vllm_config: Any) -> bool:
    transfer = vllm_config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def _is_ours(vllm_config: Any) -> bool:
    extension = str(vllm_config.parallel_config.worker_extension_cls)
    return _has_our_backend(vllm_config) or extension.startswith("rlrefit.")


def _is_patched(function: Any) -> bool:
    return hasattr(function, _MARK)


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """``replacement`` is a function, or a ``staticmethod`` of one."""
    setattr(getattr(replacement, "__func__", replacement), _MARK, True)
    setattr(owner, name, replacement)


def where_it_fits(*changes: Callable[[], None]) -> None:
    """Make changes of vLLM, each of which may be made before.

    vLLM's processes end with an exception of a plug-in. So where another vLLM lacks a name, the log says so and its users go
    on; who asks for rlrefit gets its own error then.
    """
    for change in changes:
        try:
            change()
        except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning(
                "rlrefit's plug-in is made for vLLM %s to %s and does not fit this one (%s: %s: %s). Refits may be refused; "
                "everything else of vLLM is as it was",
                FIRST,
                LAST,
                change.__name__,
                type(error).__name__,
                error,
            )


# Applied by the plug-in, in every process of every engine.


def accept_backend(config: type[Any]) -> None:
    """Let ``backend`` of vLLM's ``WeightTransferConfig`` take our name too.

    In vLLM 0.21 it is a ``Literal`` of vLLM's own engines, which the factory's registry may go beyond. The field gets a
    wider ``Literal`` and pydantic builds the class's validation anew, so other names are refused as before. A release
    in which it is a plain string is left alone.
    """
    [backend] = [found for found in dataclasses.fields(config) if found.name == "backend"]
    if get_origin(backend.type) is not Literal or BACKEND in get_args(backend.type):
        return
    from pydantic.dataclasses import rebuild_dataclass

    backend.type = Literal[(*get_args(backend.type), BACKEND)]
    config.__annotations__["backend"] = backend.type
    rebuild_dataclass(config, force=True)


def prepare_cores() -> None:
    """Have what concerns cores applied once a process makes one for an engine that may be refitted.

    vLLM loads plug-ins as a core begins. With its configuration all of them make an executor then, before anything runs.
    """
    from vllm.v1.executor.abstract import Executor

    original = Executor.__init__
    if _is_patched(original):
        return

    @functools.wraps(original)
    def __init__(executor: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if may_be_refitted(vllm_config):
            where_it_fits(keep_tokens_of_preempted_requests, stay_paused_while_asleep, watch_weight_updates)
        original(executor, vllm_config, *args, **kwargs)

    _patch(Executor, "__init__", __init__)


def shorten_refits() -> None:
    """Let a pause of our engines end as soon as all outputs of before have been processed, and their servers refit in one call.

    vLLM gives outputs 20 ms, which is a third of what a refit of a small model takes. ``AsyncLLM`` itself is changed, and what adds a
    server's routes, once a process makes one of our engines: workers and cores need not load them.
    """
    if not has(PAUSING):
        return
    from vllm.v1.engine.core_client import EngineCoreClient

    original = EngineCoreClient.make_async_mp_client
    if _is_patched(original):
        return

    @functools.wraps(original)
    def make_async_mp_client(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(vllm_config):
            _pause_by_outputs()
        # A server makes its engine first, and then its routes.
        if _has_our_backend(vllm_config) and "fastapi" in sys.modules and has(REFITTING):
            _refit_in_one_call()
        return original(vllm_config, *args, **kwargs)

    _patch(EngineCoreClient, "make_async_mp_client", staticmethod(make_async_mp_client))


# Applied where a process makes the core of an engine that may be refitted. Others of the same process are left alone.


def keep_tokens_of_preempted_requests() -> None:
    """Let the asynchronous scheduler discard a token only where one is in flight.

    ``reset_prefix_cache(reset_running_requests=True)``, by which vLLM 0.21 drops what was computed with old weights (also
    within ``pause_generation(mode="keep")``), tells that scheduler to discard each request's next token: one that is still
    in flight will be computed again. A paused engine has none in flight. The token that is then discarded is the first one
    after the pause, which the model has already taken as its next input: it is missing in the output, and the context that
    later tokens came from is not the one that the trainer sees.

    Later releases discard as many as are in flight. Nothing is changed in these.
    """
    if not _discards_by_flag():
        return
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    original = AsyncScheduler.reset_prefix_cache
    if _is_patched(original):
        return

    @functools.wraps(original)
    def reset_prefix_cache(scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        if not may_be_refitted(scheduler.vllm_config):
            return original(scheduler, *args, **kwargs)
        without_tokens_in_flight = [
            request
            for request in scheduler.running
            if not request.num_output_placeholders and not request.discard_latest_async_tokens
        ]
        done = original(scheduler, *args, **kwargs)
        for request in without_tokens_in_flight:
            request.discard_latest_async_tokens = False
        return done

    _patch(AsyncScheduler, "reset_prefix_cache", reset_prefix_cache)


def _discards_by_flag() -> bool:
    from vllm.v1.request import Request

    return _DISCARD in Request.__init__.__code__.co_names


def require_kept_tokens(vllm_config: Any) -> None:
    """To be called before running requests of an engine are preempted, in its core's process or its client's.

    The core loads the plug-ins that its client loads, so what can be changed here was changed there.

    Raises:
        RefitError: they would lose a token.
    """
    if not (vllm_config.scheduler_config.async_scheduling and _discards_by_flag()):
        return
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.executor.abstract import Executor

    if _is_patched(Executor.__init__):
        where_it_fits(keep_tokens_of_preempted_requests)
    if not _is_patched(AsyncScheduler.reset_prefix_cache):
        raise RefitError(
            "vLLM's asynchronous scheduler would lose one token of each running request, because rlrefit's plug-in is not "
            "loaded. Nothing has moved. Name rlrefit in VLLM_PLUGINS, or start the engine with async_scheduling=False, "
            "or refit between requests",
            stage="handshake",
        )


def stay_paused_while_asleep() -> None:
    """Let engine cores that refits may reach run no request before all of the engine is awake, nor while they keep what old
    weights made.

    vLLM 0.21 resumes the scheduler whenever it is asked to, and with each ``wake_up``, whatever that woke. Between
    ``wake_up(tags=["weights"])`` and the last wake, queued requests would run: on discarded weights, and on a KV cache without
    memory, which ends the worker. All ways lead through ``resume_scheduler``, so that is where an engine waits.
    """
    from vllm.config import ParallelConfig
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore

    alone, together = EngineCore.resume_scheduler, DPEngineCoreProc.resume_scheduler
    if _is_patched(alone):
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

    _patch(EngineCore, "resume_scheduler", resume_scheduler)
    _patch(DPEngineCoreProc, "resume_scheduler", resume_with_replicas)


def _has_to_wait(core: Any) -> bool:
    return bool(core.model_executor.is_sleeping or getattr(core, KEPT, ""))


def _stay_paused(core: Any) -> None:
    # First, or the wake that the next update needs would be an error.
    if core.model_executor.is_sleeping:
        logger.info("the engine stays paused until weights and KV cache are awake; the last wake resumes it")
        return
    _require_nothing_kept(core)
    logger.info("the engine stays paused, since another of its data-parallel replicas has to")


def _require_nothing_kept(core: Any) -> None:
    if kept := getattr(core, KEPT, ""):
        raise RefitError(
            f"the engine stays paused: its weights are new, but vLLM keeps what the old ones made ({kept}), so requests "
            "would mix both. End what holds it (a KV connector's transfers), call finish_weight_update again, update anew "
            "or refit by a driver, and resume then",
            stage="post_load",
        )


def watch_weight_updates() -> None:
    """Let engine cores that have our backend update weights by vLLM's own calls without traces of the old ones.

    The four weight-transfer calls reach workers only. The scheduler goes on meanwhile: what it cached with the old weights
    serves new requests, and running requests keep the keys and values that the old weights made. vLLM leaves that to the
    caller, whose ``reset_prefix_cache()`` does nothing while a request holds keys and values, and over HTTP answers 200 all
    the same. The core runs one call at a time and no step beside it, so it is the place to refuse and to drop.

    While requests run, both calls that change weights are refused. Once weights have arrived, prefixes, the keys and values of
    waiting requests, and encoder outputs are dropped. Where that fails the engine does not resume until a later update,
    ``finish_weight_update``, or a driver's refit could drop them.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.collective_rpc
    if _is_patched(original):
        return

    @functools.wraps(original)
    def collective_rpc(
        core: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        ours = _has_our_backend(core.vllm_config)
        if may_be_refitted(core.vllm_config):
            require_core(core)
        if ours and method in _NEED_REST:
            _require_rest(core, method)
        if ours and method == _FINISH and getattr(core, KEPT, ""):
            _drop_what_old_weights_made(core)
        if ours and method == _SERVABLE:
            _require_nothing_kept(core)
        answers = original(core, method, timeout, args, kwargs)
        if ours and method == _UPDATE:
            _drop_what_old_weights_made(core)
        if ours and method == DROPPED and not any(REFIT_ERROR in answer for answer in answers):
            setattr(core, KEPT, "")
        return answers

    _patch(EngineCore, "collective_rpc", collective_rpc)


def _require_rest(core: Any, method: str) -> None:
    require_droppable_caches(core.vllm_config)
    # A scheduler that is paused with its requests kept counts none of them; one whose pause lets them end counts those.
    if core.scheduler.has_unfinished_requests():
        raise RefitError(
            f"{method} was called while requests are running: their next tokens would come from new weights and from keys "
            "and values of the old ones. Nothing has moved. Pause the engine first and resume it after "
            'finish_weight_update: POST /pause?mode=keep and POST /resume, AsyncLLM.pause_generation(mode="keep") and '
            'resume_generation(), or LLM.sleep(level=0, mode="keep") and wake_up(tags=["scheduling"])',
            stage="handshake",
        )
    if core.scheduler.running:
        require_kept_tokens(core.vllm_config)


def _drop_what_old_weights_made(core: Any) -> None:
    config = core.vllm_config
    connected = config.kv_transfer_config is not None
    try:
        if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=connected):
            raise RuntimeError("the KV connector did not drop its cache")
        if config.model_config.is_multimodal_model:
            core.reset_encoder_cache()
    # Any exception: connectors may be of any library, and the engine must not resume after one.
    except Exception as error:
        setattr(core, KEPT, f"{type(error).__name__}: {error}")
        # To pause again would have data-parallel replicas step until all of them have.
        if not core.is_scheduler_paused():
            core.pause_scheduler("keep", clear_cache=False)
        raise RefitError(
            f"the new weights are in place, but vLLM keeps what the old ones made ({error}), so requests would mix both; the "
            "engine is paused and does not resume. End what holds it (a KV connector's transfers), then call "
            "finish_weight_update again, update anew or refit by a driver",
            stage="post_load",
        ) from error
    setattr(core, KEPT, "")


# Applied where a process makes the client of an engine of ours.


def _pause_by_outputs() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from .async_driver import EngineCores

    original = AsyncLLM.pause_generation
    if _is_patched(original) or not _ends_with_sleep(original):
        return

    @functools.wraps(original)
    async def pause_generation(llm: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_ours(llm.vllm_config):
            await original(llm, *args, **kwargs)
            return

        async def pause_scheduler(*of_core: Any, **named: Any) -> None:
            await llm.engine_core.pause_scheduler_async(*of_core, **named)
            await EngineCores(llm).outputs_processed()
            raise _Paused

        core = _Instead(llm.engine_core, pause_scheduler_async=pause_scheduler)
        with contextlib.suppress(_Paused):
            await original(_Instead(llm, engine_core=core), *args, **kwargs)

    _patch(AsyncLLM, "pause_generation", pause_generation)


def _refit_in_one_call() -> None:
    from fastapi import FastAPI

    from . import refit_route

    original = FastAPI.include_router
    if _is_patched(original):
        return

    @functools.wraps(original)
    def include_router(app: Any, router: Any, *args: Any, **kwargs: Any) -> None:
        routes = {getattr(route, "path", ""): getattr(route, "endpoint", None) for route in router.routes}
        # Beside vLLM's own calls for weights, whose module has had three names.
        update = routes.get(f"/{_UPDATE}")
        if getattr(update, "__module__", "").startswith("vllm.") and refit_route.PATH not in routes:
            router.post(refit_route.PATH)(refit_route.refit)
        original(app, router, *args, **kwargs)

    _patch(FastAPI, "include_router", include_router)


def _ends_with_sleep(function: Callable[..., Any]) -> bool:
    return inspect.getsource(function).rstrip().rpartition("\n")[2].strip().startswith("await asyncio.sleep(")


class _Paused(Exception):
    """Nothing of vLLM's own pause is left but to sleep."""


class _Instead:
    """An object of vLLM's with some other attributes, for one call."""

    def __init__(self, whole: Any, **others: Any) -> None:
        self._whole = whole
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


# Applied in a worker's process, before its model is loaded; other engines are left alone.


def prepare_worker_process() -> None:
    """Called as the worker extension or the transfer engine is imported.

    Weights are guarded from the moment that they are loaded, and vLLM's processes end with the one that started them.
    On the CPU platform, weights keep the layout in which they are loaded.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    guard_loaded_models(Worker)
    end_with_parents()
    if current_platform.is_cpu():
        _keep_plain_layouts()
        _emulate_nvfp4()


def guard_loaded_models(worker_class: type[Any]) -> None:
    """Have the workers of ``worker_class`` that rlrefit refits guarded as soon as their model is loaded, before any call of a
    driver.

    Their ``load_model`` raises ``RefitError`` where the model runner lacks what refits use. Others are left alone: they take
    weights in ways that the guard doesn't hear of, and it would let nothing generate from them.
    """
    original = worker_class.load_model
    if _is_patched(original):
        return

    @functools.wraps(original)
    def load_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
        from .worker_refit import WorkerRefit

        if not (isinstance(worker, Refitted) or _has_our_backend(worker.vllm_config)):
            return original(worker, *args, **kwargs)
        require_supported_runner(worker.model_runner)
        result = original(worker, *args, **kwargs)
        WorkerRefit.of(worker)
        return result

    _patch(worker_class, "load_model", load_model)


def _keep_plain_layouts() -> None:
    """Have linear weights and experts of the CPU platform keep their plain layout, which the log says once.

    vLLM would pack linear weights for oneDNN, which replaces each parameter by one of shape ``[0]`` behind an opaque
    handle: no live bytes to write into, and every linear weight on the misc path. Plain weights go through
    ``torch.nn.functional.linear``.

    Where vLLM has no packed kernel for experts (x86 without AVX-512, and sizes that its kernel doesn't take), its fallback
    builds an activation layer in the forward pass, which fails outside of model construction. It calls SiluAndMul's
    arithmetic itself here, the static method that it would reach.

    A vLLM without these names packs what it packs: :mod:`.layouts` finds that out from the layers.
    """
    if not has(CPU_LINEAR):
        return
    from vllm import _custom_ops

    if not _custom_ops._supports_onednn:
        return
    _custom_ops._supports_onednn = False
    if has(CPU_EXPERTS):
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native
    logger.info(
        "CPU platform: linear weights keep their plain layout (no oneDNN packing), so that a refit can write "
        "into them"
    )


def _emulate_nvfp4() -> None:
    """Have layers in NVFP4 computed by vLLM's own emulation on the CPU platform, for which later releases name no kernel.

    A layer would find none, and the engine end as it starts. The emulation computes on CPUs by operations of torch.
    """
    if not has(CPU_NVFP4):
        return
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    if not linear._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU):
        linear.register_linear_kernel(linear.EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


def hand_over_weight_transfer(
    worker_class: type[Any],
    extension: type[Any],
    engine_class: type[Any],
    calls: Mapping[str, Callable[..., Any]],
) -> None:
    """Let the four weight-transfer calls of vLLM's worker go to its engine where that is ours.

    vLLM 0.21 gives an engine whole tensors, between the start and the end of a layerwise reload of the whole model.

    Args:
        worker_class: vLLM's worker.
        extension: whose methods come with it, as ``worker_extension_cls`` would bring them.
        engine_class: ours.
        calls: by name of the worker's method the method of our engine.
    """
    if not issubclass(worker_class, extension):
        worker_class.__bases__ = (*worker_class.__bases__, extension)
    for name, ours in calls.items():
        original = getattr(worker_class, name)
        if not _is_patched(original):
            _patch(worker_class, name, _handed_over(original, engine_class, ours))


def _handed_over(
    original: Callable[..., Any], engine_class: type[Any], ours: Callable[..., dict[str, Any]]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(worker: Any, *args: Any, **kwargs: Any) -> Any:
        engine = worker.weight_transfer_engine
        if not isinstance(engine, engine_class):
            return original(worker, *args, **kwargs)
        return _raise_on_the_last(worker, answer(lambda: ours(engine, worker, *args, **kwargs)))

    return method


def _raise_on_the_last(worker: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Raise an error on the engine's last worker, and answer with it on the others.

    vLLM's multi-process executor reads the workers' answers in order and stops at the first error, which leaves the
    answers behind it to be taken for those of the next call. A failed refit fails on all ranks, the last one included.

    Raises:
        RuntimeError: on the last worker; its text tells the error.
    """
    if REFIT_ERROR in found and worker.rank == worker.vllm_config.parallel_config.world_size - 1:
        raise RuntimeError(told(found))
    return found


def end_with_parents(every_s: float = 1.0) -> None:
    """Watch, from a worker's process, the engine core and the driver, and end with them; once per process.

    vLLM's own watch goes one way: a worker ends with its engine core. An engine core whose driver was killed lives on, and
    its workers with it, and their GPU memory can't be used any more. A signal on the parent's death (``PR_SET_PDEATHSIG``)
    comes already when the *thread* that started the process ends, so the parents are looked at instead.

    Does nothing in processes that vLLM's launcher did not start: Ray ends its own actors, and a script decides for itself.
    """
    parent = multiprocessing.parent_process()
    name = multiprocessing.current_process().name
    if parent is None or parent.pid is None or not name.startswith((_CORE, _WORKER)) or _watching.is_set():
        return
    _watching.set()
    core = parent.pid
    driver = _parent_of(core) if name.startswith(_WORKER) else None

    def watch() -> None:
        while os.getppid() == core:
            if driver is not None and _parent_of(core) not in (driver, None):
                _end(core, f"the driver (process {driver}) has ended: the engine core ends")
            time.sleep(every_s)
        _end(os.getpid(), f"process {core}, which started this one, has ended")

    threading.Thread(target=watch, name="rlrefit parents", daemon=True).start()


def _end(process: int, reason: str) -> None:
    logger.error("%s", reason)
    # Nothing less: an orphan may hang in a collective, where no handler runs.
    os.kill(process, signal.SIGKILL)


def _parent_of(process: int) -> int | None:
    """The parent of ``process``; None if that has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(status.rpartition(")")[2].split()[1])
