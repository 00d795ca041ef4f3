"""The CPU that vLLM takes the machine for in the tests' processes, whatever it is.

vLLM's build for x86 has three libraries of kernels, and asks torch for the CPU's features to choose one. They differ in more than
speed: those for AVX-512 add up over shared memory in place of gloo, by waiting in loops, and lay the weights of experts whose sizes
suit their kernels out in another way. Were each machine's tests to run on its own library, what passes on one could fail on the next.
So they all take the machine for one with AVX2, which every CPU that vLLM runs on has. ``pytest --vllm-cpu`` takes another one, and
``vllm/test_vllm_cpus.py`` tries each. ``rlrefit bench --live`` starts vLLM anew, on the machine as it is.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# In the environment of the session and all that descends from it.
VARIABLE = "TESTS_VLLM_CPU"  # vLLM warns of names of its own that it does not know
PLAIN = "avx2"
# What vLLM asks for, and finds on each CPU; the library is _C_AVX2, _C_AVX512 and, from BF16 on, _C.
CPUS: dict[str, frozenset[str]] = {
    PLAIN: frozenset(),
    "avx512": frozenset({"avx512_f"}),
    "avx512_bf16": frozenset({"avx512_f", "avx512_bf16"}),
    "amx": frozenset({"avx512_f", "avx512_bf16", "amx_tile"}),
}


def _has(file: str) -> bool:
    """Whether the installed vLLM has a file; it is not imported for that."""
    vllm = importlib.util.find_spec("vllm")
    folders = [] if vllm is None else vllm.submodule_search_locations or []
    return any(Path(folder, file).exists() for folder in folders)


# Whether vLLM has no kernel for experts on CPUs that takes them as they are loaded.
PACKS_EXPERTS = not _has("model_executor/layers/fused_moe/cpu_fused_moe.py")
# Earlier releases refuse it with the CPU's attention.
HAS_RUNNER_V2 = PACKS_EXPERTS and _has("v1/worker/cpu/model_runner.py")
_own: Mapping[str, Any] = {}
_played: str | None = None


def chosen() -> str:
    """The CPU of this session's tests."""
    return os.environ.get(VARIABLE, PLAIN)


def is_here(cpu: str) -> bool:
    """Whether the machine has all that vLLM would find on this CPU."""
    return all(_features().get(feature) for feature in CPUS[cpu])


def show(cpu: str) -> None:
    """Let who asks torch in this process see this CPU."""
    import torch

    seen = dict(_features()) | {feature: feature in CPUS[cpu] for feature in CPUS["amx"]}
    torch.cpu.get_capabilities = lambda: seen


def play(cpu: str) -> None:
    """Have vLLM run in this process as it does on this CPU.

    Call it before vLLM is imported or, for a CPU that is not here, as late as vLLM's library for AVX2 is loaded.
    """
    global _played
    if cpu == _played:
        return
    _played = cpu
    if not is_here(cpu):
        show(PLAIN)
        from tests.vllm_stand_ins import stand_in_for_kernels

        stand_in_for_kernels(tiles=cpu == "amx")
    show(cpu)


def _features() -> Mapping[str, Any]:
    """The machine's own."""
    global _own
    if not _own:
        import torch

        _own = torch.cpu.get_capabilities()
    return _own


def accept_experts_without_gates() -> None:
    """vLLM refuses them on CPUs for want of kernels; how their weights are held and loaded is Python."""
    from vllm.model_executor.layers.fused_moe import config, layer
    from vllm.platforms import current_platform

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "is_cuda_alike" else getattr(current_platform, name)

    layer.current_platform = config.current_platform = Platform()


def multiply_by_int4() -> None:
    """Stand in for the product with INT4 weights, which vLLM's library for AVX2 has not.

    It takes the order that those for AVX-512 take: the codes of 16 rows beside each other, and scales transposed. Of random numbers in
    BF16 its results were theirs bit for bit, by hand on a CPU with AVX-512.
    """
    import torch
    from vllm import _custom_ops

    def product(input: Any, q_weight: Any, scales: Any, bias: Any, **more: Any) -> Any:
        # The newer releases have no order of activations here.
        assert more["zeros"] is more.get("g_idx") is None
        packed = q_weight.view(torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), -1).view(len(q_weight), -1, 16).transpose(1, 2)
        codes = codes.reshape(scales.shape[1], -1)
        group = codes.shape[1] // len(scales)
        weight = (codes.to(scales.dtype) - 8) * scales.t().repeat_interleave(group, 1)
        made = input.float() @ weight.float().t()
        return (made if bias is None else made + bias.float()).to(input.dtype)

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        _custom_ops.cpu_gemm_wna16 = product


def keep_temperatures_of_drafts() -> None:
    """Repair what vLLM 0.21 samples drafted tokens with on CPUs.

    It spreads each request's temperature, top-k and top-p over its drafts in a copy that it drops, so that they are what memory holds,
    which can end the engine as it starts. Call it before the worker makes its model runner.
    """
    import torch
    import vllm.utils.cpu_triton_utils as kernels

    def spread(output: Any, given: Any, ends: Any, old: float, new: float, MAX_NUM_TOKENS: int = 0) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        output.copy_(torch.where(given == old, new, given).repeat_interleave(counts))

    kernels.expand_kernel = kernels._FuncWrapper(spread)


def give_heads_the_layers_states() -> None:
    """Repair what vLLM 0.21 starts EAGLE-3 heads with on CPUs.

    It asks the model for the hidden states of some layers, which the runner for CPUs alone does not tell it to give, so that
    the engine does not start. Call it before the worker makes its model runner.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load: Any = CPUModelRunner.load_model

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> None:
        load(runner, *args, **kwargs)
        if runner.use_aux_hidden_state_outputs:
            runner.model.set_aux_hidden_state_layers(runner._get_eagle3_aux_layers_from_config())

    CPUModelRunner.load_model = load_model
