"""What ``generation.backend: sglang`` asks of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ...workers.engines.sglang.stores import KEEPS_PREFIXES, STORES
from .errors import Violation
from .schema import TrainConfig

_BACKEND = "generation.backend"
_SECTION = "generation.sglang"
_WEIGHT_DTYPE = "generation.weight_dtype"
# By which the engine takes a checkpoint for one of FP8 blocks.
_OVERRIDES = "json_model_override_args"
# SGLang keeps the last tokens of a context for itself: a prompt has to end 7 before it, and a completion 2.
_KEPT_FREE = 8
# Server arguments that have keys of the recipe.
_KEYS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "random_seed": "seed",
    "tp_size": "generation.tensor_parallel",
    "enable_memory_saver": "generation.colocated.enabled",
    "context_length": f"{_SECTION}.context_length",
    "max_running_requests": f"{_SECTION}.max_running_requests",
    "mem_fraction_static": f"{_SECTION}.mem_fraction_static",
    "attention_backend": f"{_SECTION}.attention_backend",
    "ep_size": f"{_SECTION}.ep_size",
    "disable_cuda_graph": f"{_SECTION}.disable_cuda_graph",
    "enable_deterministic_inference": f"{_SECTION}.enable_deterministic_inference",
    "load_format": f"{_SECTION}.load_format",
}
# And those that nothing else can serve than what they are.
_REFUSED = {
    "custom_weight_loader": "is the refit's own",
    "skip_tokenizer_init": "is on, since the recipe has the tokenizer",
    "pp_size": "would make pipeline stages, and refits reach one tensor-parallel group",
    "dp_size": "would make several engines of one, whose way to them is generation.replicas",
    "enable_dp_attention": "would make several engines of one, whose way to them is generation.replicas",
    "nnodes": "would spread an engine over hosts, on which nothing starts its other processes",
    "enable_eplb": "moves experts between ranks, and a refit would overwrite other experts",
    "weight_cache_mode": "shares the weights with other engines",
    **dict.fromkeys(STORES, KEEPS_PREFIXES),
    "disaggregation_mode": "has queues that no refit flushes",
    "quantization": "is for weights that no refit can be written into; FP8 blocks are generation.weight_dtype",
    "kv_cache_dtype": "is for a cache whose scales refits don't bring to SGLang",
    "speculative_algorithm": "drafts with weights that no refit brings",
    "enable_lora": "keeps adapters beside the weights, and refits bring none to SGLang",
    "preferred_sampling_params": "would sample from another distribution than the trainer computes",
    "trust_remote_code": "would run code that comes with a checkpoint",
}
_RAW_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def needed_context(config: TrainConfig) -> int:
    """The shortest ``context_length`` with which SGLang neither refuses a prompt of the recipe nor ends a completion early."""
    return config.data.max_prompt_tokens + config.generation.max_new_tokens + _KEPT_FREE


def sglang_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What SGLang engines can't do.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    if config.generation.backend != "sglang":
        return
    yield from _engine(config)
    yield from _server_arguments(config)


def context_violations(config: TrainConfig, positions: int) -> Iterator[Violation]:
    """A context beyond the model's ``positions``, which SGLang refuses as it starts."""
    if config.generation.backend != "sglang":
        return
    given, needed = config.generation.sglang.context_length, needed_context(config)
    if given is not None and given > positions:
        key = f"{_SECTION}.context_length"
        yield Violation(
            (key, "model.path"),
            f"{key}: {given} is more than the model's {positions} positions (max_position_embeddings); give at most {positions}",
        )
    elif given is None and needed > positions:
        yield Violation(
            ("generation.max_new_tokens", "data.max_prompt_tokens", "model.path", _BACKEND),
            f"generation.max_new_tokens: prompts and completions, with {_KEPT_FREE} tokens that SGLang keeps free, reach {needed} "
            f"tokens, more than the model's {positions} positions (max_position_embeddings); shorten either by {needed - positions}",
        )


def sglang_gpu_violations(config: TrainConfig, gpus: int) -> Iterator[Violation]:
    """What SGLang does on GPUs only.

    Args:
        config: the recipe.
        gpus: CUDA devices of this machine; those of a running cluster may be elsewhere.
    """
    if config.generation.backend != "sglang" or gpus or config.ray.address is not None:
        return
    remedy = "or ray.address of a cluster with some"
    key = f"{_SECTION}.enable_deterministic_inference"
    if config.generation.sglang.enable_deterministic_inference:
        yield Violation(
            (key, "ray.address"),
            f"{key}: true, but SGLang has no such kernels for CPUs, and this machine has no GPU; give false, {remedy}",
        )
    if config.generation.weight_dtype == "fp8":
        yield Violation(
            (_WEIGHT_DTYPE, _BACKEND, "ray.address"),
            f"{_WEIGHT_DTYPE}: fp8, but on CPUs SGLang packs such weights for AMX, where no refit reaches them, and this machine has "
            f"no GPU; give auto, {remedy}",
        )


def _engine(config: TrainConfig) -> Iterator[Violation]:
    generation, sglang = config.generation, config.generation.sglang
    if (stages := generation.pipeline_parallel) > 1:
        yield Violation(
            ("generation.pipeline_parallel", _BACKEND),
            f"generation.pipeline_parallel: {stages}, but refits reach one tensor-parallel group of SGLang's; give 1, or "
            f"{_BACKEND}=vllm",
        )
    needed, longest = needed_context(config), sglang.context_length
    if longest is not None and longest < needed:
        yield Violation(
            (f"{_SECTION}.context_length", "data.max_prompt_tokens", "generation.max_new_tokens"),
            f"{_SECTION}.context_length: {longest} is less than data.max_prompt_tokens + generation.max_new_tokens + the "
            f"{_KEPT_FREE} that SGLang keeps free = {needed}, so that it would end completions early; give at least {needed}, "
            "or null",
        )
    sizes = sorted({1, generation.tensor_parallel})
    if sglang.ep_size not in sizes:
        yield Violation(
            (f"{_SECTION}.ep_size", "generation.tensor_parallel"),
            f"{_SECTION}.ep_size: {sglang.ep_size} of {generation.tensor_parallel} ranks can't share the experts out in the way "
            f"that refits are planned for; give {' or '.join(map(str, sizes))}",
        )
    raw = config.ray.generation_env.get(_RAW_LOGPROBS, "").lower() in ("1", "true")
    if raw and generation.temperature != 1:
        yield Violation(
            (f"ray.generation_env.{_RAW_LOGPROBS}", "generation.temperature"),
            f"ray.generation_env.{_RAW_LOGPROBS}: SGLang would tell log-probabilities before temperature {generation.temperature:g}, "
            "with which the trainer computes its own; leave it out",
        )


def _server_arguments(config: TrainConfig) -> Iterator[Violation]:
    keys = _KEYS | ({_OVERRIDES: _WEIGHT_DTYPE} if config.generation.weight_dtype == "fp8" else {})
    for name in config.generation.sglang.server_args:
        key = f"{_SECTION}.server_args.{name}"
        if name in keys:
            yield Violation((key,), f"{key}: the recipe sets it by {keys[name]}; give it there")
        elif name in _REFUSED:
            yield Violation((key, _BACKEND), f"{key}: it {_REFUSED[name]}; leave it out")
