"""verl, and vLLM's build for CPUs or SGLang, on a host without GPUs: what their processes need in their environment.

It is for tests and a first look. CPUs are no platform of verl; cpu_platform.py adds them by verl's own registry.
"""

from __future__ import annotations

import os
from pathlib import Path

PLATFORM = "examples.verl.cpu_platform"
# With a Megatron actor, beside the platform.
MEGATRON = "examples.verl.cpu_megatron"
# With SGLang's engines, beside the platform.
SGLANG = "examples.verl.cpu_sglang"
# Fusions of GPU kernels, which Bridge's provider has by itself.
WITHOUT_FUSIONS = tuple(
    f"+actor_rollout_ref.actor.megatron.override_transformer_config.{name}=false"
    for name in (
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
        "masked_softmax_fusion",
        "moe_permute_fusion",
        "persist_layer_norm",
    )
)
# Of an SGLang server, for which verl asks for a GPU's attention, memory saver and kernels by itself.
SGLANG_SERVER = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "enable_memory_saver": False,
    "max_total_tokens": 4096,
    "random_seed": 0,
}
CPU = {
    "VERL_USE_EXTERNAL_MODULES": PLATFORM,
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    # vLLM without its detection of cores.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "GLOO_SOCKET_IFNAME": "lo",
    # SGLang takes a NCCL that it finds for a sign of GPUs.
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
    # It puts each rank of a CPU on a NUMA node of its own unless it is told the cores.
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
}


def environment(folder: Path) -> dict[str, str]:
    """Variables for a run of verl's, whose files go to ``folder``."""
    path = [named_vllm(folder), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    numbers = {"CUDA_VISIBLE_DEVICES": "0,1"}  # that Ray hands out
    return {**CPU, **numbers, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}


def named_vllm(folder: Path) -> str:
    """A folder for the path of modules, in which vLLM's version stands under the name by which verl asks the installed
    packages; the CPU's build has another one."""
    named = folder / "named" / "vllm-0.21.0+cpu.dist-info"
    named.mkdir(parents=True, exist_ok=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.21.0+cpu\n")
    return str(named.parent)
