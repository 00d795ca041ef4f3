"""vLLM general plug-in: prepares a vLLM process, before its model is loaded, for weights that change.

vLLM finds it by the entry point ``rlrefit`` of the group ``vllm.general_plugins`` and calls it in every
process; the environment variable ``VLLM_PLUGINS``, where it is set, has to name it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Literal, get_args, get_origin

from .preemption import keep_tokens_of_preempted_requests

logger = logging.getLogger(__name__)

BACKEND = "rlrefit"


def register() -> None:
    """Prepare this process; safe to call again.

    Everywhere, ``rlrefit`` becomes a backend of vLLM's weight transfer, and requests that run through a refit keep all
    their tokens (:mod:`.preemption`).

    On the CPU platform, linear weights keep their plain layout, which the log says once. vLLM would pack them for
    oneDNN, which replaces each linear parameter by one of shape ``[0]`` behind an opaque handle: no live bytes to write
    into, and every linear weight on the misc path. Plain weights go through ``torch.nn.functional.linear``.

    Experts run where vLLM has no packed kernel for them (x86 without AVX-512): its fallback builds an
    activation layer in the forward pass, which fails outside of model construction.
    """
    _register_backend()
    keep_tokens_of_preempted_requests()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops

    if not _custom_ops._supports_onednn:
        return
    _custom_ops._supports_onednn = False
    _call_silu_without_a_layer()
    logger.info(
        "CPU platform: linear weights keep their plain layout (no oneDNN packing), so that a refit can write "
        "into them"
    )


def transfer_config() -> Any:
    """vLLM's ``WeightTransferConfig`` with our backend, for ``LLM(weight_transfer_config=…)`` and ``EngineArgs``.

    The command line takes ``--weight-transfer-config '{"backend": "rlrefit"}'`` as it is, since it loads plug-ins
    before it parses. ``EngineArgs`` loads them after it has checked a dictionary, so that Python needs either this or
    ``vllm.plugins.load_general_plugins()`` first.
    """
    _register_backend()
    from vllm.config.weight_transfer import WeightTransferConfig

    return WeightTransferConfig(backend=BACKEND)


def _register_backend() -> None:
    """Make the backend known to vLLM's factory and to its configuration, if this vLLM has weight transfer.

    Silent where it has not: the plug-in runs in every vLLM of the environment, and who asks for the backend by name gets
    vLLM's own error.
    """
    try:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as error:
        logger.debug("this vLLM has no weight transfer to register with: %s", error)
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, f"{__package__}.transfer_engine", "RlrefitTransferEngine"
        )
    _accept_backend(WeightTransferConfig)


def _accept_backend(config: type[Any]) -> None:
    """Let ``config.backend`` take our name too.

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


def _call_silu_without_a_layer() -> None:
    """Let the CPU's experts call SiluAndMul's arithmetic itself, the static method that they would reach."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native
