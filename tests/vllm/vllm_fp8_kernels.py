"""vLLM's FP8 kernels for GPUs on a CPU: their loading and processing is Python, and a CPU without AMX has none of its own."""

from __future__ import annotations

import torch


def choose_kernels(*, rearranged: bool = False) -> None:
    """Have this process's vLLM hold FP8 blocks for Triton; nothing can be computed with them.

    Args:
        rearranged: its kernels of linear layers turn the rows of their weights round after loading.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.platforms import current_platform

    class Rearranging(TritonFp8BlockScaledMMKernel):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            super().process_weights_after_loading(layer)
            layer.weight.data = layer.weight.data.flip(0)

    kernel = Rearranging if rearranged else TritonFp8BlockScaledMMKernel
    TritonFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
    linear._POSSIBLE_FP8_BLOCK_KERNELS[current_platform._enum] = [kernel]
    TritonExperts._supports_current_device = staticmethod(lambda: True)
    TritonExperts._supports_quant_scheme = staticmethod(lambda weights, activations: True)
