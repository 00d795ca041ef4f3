"""What rlrefit changes in a vLLM worker's process, once and before its model is loaded; other engines are left alone."""

from __future__ import annotations

import functools
import logging
from typing import Any

from .compat import require_supported_runner
from .orphans import end_with_parents
from .waking import BACKEND

logger = logging.getLogger(__name__)

_MARK = "_guarded_by_rlrefit"


class Refitted:
    """Among the bases of workers that rlrefit refits, by which they are told from others of the same process."""


def prepare_worker_process() -> None:
    """Called as the worker extension or the transfer engine is imported; safe to call again.

    Weights are guarded from the moment that they are loaded, and vLLM's processes end with the one that started them.

    On the CPU platform, linear weights keep their plain layout, which the log says once. vLLM would pack them for
    oneDNN, which replaces each linear parameter by one of shape ``[0]`` behind an opaque handle: no live bytes to write
    into, and every linear weight on the misc path. Plain weights go through ``torch.nn.functional.linear``.

    Experts run where vLLM has no packed kernel for them (x86 without AVX-512, and sizes that its kernel doesn't take): its
    fallback builds an activation layer in the forward pass, which fails outside of model construction.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    guard_loaded_models(Worker)
    end_with_parents()
    if current_platform.is_cpu():
        _keep_plain_layouts()


def guard_loaded_models(worker_class: type[Any]) -> None:
    """Have the workers of ``worker_class`` that rlrefit refits guarded as soon as their model is loaded, before any call of a
    driver.

    Their ``load_model`` raises ``RefitError`` where the model runner is not the one that refits are made for. Others are
    left alone: they take weights in ways that the guard doesn't hear of, and it would let nothing generate from them.
    """
    original = worker_class.load_model
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
        from .worker_refit import WorkerRefit

        if not _is_refitted(worker):
            return original(worker, *args, **kwargs)
        require_supported_runner(worker.model_runner)
        result = original(worker, *args, **kwargs)
        WorkerRefit.of(worker)
        return result

    setattr(load_model, _MARK, True)
    worker_class.load_model = load_model


def _is_refitted(worker: Any) -> bool:
    transfer = worker.vllm_config.weight_transfer_config
    return isinstance(worker, Refitted) or (transfer is not None and transfer.backend == BACKEND)


def _keep_plain_layouts() -> None:
    from vllm import _custom_ops

    if not _custom_ops._supports_onednn:
        return
    _custom_ops._supports_onednn = False
    _call_silu_without_a_layer()
    logger.info(
        "CPU platform: linear weights keep their plain layout (no oneDNN packing), so that a refit can write "
        "into them"
    )


def _call_silu_without_a_layer() -> None:
    """Let the CPU's experts call SiluAndMul's arithmetic itself, the static method that they would reach."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native
