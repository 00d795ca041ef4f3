"""Weight updates by vLLM's own calls, as the engine's core sees them: nothing mixes old weights with new ones.

The four weight-transfer calls reach workers only. The scheduler goes on meanwhile: what it cached with the old weights
serves new requests, and running requests keep the keys and values that the old weights made. vLLM leaves that to the
caller, whose ``reset_prefix_cache()`` does nothing while a request holds keys and values, and over HTTP answers 200 all
the same. The core runs one call at a time and no step beside it, so it is the place to refuse and to drop.
"""

from __future__ import annotations

import functools
from typing import Any

from ....integration.errors import RefitError
from .answers import REFIT_ERROR
from .connectors import require_droppable_caches
from .preemption import require_kept_tokens
from .waking import BACKEND, DROPPED, KEPT, require_nothing_kept

_MARK = "_updates_watched_by_rlrefit"
_UPDATE = "update_weights"
_NEED_REST = ("start_weight_update", _UPDATE)
_FINISH = "finish_weight_update"
_SERVABLE = "refit_require_servable"


def watch_weight_updates() -> None:
    """Let engine cores of this process that have our backend update weights without traces of the old ones.

    While requests run, both calls are refused. Once weights have arrived, prefixes, the keys and values of waiting
    requests, and encoder outputs are dropped. Where that fails the engine does not resume (:mod:`.waking`) until a later
    update, ``finish_weight_update``, or a driver's refit could drop them. Safe to call again.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.collective_rpc
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def collective_rpc(
        core: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        transfer = core.vllm_config.weight_transfer_config
        ours = transfer is not None and transfer.backend == BACKEND
        if ours and method in _NEED_REST:
            _require_rest(core, method)
        if ours and method == _FINISH and getattr(core, KEPT, ""):
            _drop_what_old_weights_made(core)
        if ours and method == _SERVABLE:
            require_nothing_kept(core)
        answers = original(core, method, timeout, args, kwargs)
        if ours and method == _UPDATE:
            _drop_what_old_weights_made(core)
        if ours and method == DROPPED and not any(REFIT_ERROR in answer for answer in answers):
            setattr(core, KEPT, "")
        return answers

    setattr(collective_rpc, _MARK, True)
    EngineCore.collective_rpc = collective_rpc


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
    # Of any kind, since connectors are anybody's code: whatever it is, the engine must not resume.
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
