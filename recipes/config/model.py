"""What the model's shape requires of a recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Size

from ...integration.quantize.nvfp4 import BLOCK as NVFP4_BLOCK
from ...workers.trainers.megatron.pipeline_layout import pipeline_layout_violations
from ..plan.catalog import (
    CatalogError,
    LayoutError,
    Model,
    TrainLayout,
    bundled_models,
    bundled_name,
    open_model,
)
from ..plan.catalog.sections import language_model
from ..tiny.checkpoints import KINDS, PREFIX
from .checks import adapts_experts
from .drafting import PREDICTION_LAYERS, lack_violations, without_prediction
from .engines import context_violations
from .errors import Violation
from .schema import TrainConfig
from .weight_dtypes import qat_format

# Parameters of a policy that a machine without GPUs is let train: a small model, to try something.
_MOST_ON_CPUS = 1_000_000_000
# Hugging Face's names for the number of routed experts: Qwen and OLMoE; DeepSeek; Mixtral and gpt-oss.
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
# Families whose windows Megatron-Bridge 0.6.2 gives Transformer Engine, which exchanges heads for them in place of a ring, as for sinks.
_EXCHANGING = ("gpt_oss", "gemma3_text", "mistral")
# The quant_method of checkpoints that Megatron-Bridge makes BF16 of as it loads some of its families.
_DEQUANTIZED = ("fp8", "mxfp4", "compressed-tensors")
# By backend: the key that distributes whole experts over an engine's ranks, its value then, and its value otherwise.
_EXPERT_SHARING = {
    "vllm": ("generation.vllm.enable_expert_parallel", "true", "false"),
    "sglang": ("generation.sglang.ep_size", "above 1", "1"),
}


def local_hf_config(path: str) -> Mapping[str, Any] | None:
    """The Hugging Face configuration of ``model.path`` where it can be had without a download, else None.

    Raises:
        ValueError: the folder's config.json is no JSON object.
    """
    if path.startswith(PREFIX):
        return KINDS.get(path.removeprefix(PREFIX))
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        loaded = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); restore the file") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{file} holds no JSON object; restore the file")
    return loaded


def code_violations(config: TrainConfig, hf_config: Mapping[str, Any]) -> Iterator[Violation]:
    """A checkpoint that brings the class of its configuration, since transformers has none, and whose code is not to be run."""
    brought = hf_config.get("auto_map") or {}
    if config.model.trust_remote_code or "AutoConfig" not in brought:
        return
    from transformers import CONFIG_MAPPING  # which takes a second to import

    kind = hf_config.get("model_type")
    if kind not in CONFIG_MAPPING:
        yield Violation(
            ("model.trust_remote_code", "model.path"),
            f"model.trust_remote_code: false, but transformers has no model of type {kind}, and {config.model.path} brings code for it "
            f"({brought['AutoConfig']}); read that code, and give true to run it in trainer and engine, or another model",
        )


def quantization_of(hf_config: Mapping[str, Any]) -> Any:
    """What config.json says of a checkpoint that is quantized; falsy of others."""
    text = hf_config.get("text_config", hf_config)
    return hf_config.get("quantization_config") or text.get("quantization_config")


def catalog_model(config: TrainConfig) -> Model | None:
    """The bundled model whose shapes the recipe's has: by ``model.catalog``, or by its hub name; else None.

    Without layers for multi-token prediction where the policy is built and exported without them.

    Raises:
        ValueError: ``model.catalog`` names none.
    """
    name = config.model.catalog or bundled_name(config.model.path)
    if name is None:
        return None
    if name not in bundled_models():
        raise ValueError(f"{name!r} is not bundled; give one of {', '.join(bundled_models())}, or null")
    model = open_model(name)
    config_keys = _as_trained(config, model.config)
    return model if config_keys == model.config else replace(model, config=config_keys)


def _as_trained(config: TrainConfig, hf_config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model's configuration, those of layers for multi-token prediction left out unless they are trained."""
    if config.trainer.mtp_loss_scaling_factor > 0:
        return hf_config
    text = hf_config.get("text_config")
    whole = without_prediction(hf_config)
    return whole if text is None else whole | {"text_config": without_prediction(text)}


def known_weights(config: TrainConfig, hf_config: Mapping[str, Any]) -> dict[str, Size] | None:
    """Names and shapes of an unquantized checkpoint's weights by the catalogue's arithmetic, without a class of the model.

    Args:
        config: the recipe.
        hf_config: all keys of the checkpoint's configuration, with the defaults of its own class.

    Returns:
        None of a family that the catalogue does not have or can't lay out, and of a quantized checkpoint, which has other tensors.
    """
    if quantization_of(hf_config):
        return None
    try:
        specs = Model(config.model.path, _as_trained(config, dict(hf_config))).specs()
    except (CatalogError, TypeError):  # a key may be null
        return None
    return {spec.name: Size(spec.shape) for spec in specs}


def size_violations(config: TrainConfig, lack: str) -> Iterator[Violation]:
    """A bundled model that CPUs would load for long and never train.

    Args:
        config: the recipe.
        lack: who finds no GPU, and where, for the text.
    """
    name = config.model.catalog or bundled_name(config.model.path)
    if name not in bundled_models():
        return
    parameters = sum(math.prod(spec.shape) for spec in open_model(name).specs())
    if parameters > _MOST_ON_CPUS:
        yield Violation(
            ("model.path", "model.catalog", "ray.address"),
            f"model.path: {config.model.path} has {parameters / 1e9:.3g} billion parameters, too many for CPUs, and {lack}; start "
            "it where there are some, or give ray.address of a cluster that has them",
        )


def packed_experts_violations(
    config: TrainConfig, hf_config: Mapping[str, Any], lack: str
) -> Iterator[Violation]:
    """Experts in NVFP4 or INT4, which vLLM computes with on GPUs alone: its products of them are written in Triton and CUDA.

    Args:
        config: the recipe.
        hf_config: keys of config.json.
        lack: who finds no GPU, and where, for the text.
    """
    if experts_of(hf_config) is None or config.generation.backend != "vllm":
        return
    for key, value, given, instead in (
        ("policy.qat", config.policy.qat, config.policy.qat != "off", "off"),
        ("generation.weight_dtype", "int4", config.generation.weight_dtype == "int4", "auto"),
    ):
        if given:
            yield Violation(
                (key, "model.path", "ray.address"),
                f"{key}: {value}, but the model has experts, which vLLM computes so on GPUs alone, and {lack}; give {instead}, or "
                "ray.address of a cluster with some",
            )


def experts_of(hf_config: Mapping[str, Any]) -> int | None:
    """How many routed experts a layer has; None of a model without."""
    text = hf_config.get("text_config") or hf_config
    return next((text[key] for key in _EXPERT_KEYS if text.get(key)), None)


def catalog_violations(config: TrainConfig, hf_config: Mapping[str, Any]) -> list[Violation]:
    """Where the checkpoint is not of the shapes that the recipe was checked and planned with."""
    model = catalog_model(config)
    if model is None:
        return []
    theirs = language_model(hf_config) | {"model_type": hf_config.get("model_type")}
    ours = language_model(model.config) | {"model_type": model.config["model_type"]}
    if ours.get("architectures") == theirs.get("architectures") is not None:
        del ours["model_type"]  # a class may be published under another name than its configuration's own
    differences = [
        f"{key} is {theirs[key]!r} and not {value!r}"
        for key, value in ours.items()
        if not key.startswith("_") and key not in PREDICTION_LAYERS and theirs.get(key, value) != value
    ]
    if not differences:
        return []
    return [
        Violation(
            ("model.catalog", "model.path"),
            f"model.catalog: the checkpoint's config.json is not that of {model.name}, with which the recipe was "
            f"checked and planned: {'; '.join(differences)}. Give the model that it is of, or null",
        )
    ]


# What SGLang 0.5.17 builds with a look at weights as if they were not quantized, by keys of a model that has it.
_READ_BY_SGLANG = {
    "latent attention": ("kv_lora_rank",),
    "shared experts": ("n_shared_experts", "shared_expert_intermediate_size"),
    "linear attention": ("linear_num_value_heads",),
}


def _cut_groups(
    config: TrainConfig, text: Mapping[str, Any], key: str, group: int, less: str
) -> Iterator[Violation]:
    """Shards that cut groups of a row, with which engines and quantized training refuse to compute, or of experts may compute wrongly."""
    generation, trainer = config.generation, config.trainer
    parts, own = generation.tensor_parallel, "generation.tensor_parallel"
    out = "generation.vllm.enable_expert_parallel, generation.sglang.ep_size"
    sides = [
        (
            "the engine",
            own,
            parts,
            1 if generation.shares_experts else parts,
            f", or share experts out ({out})",
        )
    ]
    if config.policy.qat != "off" and trainer.backend == "megatron":
        of_experts = ", or trainer.expert_tensor_parallel=1"
        sides.append(
            (
                "the trainer",
                "trainer.tensor_parallel",
                trainer.tensor_parallel,
                trainer.expert_tensor_parallel,
                of_experts,
            )
        )
    of_head = text.get("v_head_dim") or text.get("head_dim")
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if isinstance(heads, int) and isinstance(of_head or hidden, int):
        of_heads = heads * of_head if of_head else hidden
    else:
        of_heads = None
    shared, inner = text.get("n_shared_experts"), text.get("moe_intermediate_size")
    of_shared = shared * inner if isinstance(shared, int) and isinstance(inner, int) else None
    for side, tensor_parallel, parts, of_experts, otherwise in sides:
        spread = f"{less} or another {tensor_parallel}"
        for name, total, size, remedy in (
            ("hidden_size", hidden, 1, less),
            ("num_attention_heads times their size", of_heads, parts, spread),
            ("intermediate_size", text.get("intermediate_size"), parts, spread),
            ("shared_expert_intermediate_size", text.get("shared_expert_intermediate_size"), parts, spread),
            ("n_shared_experts times moe_intermediate_size", of_shared, parts, spread),
            ("moe_intermediate_size", inner, of_experts, f"{spread}{otherwise}"),
        ):
            if isinstance(total, int) and total % size == 0 and total // size % group:
                yield Violation(
                    (key, tensor_parallel, "model.path"),
                    f"{key}: a rank of {side} has {total // size} of {name} {total}, which cuts groups of {group} that share a scale; {remedy}",
                )


def _int4_violations(
    config: TrainConfig, hf_config: Mapping[str, Any], text: Mapping[str, Any]
) -> Iterator[Violation]:
    """Of an engine in INT4: encoders, cut groups, and what SGLang does not build."""
    stored, group = "generation.weight_dtype", config.generation.weight_group
    if text is not hf_config:
        yield Violation(
            (stored, "model.path"), f"{stored}: int4, but only models of text alone have run so; give auto"
        )
    yield from _cut_groups(config, text, "generation.weight_group", group, "give a smaller group")
    if config.generation.backend == "sglang":
        unbuilt = [
            f"{what} ({', '.join(keys)})"
            for what, keys in _READ_BY_SGLANG.items()
            if any(text.get(key) for key in keys)
        ]
        if unbuilt:
            yield Violation(
                (stored, "generation.backend", "model.path"),
                f"{stored}: int4, but SGLang reads a weight that such layers lack while it builds {' and '.join(unbuilt)}, and ends; give "
                "generation.backend=vllm, or auto",
            )


def shape_violations(config: TrainConfig, hf_config: Mapping[str, Any]) -> list[Violation]:
    """What the model's shape rules out.

    Megatron-core's rules: attention heads divide by TP, query groups are a multiple or a divisor of it, the
    unpadded vocabulary and the MLP widths divide, layers divide by PP, experts by EP. vLLM has the same rules for
    its TP, but pads the vocabulary; transformers, and FSDP with its TP, cannot replicate KV heads.

    Args:
        config: the recipe; parallel sizes of at least 1.
        hf_config: keys of config.json; a multimodal one's ``text_config`` is read.
    """
    text = hf_config.get("text_config") or hf_config
    found: list[Violation] = []

    def divides(key: str, size: int, name: str, what: str) -> None:
        total = text.get(name)
        if total is not None and total % size:
            problem = f"{size} does not divide the model's {what} ({name} {total})"
            found.append(Violation((key, "model.path"), f"{key}: {problem}; give a divisor of {total}"))

    trainer = config.trainer
    experts = experts_of(hf_config)
    sizes = {
        "trainer.tensor_parallel": trainer.tensor_parallel,
        "generation.tensor_parallel": config.generation.tensor_parallel,
    }
    by_transformers = {
        "trainer.tensor_parallel": trainer.backend == "fsdp",
        "generation.tensor_parallel": config.generation.backend == "transformers",
    }
    for key, size in sizes.items():
        divides(key, size, "num_attention_heads", "attention heads")
        if experts is None:
            divides(key, size, "intermediate_size", "MLP width")
        query_groups = text.get("num_key_value_heads")
        if by_transformers[key]:
            divides(key, size, "num_key_value_heads", "KV heads, which transformers does not replicate")
        elif query_groups and query_groups % size and size % query_groups:
            found.append(
                Violation(
                    (key, "model.path"),
                    f"{key}: {size} is neither a divisor nor a multiple of the model's query groups "
                    f"(num_key_value_heads {query_groups}), so KV heads can be neither split nor replicated; give one",
                )
            )
    divides("trainer.tensor_parallel", trainer.tensor_parallel, "vocab_size", "vocabulary")
    if trainer.context_parallel > 1 and text is not hf_config:
        problem = (
            f"{trainer.context_parallel}, but only models of text alone take rows that are cut before; give 1"
        )
        found.append(
            Violation(("trainer.context_parallel", "model.path"), f"trainer.context_parallel: {problem}")
        )
    found += _exchange_violations(config, text)
    found += _stage_violations(config, text.get("num_hidden_layers"))
    found += lack_violations(config, text)
    method = (quantization_of(hf_config) or {}).get("quant_method")
    if method not in (None, *_DEQUANTIZED):
        problem = (
            f"the checkpoint is quantized ({method}), which no trainer starts from; give an unquantized one"
        )
        found.append(Violation(("model.path",), f"model.path: {problem}"))
    if config.policy.qat != "off":
        for wrong, problem in (
            (
                text.get("model_type") == "gpt_oss",
                f"GPT-OSS's experts have biases, and gates between up columns, which no layer here computes in {qat_format(config)}; give off",
            ),
            (
                quantization_of(hf_config),
                "the checkpoint is quantized already, and is trained from BF16; give an unquantized one, or off",
            ),
        ):
            if wrong:
                found.append(
                    Violation(("policy.qat", "model.path"), f"policy.qat: {config.policy.qat}, but {problem}")
                )
    if config.generation.weight_dtype in ("int4", "mxfp8") and quantization_of(hf_config):
        found.append(
            Violation(
                ("generation.weight_dtype", "model.path"),
                f"generation.weight_dtype: {config.generation.weight_dtype}, but the checkpoint is quantized, and the engine would serve it as it is; give a copy in "
                "BF16, or auto",
            )
        )
    if config.generation.weight_dtype == "int4":
        found += _int4_violations(config, hf_config, text)
    if config.policy.qat in ("w4a4", "w4a16"):
        found += _cut_groups(config, text, "policy.qat", NVFP4_BLOCK, "give off")
    if config.generation.weight_dtype == "mxfp4":
        for wrong, problem in (
            (text.get("model_type") != "gpt_oss", "only GPT-OSS's experts are packed so; give auto"),
            (
                quantization_of(hf_config),
                "the trainer starts from BF16, and the checkpoint is quantized; give a copy in BF16",
            ),
        ):
            if wrong:
                keys = "generation.weight_dtype", "model.path"
                found.append(Violation(keys, f"generation.weight_dtype: mxfp4, but {problem}"))
    if experts is not None:
        name = next(key for key in _EXPERT_KEYS if text.get(key))
        divides("trainer.expert_parallel", trainer.expert_parallel, name, "experts")
        expert_width = (
            "trainer.tensor_parallel" if trainer.backend == "fsdp" else "trainer.expert_tensor_parallel"
        )
        size = getattr(trainer, expert_width.rpartition(".")[2])
        divides(expert_width, size, "moe_intermediate_size", "expert width")
    else:
        for name, size in (
            ("expert_parallel", trainer.expert_parallel),
            ("expert_tensor_parallel", trainer.expert_tensor_parallel),
        ):
            if size > 1:
                key = f"trainer.{name}"
                problem = f"{size}, but the model ({text.get('model_type', 'unknown type')}) has no experts"
                found.append(Violation((key, "model.path"), f"{key}: {problem}; give 1"))
        if config.generation.shares_experts:
            key, given, instead = _EXPERT_SHARING[config.generation.backend]
            problem = f"{given}, but the model ({text.get('model_type', 'unknown type')}) has no experts"
            found.append(Violation((key, "model.path"), f"{key}: {problem}; give {instead}"))
    alone = config.policy.refit.lora == "adapter" and config.generation.backend == "transformers"
    if experts is not None and alone and adapts_experts(config):
        found.append(
            Violation(
                ("policy.refit.lora", "model.path"),
                "policy.refit.lora: adapter, but the trainer's experts have adapters, and transformers keeps experts in one tensor, "
                "which takes none; give merge, or trainer.lora.target_modules without the experts' layers",
            )
        )
    latent = text.get("kv_lora_rank")
    if latent and config.policy.refit.kv_scales:
        key = "policy.refit.kv_scales"
        problem = (
            f"the model's latent attention (kv_lora_rank {latent}) caches no keys and values, and there is no calibration for "
            "what it caches"
        )
        found.append(Violation((key, "model.path"), f"{key}: {problem}; give false"))
    longest = config.data.max_prompt_tokens + config.generation.max_new_tokens
    positions = text.get("max_position_embeddings")
    if positions is not None and longest > positions:
        found.append(
            Violation(
                ("generation.max_new_tokens", "data.max_prompt_tokens", "model.path"),
                f"generation.max_new_tokens: prompts and completions reach {longest} tokens, more than the model's "
                f"{positions} positions (max_position_embeddings); shorten either by {longest - positions}",
            )
        )
    elif positions is not None:
        found += context_violations(config, positions)
    return found


def _exchange_violations(config: TrainConfig, text: Mapping[str, Any]) -> Iterator[Violation]:
    """Heads that context parallel ranks can't exchange, of models whose windows or sinks have them do so in place of a ring."""
    key, size, parts = (
        "trainer.context_parallel",
        config.trainer.context_parallel,
        config.trainer.tensor_parallel,
    )
    heads = text.get("num_key_value_heads")
    exchanges = text.get("model_type") in _EXCHANGING and text.get("sliding_window")
    if not exchanges or not isinstance(heads, int):
        return
    own = max(1, heads // parts)
    if own % size:
        yield Violation(
            (key, "trainer.tensor_parallel", "model.path"),
            f"{key}: {size}, but the model's attention has windows or sinks, for which ranks exchange heads, and of KV heads a rank has {own} "
            f"(num_key_value_heads {heads}, trainer.tensor_parallel {parts}); give a divisor of {own}",
        )


def _stage_violations(config: TrainConfig, layers: int | None) -> Iterator[Violation]:
    """Pipeline stages that the model's layers can't be cut into."""
    if layers is None:
        return
    trainer, stages = config.trainer, config.generation.pipeline_parallel
    if layers < stages:
        text = f"{stages} is more than the model's layers (num_hidden_layers {layers}); give at most {layers}"
        key = "generation.pipeline_parallel"
        yield Violation((key, "model.path"), f"{key}: {text}")
    first, last = trainer.num_layers_in_first_pipeline_stage, trainer.num_layers_in_last_pipeline_stage
    key, chunks = "trainer.pipeline_parallel", trainer.virtual_pipeline or 1
    if trainer.pipeline_model_parallel_layout is not None:
        key = "trainer.pipeline_model_parallel_layout"
        total = trainer.pipeline_parallel * chunks
        for problem in pipeline_layout_violations(trainer.pipeline_model_parallel_layout, total, layers):
            yield Violation((key, "model.path"), f"{key}: {problem} (num_hidden_layers)")
        return
    if first is None and last is None and layers % trainer.pipeline_parallel:
        yield Violation(
            (key, "model.path"),
            f"{key}: {trainer.pipeline_parallel} does not divide the model's layers (num_hidden_layers {layers}); give a "
            f"divisor of {layers}, or set trainer.num_layers_in_first_pipeline_stage and …_last_…",
        )
        return
    try:
        TrainLayout(pp=trainer.pipeline_parallel, vpp=chunks, first=first, last=last).stage_layers(layers)
    except LayoutError as error:
        ends = tuple(f"trainer.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
        keys = (key, *ends, "trainer.virtual_pipeline", "model.path")
        yield Violation(keys, f"{key}: {str(error).removeprefix('train: ')} (num_hidden_layers {layers})")
