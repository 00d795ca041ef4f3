"""What a recipe means to vLLM: the arguments of its engines, and the places that an engine's ranks need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.schema import TrainConfig
from .fp8_weights import block_fp8, has_experts, quantization_of


def engine_arguments(config: TrainConfig, hf_config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for one engine of the recipe; ``model.dtype`` must be settled.

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
    if vllm.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = vllm.kv_cache_dtype
    if vllm.attention_backend is not None:
        arguments["attention_backend"] = vllm.attention_backend
    if vllm.max_num_seqs is not None:
        arguments["max_num_seqs"] = vllm.max_num_seqs
    if hf_config is not None and _has_plain_experts(hf_config) and generation.weight_dtype != "fp8":
        # Left to itself, vLLM takes FlashInfer's kernels where they can be imported, which rearrange the experts as
        # they are loaded: then none of them can be written in place.
        arguments["moe_backend"] = "triton"
    if generation.weight_dtype == "fp8" and not quantization_of(hf_config or {}):
        arguments |= _fp8_weights(config, hf_config or {})
    return arguments


def _fp8_weights(config: TrainConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Of an engine that holds the weights of an unquantized checkpoint in FP8 blocks."""
    if not config.policy.refit.trainer_quantize_fp8:
        return {"quantization": "fp8_per_block"}
    # As if the checkpoint were one of FP8 blocks: its tensors can't be read so, and the first refit brings all.
    return {"hf_overrides": {"quantization_config": block_fp8(hf_config)}, "load_format": "dummy"}


def _has_plain_experts(hf_config: Mapping[str, Any]) -> bool:
    return has_experts(hf_config) and not quantization_of(hf_config)


def engine_bundles(config: TrainConfig) -> int:
    """Places that one engine is spread over: one on one host for its own processes, or one for each Ray actor."""
    generation = config.generation
    if generation.vllm.distributed_executor_backend == "mp":
        return 1
    return generation.tensor_parallel * generation.pipeline_parallel
