"""vLLM's kernels of INT4 weights on a CPU: the CPU's own, and Marlin's, whose loading and processing is Python.

Marlin's one function in CUDA is :mod:`tests.marlin`'s.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from tests.marlin import gptq_marlin_repack

# Experts beside the CPU's linear layers are loaded for Triton.
CPU, MARLIN, UNKNOWN = "cpu", "marlin", "unknown"
_EXPERTS = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"


def choose_int4_kernel(kernel: str) -> None:
    """Have this process's vLLM hold INT4 for ``kernel``."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform

    marlin = linear.MarlinLinearKernel
    # As any other class of another name, of whose step nothing is known.
    other = type("OtherLinearKernel", (marlin,), {})
    chosen = {CPU: linear.CPUWNA16LinearKernel, MARLIN: marlin, UNKNOWN: other}[kernel]
    if kernel != CPU:
        chosen.can_implement = classmethod(lambda cls, config: (True, None))
    linear._POSSIBLE_KERNELS[current_platform._enum] = [chosen]
    _custom_ops.gptq_marlin_repack = gptq_marlin_repack
    _custom_ops.gptq_marlin_moe_repack = _repack_experts
    _choose_experts(marlin=kernel != CPU)
    modules = [marlin.__module__, f"{_EXPERTS}.compressed_tensors_moe_wna16_marlin"]
    # vLLM 0.32 has one method for experts, and no such memory.
    for module in map(import_module, modules[: 1 if has_one_method_of_experts() else 2]):
        if hasattr(module, "marlin_make_workspace_new"):
            module.marlin_make_workspace_new = lambda *_: torch.zeros(4, dtype=torch.int)


def _choose_experts(marlin: bool) -> None:
    chooser = import_module(f"{_EXPERTS}.compressed_tensors_moe")
    if hasattr(chooser, "check_moe_marlin_supports_layer"):
        chooser.check_moe_marlin_supports_layer = lambda *_, **more: marlin
    method = import_module(
        f"{_EXPERTS}.compressed_tensors_moe_wna16{'' if has_one_method_of_experts() else '_marlin'}"
    )
    if hasattr(method, "select_wna16_moe_backend"):
        backends = import_module("vllm.model_executor.layers.fused_moe.oracle.int_wna16")
        # Of 0.26 the method for Triton is another one.
        chosen = backends.WNA16MoEBackend["MARLIN" if marlin or not has_one_method_of_experts() else "TRITON"]
        method.select_wna16_moe_backend = lambda **_: (chosen, backends.backend_to_kernel_cls(chosen)[0])


def has_one_method_of_experts() -> bool:
    """Whether this vLLM has one method for the experts of all kernels, as 0.32, which loads them in the checkpoint's order: Triton's too."""
    return find_spec(f"{_EXPERTS}.compressed_tensors_moe_wna16_marlin") is None


def _repack_experts(codes: torch.Tensor, *order_and_sizes: Any, **more: Any) -> torch.Tensor:
    *order, size_k, size_n, num_bits = order_and_sizes
    assert not any(perm.numel() for perm in order)
    sizes = {"size_k": size_k, "size_n": size_n, "num_bits": num_bits}
    return torch.stack([gptq_marlin_repack(one, **sizes, **more) for one in codes])
