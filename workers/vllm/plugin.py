"""vLLM general plug-in: prepares a vLLM process, before its model is loaded, for weights that change.

vLLM finds it by the entry point ``rlrefit`` of the group ``vllm.general_plugins`` and calls it in every
process; the environment variable ``VLLM_PLUGINS``, where it is set, has to name it.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Prepare this process; does something on the CPU platform only, and says so once in the log.

    Linear weights keep their plain layout. vLLM would pack them for oneDNN, which replaces each linear
    parameter by one of shape ``[0]`` behind an opaque handle: no live bytes to write into, and every linear
    weight on the misc path. Plain weights go through ``torch.nn.functional.linear``.

    Experts run where vLLM has no packed kernel for them (x86 without AVX-512): its fallback builds an
    activation layer in the forward pass, which fails outside of model construction.
    """
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


def _call_silu_without_a_layer() -> None:
    """Let the CPU's experts call SiluAndMul's arithmetic itself, the static method that they would reach."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native
