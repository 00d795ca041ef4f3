"""vLLM's kernels of MXFP8 on a CPU: their loading and processing is Python.

Marlin's one function in CUDA is :mod:`tests.marlin`'s. The emulation could compute here, too, but vLLM has it for GPUs alone.
"""

from __future__ import annotations

import os

import torch

from tests.marlin import gptq_marlin_repack

EMULATION, MARLIN, FLASHINFER = "emulation", "marlin", "flashinfer"
_KERNELS = {
    EMULATION: "EmulationMxfp8LinearKernel",
    MARLIN: "MarlinMxfp8LinearKernel",
    FLASHINFER: "FlashInferCutlassMxfp8LinearKernel",
}


def choose_mxfp8_kernel(kernel: str) -> None:
    """Have this process's vLLM hold MXFP8 for ``kernel``, and experts for Marlin."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8
    from vllm.platforms import current_platform

    # From 0.26 on the emulation would keep what the codes mean, in BF16, and refits of it take the misc path.
    os.environ["VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"] = "0"
    chosen = getattr(linear, _KERNELS[kernel])
    chosen.is_supported = classmethod(lambda cls, capability=None: (True, None))
    linear._POSSIBLE_MXFP8_KERNELS[current_platform._enum] = [chosen]
    MarlinExperts._supports_current_device = staticmethod(lambda: True)
    _custom_ops.gptq_marlin_repack = gptq_marlin_repack
    marlin_utils_fp8.marlin_make_workspace_new = lambda *_: torch.zeros(4, dtype=torch.int)
