"""What a recipe means to vLLM: the arguments of its engines, and the places that an engine's ranks need."""

from __future__ import annotations

from typing import Any

from .config_schema import TrainConfig


def engine_arguments(config: TrainConfig) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for one engine of the recipe; ``model.dtype`` must be settled."""
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
    if vllm.max_num_seqs is not None:
        arguments["max_num_seqs"] = vllm.max_num_seqs
    return arguments


def engine_bundles(config: TrainConfig) -> int:
    """Places that one engine is spread over: one on one host for its own processes, or one for each Ray actor."""
    generation = config.generation
    if generation.vllm.distributed_executor_backend == "mp":
        return 1
    return generation.tensor_parallel * generation.pipeline_parallel
