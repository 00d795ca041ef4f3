"""vLLM general plug-in: prepares a vLLM process, before its model is loaded, for weights that change.

vLLM finds it by the entry point ``rlrefit`` of the group ``vllm.general_plugins`` and calls it in every
process; the environment variable ``VLLM_PLUGINS``, where it is set, has to name it.
"""

from __future__ import annotations

import logging
from typing import Any

from .patches import BACKEND, accept_backend, prepare_cores, shorten_refits, where_it_fits

logger = logging.getLogger(__name__)


def register() -> None:
    """Prepare this process; safe to call again.

    ``rlrefit`` becomes a backend of vLLM's weight transfer. Of vLLM two functions are replaced, the constructor of executors and
    the one of asynchronous clients, which for engines of ours apply what :mod:`.patches` lists, and for others do what they did.
    """
    where_it_fits(_register_backend, prepare_cores, shorten_refits)


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
