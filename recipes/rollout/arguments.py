"""The arguments of a recipe's vLLM and SGLang engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...integration.quantize import int4_checkpoint
from ...integration.quantize.fp8_blockwise import BLOCK
from ...integration.quantize.mxfp8 import BLOCK as MXFP8_BLOCK
from ...integration.quantize.nvfp4_checkpoint import quantization_config
from ...workers.engines.sglang.loader import LOADER
from ...workers.trainers.qat.config import QATConfig
from ..config.engines import VLLM_LORA_RANKS, needed_context
from ..config.model import experts_of, quantization_of
from ..config.schema import TrainConfig


def vllm_arguments(config: TrainConfig, hf_config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for one engine of the recipe; ``model.dtype`` must be resolved.

    ``hf_config`` is the checkpoint's config.json; without it, the model is taken for one without experts.
    """
    generation, vllm = config.generation, config.generation.vllm
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "tensor_parallel_size": generation.tensor_parallel,
        "pipeline_parallel_size": generation.pipeline_parallel,
        "enable_expert_parallel": vllm.enable_expert_parallel,
        "distributed_executor_backend": vllm.distributed_executor_backend,
        "max_model_len": vllm.max_model_len or config.data.max_prompt_tokens + generation.max_new_tokens,
        "enforce_eager": vllm.enforce_eager,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "load_format": vllm.load_format,
        # The log-probabilities of what was sampled, temperature applied, as the trainer computes them.
        "logprobs_mode": "processed_logprobs",
    }
    if config.model.trust_remote_code:
        arguments["trust_remote_code"] = True
    if vllm.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = vllm.kv_cache_dtype
    if vllm.attention_backend is not None:
        arguments["attention_backend"] = vllm.attention_backend
    if vllm.max_num_seqs is not None:
        arguments["max_num_seqs"] = vllm.max_num_seqs
    if vllm.speculative_config:
        # A copy: vLLM adds to it. The policy's own checkpoint is its default, which may be a folder of another name here.
        asked = vllm.speculative_config.items()
        arguments["speculative_config"] = {
            key: value for key, value in asked if (key, value) != ("model", config.model.path)
        }
    if config.policy.refit.lora == "adapter":
        rank = min(size for size in VLLM_LORA_RANKS if size >= config.trainer.lora.rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    plain = generation.weight_dtype == "auto" and config.policy.qat == "off"
    if hf_config is not None and _has_plain_experts(hf_config) and plain:
        # vLLM may take FlashInfer's kernels where it finds them. They rearrange the experts while loading, and TRT-LLM's so that no
        # refit can write them in place.
        arguments["moe_backend"] = "triton"
    if generation.weight_dtype in ("fp8", "mxfp8") and not quantization_of(hf_config or {}):
        arguments |= _fp8_weights(config, hf_config or {})
    if generation.weight_dtype == "mxfp4":
        # The engine expects packed experts, which the checkpoint lacks, so the first refit brings all weights. Of the kernels before
        # Blackwell's, Marlin's alone has them where refits can write.
        arguments |= {
            "hf_overrides": {"quantization_config": {"quant_method": "mxfp4"}},
            "load_format": "dummy",
            "moe_backend": "marlin",
        }
    if generation.weight_dtype == "int4":
        # As FP8's. On Blackwell vLLM may take FlashInfer's experts, whose order no refit makes; 0.21 has no choice by this argument.
        arguments |= {
            "hf_overrides": {"quantization_config": int4(generation.weight_group)},
            "load_format": "dummy",
        }
        if experts_of(hf_config or {}):
            arguments["moe_backend"] = "marlin"
    if config.policy.qat in ("w4a4", "w4a16"):
        # The engine expects packed weights, which the checkpoint lacks, so the first refit brings all.
        qat = QATConfig(activations=config.policy.qat == "w4a4")
        made = quantization_config((), [f"{module}.weight" for module in qat.exclude], "", qat.activations)
        overrides = {"quantization_config": made.quantization_config}
        arguments |= {"hf_overrides": overrides, "load_format": "dummy"}
        if experts_of(hf_config or {}) and not qat.activations:
            # vLLM's other backends would quantize inputs, too, by scales that nobody sends.
            arguments["moe_backend"] = "marlin"
    return arguments


def _fp8_weights(config: TrainConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Of an engine that holds the weights of an unquantized checkpoint in FP8 blocks, or in MXFP8."""
    if not config.policy.refit.trainer_quantize_fp8:
        return {"quantization": "fp8_per_block"}
    # The engine expects codes and scales, which the checkpoint lacks, so the first refit brings all weights.
    made = mxfp8() if config.generation.weight_dtype == "mxfp8" else block_fp8(hf_config)
    return {"hf_overrides": {"quantization_config": made}, "load_format": "dummy"}


def _has_plain_experts(hf_config: Mapping[str, Any]) -> bool:
    return experts_of(hf_config) is not None and not quantization_of(hf_config)


def vllm_bundles(config: TrainConfig) -> int:
    """Places that one engine is spread over: one on one host for its own processes, or one for each Ray actor."""
    generation = config.generation
    if generation.vllm.distributed_executor_backend == "mp":
        return 1
    return generation.tensor_parallel * generation.pipeline_parallel


# Of compressed-tensors' linear layers: heads and routers.
_NOT_QUANTIZED = ["lm_head", "re:.*mlp[.]gate$", "re:.*[.]shared_expert_gate$"]
_CUMEM = "NCCL_CUMEM_ENABLE"


def sglang_arguments(
    config: TrainConfig, hf_config: Mapping[str, Any] | None, gpus: int, replica: int
) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine`` for one engine of the recipe; ``model.dtype`` must be resolved.

    Args:
        config: the recipe.
        hf_config: the checkpoint's config.json; without it, the model is taken for one without experts.
        gpus: of each rank; 0 on a machine without.
        replica: its number among the recipe's engines.
    """
    generation, sglang = config.generation, config.generation.sglang
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "tp_size": generation.tensor_parallel,
        "ep_size": sglang.ep_size,
        "context_length": sglang.context_length or needed_context(config),
        "load_format": sglang.load_format,
        "disable_cuda_graph": sglang.disable_cuda_graph,
        "enable_deterministic_inference": sglang.enable_deterministic_inference,
        "custom_weight_loader": [LOADER],
        "random_seed": engine_seed(config.seed, replica),
        # Nothing constrains the rollouts.
        "grammar_backend": "none",
        "log_level": "warning",
    }
    if config.model.trust_remote_code:
        arguments["trust_remote_code"] = True
    for name in ("max_running_requests", "mem_fraction_static", "attention_backend"):
        if (value := getattr(sglang, name)) is not None:
            arguments[name] = value
    if sglang.kv_cache_dtype == "fp8":
        arguments["kv_cache_dtype"] = "fp8_e4m3"
    if hf_config is not None and experts_of(hf_config):
        # Other backends rearrange the experts while loading, and no refit can then write them in place. Of INT4 Marlin's order is known.
        arguments["moe_runner_backend"] = "marlin" if generation.weight_dtype == "int4" else "triton"
    quantization = None
    if generation.weight_dtype == "fp8" and not quantization_of(hf_config or {}):
        quantization = block_fp8(hf_config or {})
    elif generation.weight_dtype == "int4":
        quantization = int4(generation.weight_group)
    if quantization is not None:
        # The engine expects codes and scales, which the checkpoint lacks, so the first refit brings all weights.
        overrides = {"quantization_config": quantization}
        arguments |= {"json_model_override_args": json.dumps(overrides), "load_format": "dummy"}
    if gpus:
        # Without it a release frees nothing and says nothing.
        arguments["enable_memory_saver"] = generation.colocated.enabled
    else:
        arguments |= {"device": "cpu", "sampling_backend": "pytorch"}
        arguments.setdefault("attention_backend", "torch_native")
    # The policy's own checkpoint is the drafter's default, too, and may be a folder of another name here.
    given = sglang.server_args.items()
    own = ("speculative_draft_model_path", config.model.path)
    return arguments | {key: value for key, value in given if (key, value) != own}


def with_sglang_environment(config: TrainConfig) -> TrainConfig:
    """The recipe with trainer processes whose NCCL allocates as SGLang's does.

    SGLang turns ``NCCL_CUMEM_ENABLE`` off in its processes where nobody has set it, and ranks of one communicator that differ in it
    can't reach each other's memory.
    """
    ray = config.ray
    setting = {_CUMEM: ray.generation_env.get(_CUMEM, "0")}
    return replace(config, ray=replace(ray, trainer_env=setting | ray.trainer_env))


def block_fp8(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of the same model in E4M3 blocks: the decoder layers' matrices, but for the routers.

    Args:
        hf_config: config.json of a checkpoint that is not quantized.
    """
    text = hf_config.get("text_config", hf_config)
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(text.get("num_hidden_layers", 0))]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head", *(routers if experts_of(hf_config) else [])],
    }


def mxfp8() -> dict[str, Any]:
    """``quantization_config`` of the same matrices as :func:`block_fp8`'s in MXFP8, in compressed-tensors' form.

    ModelOpt's form has experts for Blackwell alone (vLLM 0.21).
    """
    numbers = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP8_BLOCK,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"dynamic": False},
        "input_activations": numbers | {"dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _NOT_QUANTIZED,
    }


def int4(group: int) -> dict[str, Any]:
    """``quantization_config`` of the same matrices as :func:`block_fp8`'s in INT4, as llm-compressor writes it for W4A16.

    Args:
        group: elements of a row that share a scale.
    """
    return int4_checkpoint.quantization_config(group, _NOT_QUANTIZED)


def engine_seed(seed: int, replica: int) -> int:
    """A seed of its own for each replica, or equal prompts would get equal completions.

    Args:
        seed: the recipe's.
        replica: the engine's number.
    """
    return (seed * 1_000_003 + replica) % (1 << 31)


def batch_seed(seed: int) -> int:
    """A seed of its own for each call to an engine, of whose one generator all its requests draw.

    Args:
        seed: of the call, which is another one for each step, round and engine.
    """
    return seed % (1 << 31)


def request_seed(seed: int, index: int) -> int:
    """A seed of its own for each request: the result does not depend on what an engine batches it with.

    Args:
        seed: of the call to the engine.
        index: of the request among those of the call.
    """
    return seed * 1_000_003 + index
