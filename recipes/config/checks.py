"""What the values of a recipe must satisfy, alone and together; pure arithmetic on a configuration.

Each check yields sentences that begin with the key to change and end with the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import reduce
from typing import Any

from ...workers.trainers.megatron.lora_targets import megatron_targets, target_violations
from ...workers.trainers.megatron.pipeline_layout import pipeline_layout_violations
from ..algorithms.losses import AGGREGATIONS
from ..algorithms.rates import LR_DECAYS
from ..rewards.scorer import BUNDLED
from .drafting import MTP, mtp_violations, speculation_violations
from .engines import ENABLED, VLLM_LORA_RANKS, colocated_violations, sglang_violations
from .errors import Violation
from .schema import TrainConfig
from .schema_check import leaves
from .weight_dtypes import weight_dtype_violations

CHOICES = {
    "model.dtype": ("auto", "bfloat16", "float32"),
    "algorithm.name": ("grpo", "dapo"),
    "algorithm.aggregation": AGGREGATIONS,
    "data.overlong_prompts": ("error", "drop"),
    "trainer.backend": ("megatron", "fsdp"),
    "trainer.optimizer.lr_decay": LR_DECAYS,
    "generation.backend": ("transformers", "vllm", "sglang"),
    "generation.vllm.distributed_executor_backend": ("mp", "ray"),
    "generation.vllm.load_format": ("auto", "dummy"),
    "generation.vllm.kv_cache_dtype": ("auto", "fp8"),
    "generation.sglang.load_format": ("auto", "dummy"),
    "generation.sglang.kv_cache_dtype": ("auto", "fp8"),
    "generation.weight_dtype": ("auto", "fp8", "int4", "mxfp4", "mxfp8"),
    "policy.qat": ("off", "w4a4", "w4a16", "int4"),
}

# Least value of each whole number, and what a smaller one would mean.
LEAST = {
    "data.max_prompt_tokens": (1, "drops every prompt"),
    "algorithm.steps": (1, "trains nothing"),
    "algorithm.prompts_per_step": (1, "leaves a step without rollouts"),
    "algorithm.group_size": (2, "leaves a rollout nothing to be compared with, so every advantage is 0"),
    "algorithm.minibatches": (1, "leaves a step without an optimizer step"),
    "algorithm.max_sampling_rounds": (1, "never generates"),
    "algorithm.overlong_buffer": (0, "is no length (0 turns the penalty off)"),
    "reward.processes": (0, "is no number of processes (0 judges in the run's own)"),
    "trainer.ranks": (1, "leaves no trainer"),
    "trainer.tensor_parallel": (1, "is no parallel size"),
    "trainer.pipeline_parallel": (1, "is no parallel size"),
    "trainer.expert_parallel": (1, "is no parallel size"),
    "trainer.expert_tensor_parallel": (1, "is no parallel size"),
    "trainer.context_parallel": (1, "is no parallel size"),
    "trainer.fsdp.replicate": (1, "is no number of copies"),
    "trainer.lora.rank": (0, "is no rank (0 trains all weights)"),
    "trainer.lora.alpha": (1, "would add nothing to the weights"),
    "trainer.micro_batch_size": (1, "leaves a forward pass without sequences"),
    "trainer.optimizer.warmup_steps": (0, "is no number of steps (0 turns the warm-up off)"),
    "trainer.optimizer.max_skipped_steps": (0, "is no number of steps (0 ends the run at the first one)"),
    "generation.tensor_parallel": (1, "is no parallel size"),
    "generation.pipeline_parallel": (1, "is no parallel size"),
    "generation.sglang.ep_size": (1, "is no parallel size"),
    "generation.replicas": (1, "leaves no engine"),
    "generation.max_new_tokens": (1, "generates nothing"),
    "validation.every": (0, "is no interval (0 turns validation off)"),
    "validation.samples": (1, "validates nothing; set validation.every=0 to turn it off"),
    "checkpoint.every": (0, "is no interval (0 turns checkpoints off)"),
    "checkpoint.keep": (1, "deletes every checkpoint; set checkpoint.every=0 to write none"),
}

# (key, whether the value is possible, what is wrong and what is possible); null is possible where it is a type.
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("seed", lambda v: 0 <= v < 2**31, "is no seed of which those of single rollouts can be made, in 64 bits; give 0 or more and less than 2147483648"),
    ("algorithm.clip_low", lambda v: 0 < v < 1, "puts the lower bound 1 - clip_low outside (0, 1); give a number above 0 and below 1"),
    ("algorithm.clip_high", lambda v: v > 0, "puts the upper bound 1 + clip_high at or below 1; give a number above 0"),
    ("algorithm.kl_coef", lambda v: v >= 0, "would reward divergence from the first weights; give 0 or more"),
    ("algorithm.tis_cap", lambda v: v > 0, "would zero every importance weight; give a number above 0, or null for none"),
    ("algorithm.overlong_penalty", lambda v: v >= 0, "would reward overlong completions; give 0 or more"),
    ("reward.timeout_s", lambda v: v > 0, "would make every completion worth 0; give seconds above 0"),
    ("trainer.virtual_pipeline", lambda v: v >= 2, "is no number of chunks to interleave; give at least 2, or null for one"),
    ("trainer.num_layers_in_first_pipeline_stage", lambda v: v >= 1, "leaves a pipeline stage without layers; give at least 1, or null"),
    ("trainer.num_layers_in_last_pipeline_stage", lambda v: v >= 1, "leaves a pipeline stage without layers; give at least 1, or null"),
    (MTP, lambda v: v >= 0, "would make MTP layers worse; give a number above 0, or 0 for a trainer without them"),
    ("trainer.recompute.num_layers", lambda v: v >= 1, "is no number of layers; give at least 1, or null"),
    ("trainer.optimizer.cpu_offload_fraction", lambda v: 0 <= v <= 1, "is no part of the optimizer's state; give 0 (none) to 1 (all)"),
    ("trainer.optimizer.lr", lambda v: v > 0, "learns nothing; give a number above 0"),
    ("trainer.optimizer.lr_decay_steps", lambda v: v >= 1, "is no number of steps; give at least 1, or null for those of the run"),
    ("trainer.optimizer.min_lr", lambda v: v >= 0, "would climb the loss; give 0 or more"),
    ("trainer.optimizer.weight_decay", lambda v: v >= 0, "would make weights grow; give 0 or more"),
    ("trainer.optimizer.beta1", lambda v: 0 <= v < 1, "is no decay of a moving average; give 0 or more and below 1"),
    ("trainer.optimizer.beta2", lambda v: 0 <= v < 1, "is no decay of a moving average; give 0 or more and below 1"),
    ("trainer.optimizer.eps", lambda v: v > 0, "divides by zero where gradients vanish; give a number above 0"),
    ("trainer.optimizer.grad_clip", lambda v: v >= 0, "is no norm; give a number above 0, or 0 for no clipping"),
    ("generation.temperature", lambda v: v >= 0.01, "makes the rollouts of a group nearly equal, and below 0.01 vLLM samples at 0.01, unlike what the trainer computes; give at least 0.01"),
    ("generation.vllm.max_num_seqs", lambda v: v >= 1, "never decodes; give at least 1, or null"),
    ("generation.vllm.gpu_memory_utilization", lambda v: 0 < v <= 1, "is no part of a GPU's memory; give a number above 0 and at most 1"),
    ("generation.vllm.max_model_len", lambda v: v >= 1, "is no length; give at least 1, or null for what the recipe can produce"),
    ("generation.sglang.context_length", lambda v: v >= 1, "is no length; give at least 1, or null for what the recipe can produce"),
    ("generation.sglang.max_running_requests", lambda v: v >= 1, "never decodes; give at least 1, or null"),
    ("generation.sglang.mem_fraction_static", lambda v: 0 < v < 1, "is no part of a GPU's memory that leaves some for batches; give a number above 0 and below 1, or null"),
    ("ray.cpus_per_rank", lambda v: v > 0, "lets Ray place any number of ranks on one core; give a number above 0"),
    ("ray.timeout_s", lambda v: v > 0, "would fail every wait; give seconds above 0"),
)  # fmt: skip


def config_violations(config: TrainConfig) -> list[Violation]:
    """All that is wrong with the values, without a look at files, model or machine."""
    singles = [*_singles(config)]
    bad = {key for violation in singles for key in violation.keys}
    # A layout of 0 or a negative batch is one mistake: combinations that build on it would only repeat it.
    pairs = [v for check in _COMBINATIONS for v in check(config, bad) if not bad.intersection(v.keys)]
    return singles + pairs


# Keys that are read in some runs alone: the start of their names, whether this run reads them, and which runs do.
_READ_WHERE: tuple[tuple[str, Callable[[TrainConfig], bool], str], ...] = (
    ("generation.vllm.", lambda c: c.generation.backend == "vllm", "generation.backend=vllm"),
    ("generation.sglang.", lambda c: c.generation.backend == "sglang", "generation.backend=sglang"),
    ("trainer.lora.", lambda c: c.trainer.lora.rank > 0, "trainer.lora.rank above 0"),
    ("trainer.optimizer.lr_decay_steps", lambda c: c.trainer.optimizer.lr_decay != "constant", "trainer.optimizer.lr_decay linear or cosine"),
    ("trainer.optimizer.min_lr", lambda c: c.trainer.optimizer.lr_decay != "constant", "trainer.optimizer.lr_decay linear or cosine"),
    ("algorithm.max_sampling_rounds", lambda c: c.algorithm.dynamic_sampling, "algorithm.dynamic_sampling=true"),
    ("algorithm.overlong_penalty", lambda c: c.algorithm.overlong_buffer > 0, "algorithm.overlong_buffer above 0"),
    ("reward.timeout_s", lambda c: c.reward.processes > 0, "reward.processes above 0"),
    ("policy.refit.transport", lambda c: c.policy.nccl_xfer_refit, "policy.nccl_xfer_refit=true"),
    ("policy.refit.streams", lambda c: c.policy.nccl_xfer_refit, "policy.nccl_xfer_refit=true"),
    ("policy.refit.delta", lambda c: c.policy.nccl_xfer_refit, "policy.nccl_xfer_refit=true"),
    ("policy.refit.delta_base", lambda c: c.policy.refit.delta != "off", "policy.refit.delta auto or always"),
)  # fmt: skip


def unread_violations(config: TrainConfig, given: Collection[str]) -> Iterator[Violation]:
    """Keys that the user gives for this run, and that it does not read.

    Those of a recipe's file are left alone: it may be written for several engines.

    Args:
        config: the recipe.
        given: dotted keys of the overrides.
    """
    for key, default in leaves(TrainConfig()):
        value = value_at(config, key)
        if value == default or not any(name == key or name.startswith(f"{key}.") for name in given):
            continue
        for start, read, where in _READ_WHERE:
            if key.startswith(start) and not read(config):
                yield Violation(
                    (key,),
                    f"{key}: {_shown(value)} has no effect, since it is read with {where} alone; leave it out, or give that too",
                )


def _singles(config: TrainConfig) -> Iterator[Violation]:
    for key, choices in CHOICES.items():
        value = value_at(config, key)
        if value not in choices:
            yield Violation((key,), f"{key}: {value!r} is not one of {', '.join(choices)}; choose one")
    for key, (least, consequence) in LEAST.items():
        value = value_at(config, key)
        if value < least:
            yield Violation((key,), f"{key}: {value} {consequence}; give at least {least}")
    for key, possible, problem in RANGES:
        value = value_at(config, key)
        if value is not None and not possible(value):
            yield Violation((key,), f"{key}: {value:g} {problem}")
    if not config.name or "/" in config.name or config.name in (".", ".."):
        yield Violation(
            ("name",), f"name: {config.name!r} is no folder name under run_root; give one without '/'"
        )
    function = config.reward.function
    if function not in BUNDLED and not _is_dotted_path(function):
        remedy = f"give {', '.join(BUNDLED)}, package.module.function or package.module:function"
        yield Violation(("reward.function",), f"reward.function: {function!r} names no function; {remedy}")


def _is_dotted_path(text: str) -> bool:
    parts = text.replace(":", ".", 1).split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _batches(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    algorithm = config.algorithm
    layout = ("ranks", "tensor_parallel", "pipeline_parallel", "context_parallel")
    keys = (
        "algorithm.prompts_per_step",
        "algorithm.group_size",
        "algorithm.minibatches",
        *(f"trainer.{name}" for name in layout),
    )
    if bad.intersection(keys) or not (ranks := data_parallel(config)):
        return
    prompts, group, minibatches = algorithm.prompts_per_step, algorithm.group_size, algorithm.minibatches
    if prompts % minibatches == 0 and prompts // minibatches * group % ranks == 0:
        return
    # A minibatch has whole groups, and every data-parallel rank the same number of its rollouts.
    unit = minibatches * (ranks // math.gcd(ranks, group))
    yield Violation(
        keys,
        f"algorithm.prompts_per_step: {prompts} prompts in groups of {group} rollouts cannot be split evenly into "
        f"{minibatches} minibatches of whole groups on {ranks} data-parallel ranks; give "
        f"{-(-prompts // unit) * unit} prompts, or other algorithm.minibatches",
    )


def _schedule(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    optimizer = config.trainer.optimizer
    if optimizer.lr_decay == "constant":
        return
    end = optimizer.lr_decay_steps
    if end is not None and optimizer.warmup_steps >= end:
        yield Violation(
            ("trainer.optimizer.warmup_steps", "trainer.optimizer.lr_decay_steps"),
            f"trainer.optimizer.warmup_steps: {optimizer.warmup_steps} steps of warm-up leave none of the {end} after which the "
            f"rate has decayed; give at most {end - 1}, or more lr_decay_steps",
        )
    if optimizer.min_lr > optimizer.lr:
        yield Violation(
            ("trainer.optimizer.min_lr", "trainer.optimizer.lr"),
            f"trainer.optimizer.min_lr: {optimizer.min_lr:g} is above lr {optimizer.lr:g}, so that the rate would rise; give at most lr",
        )


def _dapo(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    algorithm, longest = config.algorithm, config.generation.max_new_tokens
    uses = {"dynamic_sampling": algorithm.dynamic_sampling, "overlong_buffer": algorithm.overlong_buffer > 0}
    for name, used in uses.items():
        if used and algorithm.name == "grpo":
            off = "false" if name == "dynamic_sampling" else "0"
            yield Violation(
                (f"algorithm.{name}", "algorithm.name"),
                f"algorithm.{name}: belongs to DAPO and has no effect with algorithm.name=grpo; set "
                f"algorithm.name=dapo or algorithm.{name}={off}",
            )
    parts = any(uses.values()) or algorithm.clip_high > algorithm.clip_low or algorithm.aggregation == "token"
    if algorithm.name == "dapo" and not parts:
        yield Violation(
            ("algorithm.name",),
            "algorithm.name: dapo, but no part of DAPO is on, so that GRPO would be trained; set algorithm.dynamic_sampling=true, "
            "algorithm.overlong_buffer, algorithm.clip_high above clip_low or algorithm.aggregation=token, or begin with recipe=dapo_tiny",
        )
    if algorithm.overlong_buffer > longest:
        yield Violation(
            ("algorithm.overlong_buffer", "generation.max_new_tokens"),
            f"algorithm.overlong_buffer: {algorithm.overlong_buffer} is longer than generation.max_new_tokens "
            f"{longest}, so every completion would be punished for its length; give at most {longest}",
        )
    if algorithm.clip_high < algorithm.clip_low:
        yield Violation(
            ("algorithm.clip_high", "algorithm.clip_low"),
            f"algorithm.clip_high: {algorithm.clip_high:g} is below clip_low {algorithm.clip_low:g}: the reverse of "
            "clip-higher, it holds back likely tokens more than unlikely ones; give at least clip_low",
        )


def _generation(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    generation = config.generation
    ranks = generation.tensor_parallel * generation.pipeline_parallel
    if generation.backend != "vllm":
        if generation.backend == "transformers" and generation.pipeline_parallel > 1:
            yield Violation(
                ("generation.pipeline_parallel", "generation.backend"),
                f"generation.pipeline_parallel: {generation.pipeline_parallel}, but transformers generates without "
                "pipeline stages; give 1, or generation.backend=vllm",
            )
        return
    needed = config.data.max_prompt_tokens + generation.max_new_tokens
    longest = generation.vllm.max_model_len
    if longest is not None and longest < needed:
        yield Violation(
            ("generation.vllm.max_model_len", "data.max_prompt_tokens", "generation.max_new_tokens"),
            f"generation.vllm.max_model_len: {longest} is less than data.max_prompt_tokens + "
            f"generation.max_new_tokens = {needed}, so vLLM would refuse the longest prompts; give at least {needed}, "
            "or null",
        )
    if generation.vllm.distributed_executor_backend == "ray" and ranks == 1:
        yield Violation(
            (
                "generation.vllm.distributed_executor_backend",
                "generation.tensor_parallel",
                "generation.pipeline_parallel",
            ),
            "generation.vllm.distributed_executor_backend: ray spreads the ranks of an engine over hosts, and an engine "
            "has one here; give mp",
        )


def _kv_scales(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    if not config.policy.refit.kv_scales:
        return
    key, backend = "policy.refit.kv_scales", config.generation.backend
    held = {"vllm": config.generation.vllm.kv_cache_dtype, "sglang": config.generation.sglang.kv_cache_dtype}
    dtype = f"generation.{backend}.kv_cache_dtype"
    if backend not in held:
        yield Violation(
            (key, "generation.backend"),
            f"{key}: scales are for an FP8 KV cache, and {backend} caches keys and values in the dtype of the model; give "
            "false, or generation.backend=vllm with generation.vllm.kv_cache_dtype=fp8",
        )
    elif held[backend] != "fp8":
        yield Violation(
            (key, dtype),
            f"{key}: scales are for an FP8 KV cache, and {dtype} is {held[backend]}; give {dtype}=fp8, or false here",
        )


# Megatron-core 0.19's choices of recompute_modules.
_RECOMPUTED_MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
)

# Keys that one trainer alone reads; under another one they must have their defaults.
MEGATRON_ONLY = (
    "trainer.pipeline_parallel",
    "trainer.virtual_pipeline",
    "trainer.num_layers_in_first_pipeline_stage",
    "trainer.num_layers_in_last_pipeline_stage",
    "trainer.pipeline_model_parallel_layout",
    "trainer.expert_parallel",
    "trainer.expert_tensor_parallel",
    "trainer.context_parallel",
    "trainer.distributed_optimizer",
    "trainer.fp8_param",
    MTP,
    "trainer.recompute.method",
    "trainer.recompute.num_layers",
    "trainer.recompute.modules",
    "trainer.optimizer.cpu_offload_fraction",
)
_FSDP_ONLY = (
    "trainer.fsdp.replicate",
    "trainer.fsdp.reshard_after_forward",
    "trainer.fsdp.cpu_offload",
)
# What FSDP has in the place of some.
_INSTEAD = {
    "trainer.pipeline_parallel": "FSDP shards every layer over the ranks",
    "trainer.expert_parallel": "FSDP shards the experts like all else",
    "trainer.context_parallel": "transformers' attention is computed on whole rows; trainer.recompute is there for long ones",
    "trainer.distributed_optimizer": "FSDP always shards the optimizer's state",
    MTP: "transformers leaves MTP layers out of the model",
    "trainer.recompute.modules": "FSDP recomputes whole layers",
    "trainer.optimizer.cpu_offload_fraction": "trainer.fsdp.cpu_offload=true offloads all",
}


def value_at(config: TrainConfig, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def data_parallel(config: TrainConfig) -> int:
    """Data-parallel ranks of the trainer; 0 where its ranks are no multiple of a copy's."""
    trainer = config.trainer
    copy = trainer.tensor_parallel
    if trainer.backend != "fsdp":
        copy *= trainer.pipeline_parallel * trainer.context_parallel
    return 0 if trainer.ranks % copy else trainer.ranks // copy


def _trainer_violations(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    """What is wrong with the chosen trainer's keys, and which keys are not its own.

    Args:
        config: whose values are possible each for itself, but for ``bad``.
        bad: keys whose values are not.
    """
    if config.trainer.backend == "fsdp":
        yield from _foreign(config, MEGATRON_ONLY, "Megatron", "fsdp")
        yield from _ranks(
            config, bad, {"all copies with one shard each": ("fsdp.replicate", "tensor_parallel")}
        )
        yield from _fsdp_memory(config)
        return
    yield from _foreign(config, _FSDP_ONLY, "FSDP", "megatron")
    dense = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    experts = ("expert_tensor_parallel", "expert_parallel", "pipeline_parallel")
    yield from _ranks(
        config, bad, {"one copy of the dense layers": dense, "one copy of the experts": experts}
    )
    yield from _stages(config)
    yield from _memory(config)


def _foreign(config: TrainConfig, keys: tuple[str, ...], owner: str, backend: str) -> Iterator[Violation]:
    defaults = TrainConfig()
    for key in keys:
        value, default = value_at(config, key), value_at(defaults, key)
        if value == default:
            continue
        instead = f" ({_INSTEAD[key]})" if key in _INSTEAD else ""
        yield Violation(
            (key, "trainer.backend"),
            f"{key}: {_shown(value)} is {owner}'s, and has no effect with trainer.backend={backend}{instead}; give "
            f"{_shown(default)}, or select a trainer: trainer={owner.lower()} reads it, and trainer={backend} drops what a recipe's file "
            "says for the other one",
        )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _fsdp_memory(config: TrainConfig) -> Iterator[Violation]:
    granularity = config.trainer.recompute.granularity
    if granularity not in (None, "full"):
        yield Violation(
            ("trainer.recompute.granularity", "trainer.backend"),
            f"trainer.recompute.granularity: {granularity!r}, but with trainer.backend=fsdp layers are computed again as a "
            "whole; give full, or null",
        )


def _lora(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    lora, generation, key = config.trainer.lora, config.generation, "policy.refit.lora"
    alone = config.policy.refit.lora == "adapter"
    if not lora.rank:
        if alone:
            yield Violation(
                (key, "trainer.lora.rank"),
                f"{key}: adapter, but trainer.lora.rank is 0, so that there is no adapter and nothing would reach the engine; "
                "give merge, or a rank",
            )
        return
    if not lora.target_modules:
        yield Violation(
            ("trainer.lora.target_modules",),
            "trainer.lora.target_modules: names no layer, so that nothing is trained; give [all-linear], or endings of names",
        )
    yield from _lora_in_megatron(config, bad) if config.trainer.backend != "fsdp" else _lora_in_fsdp(config)
    if not alone:
        return
    if generation.colocated.enabled:
        yield Violation(
            (key, ENABLED),
            f"{key}: adapter brings no weights of the base model, which engines discard as they sleep; give merge, or {ENABLED}=false",
        )
    if generation.backend == "sglang":
        yield Violation(
            (key, "generation.backend"),
            f"{key}: adapter, but refits bring none to SGLang; give merge, or generation.backend=vllm",
        )
    if generation.backend == "transformers" and generation.tensor_parallel > 1:
        yield Violation(
            (key, "generation.tensor_parallel"),
            f"{key}: adapter, but the transformers engine has no rule for an adapter's parts at generation.tensor_parallel "
            f"{generation.tensor_parallel}; give 1 and more generation.replicas, or merge",
        )
    if generation.backend == "vllm" and lora.rank > VLLM_LORA_RANKS[-1]:
        yield Violation(
            ("trainer.lora.rank", "generation.backend"),
            f"trainer.lora.rank: {lora.rank} is above {VLLM_LORA_RANKS[-1]}, the largest of an adapter in vLLM; give less, or {key}=merge",
        )
    if generation.backend == "vllm" and generation.vllm.load_format == "dummy":
        yield Violation(
            (key, "generation.vllm.load_format"),
            f"{key}: adapter brings no weights of the base model, which load_format dummy leaves random; give auto, or merge",
        )
    if generation.weight_dtype != "auto":
        yield Violation(
            (key, "generation.weight_dtype"),
            f"{key}: adapter brings no weights of the base model, which generation.weight_dtype {generation.weight_dtype} takes "
            "from the trainer; give merge",
        )


def adapts_experts(config: TrainConfig) -> bool:
    """Whether experts get adapters, if the model has any: under Megatron they do, peft passes them over."""
    lora = config.trainer.lora
    adapted = lora.rank > 0 and config.trainer.backend != "fsdp"
    return adapted and bool({"linear_fc1", "linear_fc2"}.intersection(megatron_targets(lora.target_modules)))


def _lora_in_fsdp(config: TrainConfig) -> Iterator[Violation]:
    if config.trainer.tensor_parallel > 1:
        yield Violation(
            ("trainer.lora.rank", "trainer.tensor_parallel"),
            f"trainer.lora.rank: {config.trainer.lora.rank}, but transformers' tensor parallelism has no plan for the factors; give "
            "trainer.tensor_parallel=1, FSDP shards over all ranks",
        )


def _lora_in_megatron(config: TrainConfig, bad: set[str]) -> Iterator[Violation]:
    trainer, key = config.trainer, "trainer.lora.rank"
    targets = trainer.lora.target_modules
    for problem in target_violations(targets):
        yield Violation(
            ("trainer.lora.target_modules", "trainer.backend"), f"trainer.lora.target_modules: {problem}"
        )
    if "trainer.tensor_parallel" not in bad and trainer.lora.rank % trainer.tensor_parallel:
        yield Violation(
            (key, "trainer.tensor_parallel"),
            f"{key}: {trainer.lora.rank} is no multiple of trainer.tensor_parallel {trainer.tensor_parallel}, over whose ranks "
            "Megatron cuts it; give a multiple",
        )
    if trainer.expert_tensor_parallel > 1 and adapts_experts(config):
        yield Violation(
            (key, "trainer.expert_tensor_parallel"),
            f"{key}: with trainer.expert_tensor_parallel {trainer.expert_tensor_parallel} Bridge cuts gate and up of experts' "
            "adapters in the wrong place as it exports them; give trainer.expert_tensor_parallel=1, or target_modules without "
            "the experts' layers",
        )
    if config.generation.colocated.enabled:
        yield Violation(
            (key, ENABLED),
            f"{key}: Megatron keeps weights that are not trained out of the buffers by which it leaves a GPU, so that the engine "
            f"would not get their memory; give {ENABLED}=false, or trainer=fsdp",
        )
    if trainer.optimizer.cpu_offload_fraction:
        yield Violation(
            (key, "trainer.optimizer.cpu_offload_fraction"),
            f"{key}: adapters under an optimizer in host memory have not run; give trainer.optimizer.cpu_offload_fraction=0, what "
            "the factors take is small",
        )


def _ranks(config: TrainConfig, bad: set[str], groups: dict[str, tuple[str, ...]]) -> Iterator[Violation]:
    trainer = config.trainer
    for what, names in groups.items():
        keys = ("trainer.ranks", *(f"trainer.{name}" for name in names))
        if bad.intersection(keys):
            continue
        sizes = [value_at(config, key) for key in keys[1:]]
        world = math.prod(sizes)
        if trainer.ranks % world:
            product = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
            yield Violation(
                keys,
                f"trainer.ranks: {trainer.ranks} is no multiple of {world}, the ranks of {what} "
                f"({product}); give {-(-trainer.ranks // world) * world} ranks or smaller parallel sizes",
            )


def _stages(config: TrainConfig) -> Iterator[Violation]:
    trainer = config.trainer
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    given = [name for name in ends if getattr(trainer, name) is not None]
    layout = trainer.pipeline_model_parallel_layout
    if trainer.pipeline_parallel == 1:
        for name in (*given, *(("virtual_pipeline",) if trainer.virtual_pipeline is not None else ())):
            yield Violation(
                (f"trainer.{name}", "trainer.pipeline_parallel"),
                f"trainer.{name}: {getattr(trainer, name)} is of pipeline stages, and trainer.pipeline_parallel is 1; "
                "give more stages, or null",
            )
    if layout is None:
        return
    keys = ("trainer.pipeline_model_parallel_layout", *(f"trainer.{name}" for name in given))
    if given:
        yield Violation(
            keys, f"{keys[0]}: tells the layers of all stages, and so does {keys[1]}; set one to null"
        )
    stages = trainer.pipeline_parallel * (trainer.virtual_pipeline or 1)
    for problem in pipeline_layout_violations(layout, stages):
        concerned = (keys[0], "trainer.pipeline_parallel", "trainer.virtual_pipeline")
        yield Violation(concerned, f"{keys[0]}: {layout!r} can't be used: {problem}")


def _memory(config: TrainConfig) -> Iterator[Violation]:
    recompute, key = config.trainer.recompute, "trainer.recompute"
    granularity = recompute.granularity
    if granularity not in (None, "full", "selective"):
        text = f"{key}.granularity: {granularity!r} is neither full nor selective; give one, or null"
        yield Violation((f"{key}.granularity",), text)
        return
    if granularity == "full":
        if recompute.method not in ("uniform", "block") or recompute.num_layers is None:
            yield Violation(
                (f"{key}.granularity", f"{key}.method", f"{key}.num_layers"),
                f"{key}.method: full recomputation needs method uniform or block, and num_layers; e.g. "
                f"{key}.method=uniform {key}.num_layers=1",
            )
    else:
        for name in ("method", "num_layers"):
            if getattr(recompute, name) is not None:
                yield Violation(
                    (f"{key}.{name}", f"{key}.granularity"),
                    f"{key}.{name}: belongs to granularity full and has no effect here; set "
                    f"{key}.granularity=full, or null here",
                )
    if recompute.modules and granularity != "selective":
        yield Violation(
            (f"{key}.modules", f"{key}.granularity"),
            f"{key}.modules: belongs to granularity selective and has no effect here; set "
            f"{key}.granularity=selective, or leave it empty",
        )
    if unknown := sorted(set(recompute.modules) - set(_RECOMPUTED_MODULES)):
        yield Violation(
            (f"{key}.modules",),
            f"{key}.modules: {', '.join(unknown)} is none of Megatron's {', '.join(_RECOMPUTED_MODULES)}; choose some",
        )
    if config.trainer.optimizer.cpu_offload_fraction > 0 and not config.trainer.distributed_optimizer:
        yield Violation(
            ("trainer.optimizer.cpu_offload_fraction", "trainer.distributed_optimizer"),
            "trainer.optimizer.cpu_offload_fraction: Megatron's hybrid optimizer builds on the distributed one; set "
            "trainer.distributed_optimizer=true, or 0 here",
        )


_COMBINATIONS = (
    _trainer_violations,
    _lora,
    _batches,
    _schedule,
    _dapo,
    _generation,
    _kv_scales,
    weight_dtype_violations,
    mtp_violations,
    speculation_violations,
    sglang_violations,
    colocated_violations,
)
