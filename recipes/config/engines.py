"""What colocated engines, and SGLang, require of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ...workers.engines.sglang.compat import KEEPS_PREFIXES, STORES
from ...workers.engines.sglang.drafters import has_drafter
from .errors import Violation
from .schema import TrainConfig

ENABLED = "generation.colocated.enabled"
STAGES = "generation.colocated.multi_stage_wake_up"
# Engines that sleep on GPUs.
_SLEEPING = {"vllm": "vLLM", "sglang": "SGLang"}
# Ranks of an adapter that vLLM lays out memory for (vllm/config/lora.py, MaxLoRARanks).
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# What torch and engines read their allocator's settings from.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def needs_bfloat16(config: TrainConfig) -> bool:
    """Whether the trainer can free its GPU only with separate master weights, which Megatron has in bfloat16."""
    return config.generation.colocated.enabled and config.trainer.backend == "megatron"


def colocated_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What would not run on shared GPUs.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    if not config.generation.colocated.enabled:
        if not config.generation.colocated.multi_stage_wake_up:
            yield Violation(
                (STAGES, ENABLED),
                f"{STAGES}: false, but engines have GPUs of their own and never sleep; give true, or {ENABLED}=true",
            )
        return
    yield from _shared_sizes(config, bad)
    yield from _sleeping_engine(config)
    yield from _leaving_trainer(config)


def colocated_gpu_violations(config: TrainConfig, gpus: int) -> Iterator[Violation]:
    """What shared GPUs of this machine rule out.

    Args:
        config: the recipe.
        gpus: CUDA devices of this machine; without any, memory stays where it is and nothing is asked.
    """
    if not config.generation.colocated.enabled or not gpus:
        return
    if config.generation.backend == "transformers":
        yield Violation(
            (ENABLED, "generation.backend"),
            f"{ENABLED}: true, but the transformers engine gives its memory back on CPUs only; give "
            "generation.backend=vllm or sglang, or false here",
        )
    if config.ray.address is None and (
        text := too_large_for(config.trainer.ranks, gpus, "this machine", "ray.address of a cluster with one")
    ):
        yield Violation(("trainer.ranks", ENABLED, "ray.address"), text)


def too_large_for(ranks: int, gpus: int, host: str, larger: str) -> str:
    """Why a host can't hold a trainer and the engines that share its GPUs; empty if it can.

    Args:
        ranks: of the trainer.
        gpus: of the host.
        host: what it is called.
        larger: what to give for a larger one.
    """
    if ranks <= gpus:
        return ""
    return (
        f"trainer.ranks: {ranks} ranks share a GPU each with an engine's, all on one host, whose memory the weights go "
        f"through, and {host} has {gpus}; use fewer ranks, a larger host ({larger}), or {ENABLED}=false"
    )


def _shared_sizes(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    generation, ranks = config.generation, config.trainer.ranks
    sizes = {
        "generation.replicas": generation.replicas,
        "generation.tensor_parallel": generation.tensor_parallel,
        "generation.pipeline_parallel": generation.pipeline_parallel,
    }
    keys = ("trainer.ranks", *sizes, ENABLED)
    copy = generation.tensor_parallel * generation.pipeline_parallel
    engines = generation.replicas * copy
    if bad.intersection(keys) or ranks == engines:
        return
    product = " x ".join(f"{key.rpartition('.')[2]} {size}" for key, size in sizes.items())
    remedy = f"generation.replicas={ranks // copy}" if ranks % copy == 0 else f"trainer.ranks={engines}"
    yield Violation(
        keys,
        f"trainer.ranks: {ranks} trainer ranks and {engines} generation ranks ({product}) can't share GPUs one to one; give "
        f"{remedy}",
    )


def _sleeping_engine(config: TrainConfig) -> Iterator[Violation]:
    backend, vllm = config.generation.backend, config.generation.vllm
    if backend not in _SLEEPING:
        return
    engine = _SLEEPING[backend]
    if backend == "vllm" and vllm.distributed_executor_backend == "ray":
        key = "generation.vllm.distributed_executor_backend"
        yield Violation(
            (key, ENABLED),
            f"{key}: ray spreads an engine over hosts, where memory can't be shared, and would take GPUs that the trainer "
            "holds; give mp",
        )
    for name in _ALLOCATOR:
        if "expandable_segments:true" in config.ray.generation_env.get(name, "").lower().replace(" ", ""):
            key = f"ray.generation_env.{name}"
            yield Violation(
                (key, ENABLED),
                f"{key}: {engine} refuses expandable segments where it sleeps; leave expandable_segments out",
            )


def _leaving_trainer(config: TrainConfig) -> Iterator[Violation]:
    trainer = config.trainer
    if trainer.backend != "megatron":
        return
    if not trainer.distributed_optimizer:
        yield Violation(
            ("trainer.distributed_optimizer", ENABLED),
            "trainer.distributed_optimizer: false, but without it Megatron's buffers hold no parameters, so that these could "
            "not leave the GPU while an engine generates; give true",
        )
    if config.model.dtype == "float32":
        yield Violation(
            ("model.dtype", "trainer.backend", ENABLED),
            "model.dtype: float32, in which Megatron's optimizer steps the model's parameters themselves and can't leave "
            "the GPU without them; give bfloat16 or auto, or train with trainer=fsdp",
        )
    if trainer.optimizer.cpu_offload_fraction > 0:
        yield Violation(
            ("trainer.optimizer.cpu_offload_fraction", ENABLED),
            f"trainer.optimizer.cpu_offload_fraction: {trainer.optimizer.cpu_offload_fraction:g}, but Megatron's hybrid "
            "optimizer steps the model's parameters themselves, which have to leave the GPU without it; give 0: all of the "
            "optimizer is in host memory while an engine generates",
        )


_BACKEND = "generation.backend"
_SECTION = "generation.sglang"
_WEIGHT_DTYPE = "generation.weight_dtype"
# By which the engine takes a checkpoint for one of FP8 blocks or INT4.
_OVERRIDES = "json_model_override_args"
# SGLang keeps the last tokens of a context for itself: a prompt has to end 7 before it, and a completion 2.
_KEPT_FREE = 8
# How many tokens it drafts, which it keeps free besides. Its own choice is by the model's architecture.
DRAFT_SIZES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
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
    "kv_cache_dtype": f"{_SECTION}.kv_cache_dtype",
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
    "quantization": "is for weights that no refit can be written into; FP8 blocks and INT4 are generation.weight_dtype",
    "quantization_param_path": "makes scales of a cache in a form that neither kernels nor refits take",
    "speculative_draft_model_quantization": "is for weights that no refit can be written into",
    "speculative_adaptive": "drafts more tokens than the recipe leaves room for in a context",
    "enable_lora": "keeps adapters beside the weights, and refits bring none to SGLang",
    "preferred_sampling_params": "would sample from another distribution than the trainer computes",
    "trust_remote_code": "is model.trust_remote_code, for trainer and engine",
}
_KV_SCALES = "policy.refit.kv_scales"
# Attention backends of SGLang that read scales everywhere (workers/engines/sglang/kv_scales.py).
_READS_SCALES = ("fa3", "triton")
_RAW_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def needed_context(config: TrainConfig) -> int:
    """The shortest ``context_length`` with which SGLang neither refuses a prompt of the recipe nor ends a completion early."""
    return config.data.max_prompt_tokens + config.generation.max_new_tokens + _kept_free(config)


def unsized_drafts(config: TrainConfig) -> list[str]:
    """Those of :data:`DRAFT_SIZES` that SGLang is not told."""
    given = config.generation.sglang.server_args
    return [name for name in DRAFT_SIZES if not isinstance(given.get(name), int) or given[name] < 1]


def _kept_free(config: TrainConfig) -> int:
    given = config.generation.sglang.server_args
    if not has_drafter(given.get("speculative_algorithm")) or unsized_drafts(config):
        return _KEPT_FREE
    # As SGLang computes it (managers/utils.py, compute_num_reserved_tokens), with the draft tokens that it makes of one branch.
    steps, branches, tokens = (given[name] for name in DRAFT_SIZES)
    return _KEPT_FREE + max(steps * branches, steps + 1, tokens)


def sglang_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What SGLang engines can't do.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    if config.generation.backend != "sglang":
        return
    yield from _sglang_engine(config)
    yield from _sglang_scales(config)
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
            f"generation.max_new_tokens: prompts and completions, with {_kept_free(config)} tokens that SGLang keeps free, reach {needed} "
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
    if config.policy.refit.kv_scales:
        yield Violation(
            (_KV_SCALES, _BACKEND, "ray.address"),
            f"{_KV_SCALES}: true, but SGLang's attention on CPUs reads no scales of its cache, and this machine has no GPU; give "
            f"false, {remedy}",
        )
    on_cpus = {
        "fp8": "on CPUs SGLang packs such weights for AMX, where no refit reaches them",
        "int4": "SGLang has no product with such weights for CPUs",
    }
    if why := on_cpus.get(dtype := config.generation.weight_dtype):
        yield Violation(
            (_WEIGHT_DTYPE, _BACKEND, "ray.address"),
            f"{_WEIGHT_DTYPE}: {dtype}, but {why}, and this machine has no GPU; give auto, {remedy}",
        )


def _sglang_engine(config: TrainConfig) -> Iterator[Violation]:
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
            f"{_kept_free(config)} that SGLang keeps free = {needed}, so that it would end completions early; give at least {needed}, "
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


def _sglang_scales(config: TrainConfig) -> Iterator[Violation]:
    """What would not use scales that refits bring. An engine tells the rest, once it has chosen its attention."""
    if not config.policy.refit.kv_scales:
        return
    sglang, backend = config.generation.sglang, f"{_SECTION}.attention_backend"
    if sglang.attention_backend not in (None, *_READS_SCALES):
        yield Violation(
            (backend, _KV_SCALES),
            f"{backend}: {sglang.attention_backend} does not read scales of the cache everywhere, or is not known to; give "
            f"{' or '.join(_READS_SCALES)}, or {_KV_SCALES}=false",
        )
    # SGLang has tensors of scales before it captures, and fa3 reads these, in models that hand their quantization to attention.
    follows = sglang.attention_backend == "fa3" and config.generation.weight_dtype == "fp8"
    if not sglang.disable_cuda_graph and not follows:
        key = f"{_SECTION}.disable_cuda_graph"
        yield Violation(
            (key, _KV_SCALES),
            f"{key}: false, but CUDA graphs keep the scales with which they were captured; give true, or {_KV_SCALES}=false",
        )


def _server_arguments(config: TrainConfig) -> Iterator[Violation]:
    keys = _KEYS | ({_OVERRIDES: _WEIGHT_DTYPE} if config.generation.weight_dtype in ("fp8", "int4") else {})
    for name in config.generation.sglang.server_args:
        key = f"{_SECTION}.server_args.{name}"
        if name in keys:
            yield Violation((key,), f"{key}: the recipe sets it by {keys[name]}; give it there")
        elif name in _REFUSED:
            yield Violation((key, _BACKEND), f"{key}: it {_REFUSED[name]}; leave it out")
