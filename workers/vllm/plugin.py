"""vLLM general plug-in: prepares a vLLM process, before its model is loaded, for weights that change.

vLLM finds it by the entry point ``rlrefit`` of the group ``vllm.general_plugins`` and calls it in every
process; the environment variable ``VLLM_PLUGINS``, where it is set, has to name it.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """On the CPU platform, keep linear weights in their plain layout instead of packing them for oneDNN.

    Packing replaces each linear parameter by one of shape ``[0]`` behind an opaque handle, so there would
    be no live bytes to write into, and every linear weight would have to take the misc path. The plain
    weights go through ``torch.nn.functional.linear``. Does nothing on other platforms.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops

    if _custom_ops._supports_onednn:
        _custom_ops._supports_onednn = False
        logger.info(
            "CPU platform: linear weights keep their plain layout (no oneDNN packing), so that a refit can "
            "write into them"
        )
