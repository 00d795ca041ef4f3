"""vLLM's kernels of INT4 weights on a CPU: the CPU's own, and Marlin's, whose loading and processing is Python.

Marlin's one function in CUDA is :mod:`tests.marlin`'s.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.marlin import gptq_marlin_repack

# Experts beside the CPU's linear layers are loaded for Triton.
CPU, MARLIN, UNKNOWN = "cpu", "marlin", "unknown"


def choose_int4_kernel(kernel: str) -> None:
    """Have this process's vLLM hold INT4 for ``kernel``."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe,
        compressed_tensors_moe_wna16_marlin,
    )
    from vllm.platforms import current_platform

    marlin = linear.MarlinLinearKernel
    # As any other class of another name, of whose step nothing is known.
    other = type("OtherLinearKernel", (marlin,), {})
    chosen = {CPU: linear.CPUWNA16LinearKernel, MARLIN: marlin, UNKNOWN: other}[kernel]
    if kernel != CPU:
        chosen.can_implement = classmethod(lambda cls, config: (True, None))
    linear._POSSIBLE_KERNELS[current_platform._enum] = [chosen]
    compressed_tensors_moe.check_moe_marlin_supports_layer = lambda *_: kernel != CPU
    _custom_ops.gptq_marlin_repack = gptq_marlin_repack
    _custom_ops.gptq_marlin_moe_repack = _repack_experts
    for module in (__import__(marlin.__module__, fromlist=[""]), compressed_tensors_moe_wna16_marlin):
        module.marlin_make_workspace_new = lambda *_: torch.zeros(4, dtype=torch.int)


def _repack_experts(
    codes: torch.Tensor, perm: torch.Tensor, size_k: int, size_n: int, num_bits: int, **more: Any
) -> torch.Tensor:
    return torch.stack(
        [
            gptq_marlin_repack(one, order, size_k=size_k, size_n=size_n, num_bits=num_bits, **more)
            for one, order in zip(codes, perm, strict=True)
        ]
    )
