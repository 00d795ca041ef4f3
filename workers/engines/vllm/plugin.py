"""vLLM general plug-in: prepares a vLLM process, before its model is loaded, for weights that change.

vLLM finds it by the entry point ``rlrefit`` of the group ``vllm.general_plugins`` and calls it in every
process; the environment variable ``VLLM_PLUGINS``, where it is set, has to name it.
"""

from __future__ import annotations

import logging
from typing import Any

from .compat import FIRST, LAST
from .patches import (
    BACKEND,
    accept_backend,
    keep_tokens_of_preempted_requests,
    shorten_refits,
    stay_paused_while_asleep,
    watch_weight_updates,
)

logger = logging.getLogger(__name__)


def register() -> None:
    """Prepare this process; safe to call again.

    ``rlrefit`` becomes a backend of vLLM's weight transfer, and those of :mod:`.patches` that do not concern workers are
    applied.

    vLLM runs this in every process of every engine of the environment, and an exception of a plug-in ends the process. So
    where another vLLM lacks a name, the log says so and its users go on; who asks for rlrefit gets its own error then.
    """
    for prepare in (
        _register_backend,
        keep_tokens_of_preempted_requests,
        stay_paused_while_asleep,
        watch_weight_updates,
        shorten_refits,
    ):
        try:
            prepare()
        except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning(
                "rlrefit's plug-in is made for vLLM %s to %s and does not fit this one (%s: %s: %s). Refits may be refused; "
                "everything else of vLLM is as it was",
                FIRST,
                LAST,
                prepare.__name__,
                type(error).__name__,
                error,
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
    accept_backend(WeightTransferConfig)
