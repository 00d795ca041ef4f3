"""What a recipe means to SGLang: the arguments of its engines, and what the trainer's processes have to be told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...workers.engines.sglang.loader import LOADER
from ..config.schema import TrainConfig
from ..config.sglang import needed_context
from .fp8_weights import block_fp8, has_experts, quantization_of
from .seeds import engine_seed

_CUMEM = "NCCL_CUMEM_ENABLE"


def engine_arguments(
    config: TrainConfig, hf_config: Mapping[str, Any] | None, gpus: int, replica: int
) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine`` for one engine of the recipe; ``model.dtype`` must be settled.

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
    for name in ("max_running_requests", "mem_fraction_static", "attention_backend"):
        if (value := getattr(sglang, name)) is not None:
            arguments[name] = value
    if hf_config is not None and has_experts(hf_config):
        # Others rearrange the experts as they are loaded: then none of them can be written in place.
        arguments["moe_runner_backend"] = "triton"
    if generation.weight_dtype == "fp8" and not quantization_of(hf_config or {}):
        # As if the checkpoint were one of FP8 blocks: its tensors can't be read so, and the first refit brings all.
        overrides = {"quantization_config": block_fp8(hf_config or {})}
        arguments |= {"json_model_override_args": json.dumps(overrides), "load_format": "dummy"}
    if gpus:
        # Without it a release frees nothing and says nothing.
        arguments["enable_memory_saver"] = generation.colocated.enabled
    else:
        arguments |= {"device": "cpu", "sampling_backend": "pytorch"}
        arguments.setdefault("attention_backend", "torch_native")
    return arguments | sglang.server_args


def with_trainer_environment(config: TrainConfig) -> TrainConfig:
    """The recipe with trainer processes whose NCCL allocates as SGLang's does.

    SGLang turns ``NCCL_CUMEM_ENABLE`` off in its processes where nobody has set it, and ranks of one communicator that differ in it
    can't reach each other's memory.
    """
    ray = config.ray
    setting = {_CUMEM: ray.generation_env.get(_CUMEM, "0")}
    return replace(config, ray=replace(ray, trainer_env=setting | ray.trainer_env))
