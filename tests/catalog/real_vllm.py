"""What vLLM's own models and loaders make of a checkpoint on one rank of any layout, in one process, without weights.

:func:`answers` runs in a process of its own.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.families.checkpoints import write_kimi_k25_config, write_ling_config
from tests.qat.vllm_kernels import MARLIN, choose_nvfp4_kernel
from tests.vllm.vllm_int4 import CPU, choose_int4_kernel
from tests.vllm_cpu import accept_experts_without_gates

# Of an FP8 KV cache; where its quantization is known, they are parameters until vLLM has loaded the weights.
_CACHE_SCALES = tuple(f"attn.{x}_{what}" for x in ("q", "k", "v", "prob") for what in ("scale", "zero_point"))
# Beside codes and scales, with which nothing computes: of INT4, and of experts in NVFP4 under Marlin. W4A16 has .input_scale, too, for
# checkpoints with quantized inputs.
_IDLE = (
    "_weight_shape",
    ".weight_shape",
    "_g_idx",
    "_g_idx_sort_indices",
    "w13_input_scale",
    "w2_input_scale",
)


class Group:
    """Stands in for one of vLLM's process groups: nothing is communicated while a model is built and loaded."""

    def __init__(self, rank: int, size: int):
        self.rank = self.rank_in_group = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = TorchGroup(rank, size)


class TorchGroup:
    """The process group of torch inside of it, which some models ask for their place."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def answers(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    _accept_latent_attention()
    _accept_fp8()
    choose_int4_kernel(CPU)
    choose_nvfp4_kernel(MARLIN)
    accept_experts_without_gates()
    _accept_qwen3_5_alone()
    # vLLM remembers by id() which layers a model leaves to other stages: no id may come back.
    alive: list[torch.nn.Module] = []
    return [_one(case, alive) for case in cases]


def _accept_latent_attention() -> None:
    """The CPU platform has no kernels for it; they have no parameters, so their layer is left out."""
    from vllm.model_executor.layers import mla

    class Kernels(torch.nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    mla.MLAAttention = Kernels


def _accept_qwen3_5_alone() -> None:
    """Its registry knows the classes with an image encoder around these alone."""
    from vllm import ModelRegistry

    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        ModelRegistry.register_model(name, f"vllm.model_executor.models.qwen3_5:{name}")


def _accept_fp8() -> None:
    """vLLM's kernels for GPUs: how their weights are held is Python, and a CPU without AMX has none of its own."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.platforms import current_platform

    TritonFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
    linear._POSSIBLE_FP8_BLOCK_KERNELS[current_platform._enum] = [TritonFp8BlockScaledMMKernel]
    TritonExperts._supports_current_device = staticmethod(lambda: True)
    TritonExperts._supports_quant_scheme = staticmethod(lambda weights, activations: True)


def _one(case: dict[str, Any], alive: list[torch.nn.Module]) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from rlrefit.workers.engines.common.loader_trace.modules import NumbersStayReal, WeightsStayOnMeta
    from rlrefit.workers.engines.common.loader_trace.trace import trace_loader

    _stand_in_for_groups(case)
    config = _config(case)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        with NumbersStayReal(), WeightsStayOnMeta():
            model = initialize_model(vllm_config=config)
        alive.append(model)
        parameters = dict(model.named_parameters())
        manifest = [(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in case["manifest"]]
        loadable = parameters | dict(model.named_buffers())
        trace = trace_loader(model.load_weights, loadable, manifest)
    idle = () if case["quantization"] is None else _IDLE
    landings = {
        name: [
            [landing.parameter, [list(side) for side in landing.box], landing.offset, list(landing.stride)]
            for landing in found
            if not landing.parameter.endswith(idle)
        ]
        for name, found in trace.landings.items()
    }
    # And buffers that a checkpoint has (Gemma 4).
    reached = {landing.parameter for found in trace.landings.values() for landing in found}
    held = parameters | {name: loadable[name] for name in reached}
    return {
        "parameters": {
            n: [list(p.shape), str(p.dtype)]
            for n, p in held.items()
            if not n.endswith((*_CACHE_SCALES, *idle)) and (n in reached or not n.endswith(".input_scale"))
        },
        "landings": landings,
        "misc": {
            n: why
            for n, why in trace.misc_reasons.items()
            if not (trace.touched[n] and all(p.endswith(idle) for p in trace.touched[n]))
        },
    }


def _stand_in_for_groups(case: dict[str, Any]) -> None:
    from vllm.distributed import parallel_state

    for name, (rank, size) in case["groups"].items():
        setattr(parallel_state, f"_{name.upper()}", Group(rank, size))


def _config(case: dict[str, Any]) -> Any:
    from transformers import AutoConfig
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        if case["config"]["model_type"] == "bailing_moe_v2":  # a class that transformers lacks
            write_ling_config(Path(folder), case["config"])
        elif case["config"]["model_type"] == "kimi_k25":
            write_kimi_k25_config(Path(folder), case["config"])
        else:
            made = AutoConfig.for_model(**case["config"])
            made.architectures = [case["architecture"]]
            if case["quantization"] is not None:
                made.quantization_config = case["quantization"]
            made.save_pretrained(folder)
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            trust_remote_code=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=64,
            **({"moe_backend": "triton"} if case["quantization"] is not None else {}),
        ).create_engine_config()
    parallel = config.parallel_config
    parallel.tensor_parallel_size = case["groups"]["tp"][1]
    parallel.pipeline_parallel_size = case["groups"]["pp"][1]
    parallel.data_parallel_size = case["groups"]["dp"][1]
    parallel.data_parallel_rank = case["groups"]["dp"][0]
    parallel.enable_expert_parallel = case["expert_parallel"]
    return config
