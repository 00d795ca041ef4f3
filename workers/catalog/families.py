"""Families of models: from a Hugging Face configuration to sections of units.

Names are those of the published checkpoints and of Megatron-Bridge 0.6's mappings, which the tests compare with
transformers' own models and with Bridge's export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .attention_units import QueryKeyValue
from .expert_units import GatedExperts, StackedExperts
from .mamba_units import Blocks
from .units import ROUTER, Matrix, Stacked, Unit, Vocabulary

Config = Mapping[str, Any]
# The first, the last or every pipeline stage, the stage of a layer, or no stage of that side.
Stage = Literal["first", "last", "every"] | int | None


class CatalogError(ValueError):
    """A model that the catalogue does not know, or a configuration that it can't read."""


@dataclass(frozen=True)
class Section:
    """Units at one place of a model.

    Attributes:
        hf: prefix of Hugging Face names.
        megatron: prefix of Megatron's names.
        vllm: prefix of vLLM's names.
        units: what is there; the same object for all layers of one kind.
        train: pipeline stage of the trainer.
        gen: pipeline stage of the engine; None if its loader ignores these names.
        second: it repeats a section of another stage; left out where both stages are one rank.
    """

    hf: str
    megatron: str
    vllm: str
    units: tuple[Unit, ...]
    train: Stage
    gen: Stage
    second: bool = False


@dataclass(frozen=True)
class Architecture:
    """A model's sections, layers of the pipeline in order.

    Attributes:
        sections: all weights.
        layers: number of layers that pipeline stages share.
    """

    sections: tuple[Section, ...]
    layers: int


def architecture_of(config: Config) -> Architecture:
    """The sections of the model that ``config`` describes.

    Raises:
        CatalogError: an unknown ``model_type``, or a key that is missing or not supported.
    """
    kind = config.get("model_type")
    build = _FAMILIES.get(str(kind))
    if build is None:
        raise CatalogError(
            f"no layout is known for model_type {kind!r}; known are {', '.join(sorted(_FAMILIES))}. "
            "A model of another family can be refitted, but not planned without its weights."
        )
    try:
        return build(config)
    except KeyError as missing:
        raise CatalogError(f"the configuration of this {kind} model lacks the key {missing}") from None


def _norm(hf: str, megatron: str, size: int, vllm: str = "") -> Matrix:
    return Matrix(f"{hf}.weight", megatron, f"{vllm or hf}.weight", (size,))


def _qkv(
    config: Config, prefix: str, *, bias: bool, columns: int, vllm: str = "self_attn."
) -> tuple[Unit, ...]:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config.get("attention_head_dim") or columns // heads
    return tuple(
        QueryKeyValue(
            prefix,
            kind,
            f"self_attention.linear_qkv.{kind}",
            f"{vllm}qkv_proj.{kind}",
            heads,
            groups,
            head_dim,
            columns if kind == "weight" else None,
        )
        for kind in (("weight", "bias") if bias else ("weight",))
    )


def _attention(config: Config, *, qkv_bias: bool = False, head_norms: bool = False) -> tuple[Unit, ...]:
    """Grouped-query attention, with the layer's first norm fused into Megatron's projection."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    units: list[Unit] = [
        _norm("input_layernorm", "self_attention.linear_qkv.layer_norm_weight", hidden),
        *_qkv(config, "self_attn.", bias=qkv_bias, columns=hidden),
        Matrix(
            "self_attn.o_proj.weight",
            "self_attention.linear_proj.weight",
            "self_attn.o_proj.weight",
            (hidden, heads * head_dim),
            1,
        ),
    ]
    if head_norms:
        units += [
            _norm(f"self_attn.{x}_norm", f"self_attention.{x}_layernorm.weight", head_dim) for x in "qk"
        ]
    return tuple(units)


def _mlp(hidden: int, inner: int, hf: str = "mlp.", megatron: str = "mlp.") -> tuple[Unit, ...]:
    return (
        Stacked(
            (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
            (f"{megatron}linear_fc1.weight",),
            f"{hf}gate_up_proj.weight",
            (inner, inner),
            hidden,
        ),
        Matrix(
            f"{hf}down_proj.weight",
            f"{megatron}linear_fc2.weight",
            f"{hf}down_proj.weight",
            (hidden, inner),
            1,
        ),
    )


def _dense_mlp(config: Config) -> tuple[Unit, ...]:
    hidden = config["hidden_size"]
    return (
        _norm("post_attention_layernorm", "mlp.linear_fc1.layer_norm_weight", hidden),
        *_mlp(hidden, config["intermediate_size"]),
    )


def _router(hf: str, megatron: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Matrix:
    return Matrix(hf, megatron, hf, shape, dtype=dtype, train_refused=ROUTER)


def _decoder(
    config: Config,
    layers: list[tuple[Unit, ...]],
    *,
    hf: str = "model.",
    embedding: str = "embed_tokens",
    norm: str = "norm",
    megatron_norm: str = "decoder.final_layernorm.weight",
    vllm_embedding: str = "embed_tokens",
    on_every_stage: bool = False,
) -> list[Section]:
    """The sections around the layers, and the layers.

    ``on_every_stage``: vLLM's model holds embedding, last norm and head on all pipeline stages, used or not.
    """
    first: Stage = "every" if on_every_stage else "first"
    final: Stage = "every" if on_every_stage else "last"
    rows, hidden = config["vocab_size"], config["hidden_size"]
    tied = bool(config.get("tie_word_embeddings", False))
    embed = Vocabulary(
        f"{embedding}.weight",
        "embedding.word_embeddings.weight",
        f"{vllm_embedding}.weight",
        rows,
        hidden,
    )
    sections = [Section(hf, "", "model.", (embed,), "first", first)]
    sections += [
        Section(f"{hf}layers.{i}.", f"decoder.layers.{i}.", f"model.layers.{i}.", units, i, i)
        for i, units in enumerate(layers)
    ]
    sections.append(
        Section(hf, "", "model.", (_norm(norm, megatron_norm, hidden),), "last", final),
    )
    if tied:
        copy = Vocabulary("", "output_layer.weight", "", rows, hidden)
        sections.append(Section("", "", "", (copy,), "last", None, second=True))
        if not on_every_stage:
            sections.append(Section(hf, "", "model.", (embed,), None, "last", second=True))
    else:
        head = Vocabulary("lm_head.weight", "output_layer.weight", "lm_head.weight", rows, hidden)
        sections.append(Section("", "", "", (head,), "last", final))
    return sections


def _llama(config: Config, *, qkv_bias: bool = False, head_norms: bool = False) -> Architecture:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise CatalogError("biases of linear layers (attention_bias, mlp_bias) are not in the catalogue")
    layer = (
        *_attention(config, qkv_bias=qkv_bias, head_norms=head_norms),
        *_dense_mlp(config),
    )
    count = config["num_hidden_layers"]
    return Architecture(tuple(_decoder(config, [layer] * count)), count)


def _qwen2(config: Config) -> Architecture:
    return _llama(config, qkv_bias=True)


def _qwen3(config: Config) -> Architecture:
    return _llama(config, head_norms=True)


def _qwen3_moe(config: Config) -> Architecture:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise CatalogError(
            "a Qwen3-MoE model with dense layers among the others (mlp_only_layers, decoder_sparse_step) is not known "
            "to Megatron-Bridge's mappings"
        )
    hidden, experts = config["hidden_size"], config["num_experts"]
    layer = (
        *_attention(config, head_norms=True),
        _norm("post_attention_layernorm", "pre_mlp_layernorm.weight", hidden),
        _router("mlp.gate.weight", "mlp.router.weight", (experts, hidden)),
        GatedExperts(
            "mlp.experts.",
            "mlp.experts.",
            "mlp.experts.",
            experts,
            config["moe_intermediate_size"],
            hidden,
        ),
    )
    count = config["num_hidden_layers"]
    return Architecture(tuple(_decoder(config, [layer] * count, on_every_stage=True)), count)


def _latent_attention(config: Config) -> tuple[Unit, ...]:
    """Multi-head latent attention: the down projections whole on every rank, the up projections cut by heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config.get("q_lora_rank"), config["kv_lora_rank"]
    kv_a = ("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight")
    units: list[Unit] = [_norm("input_layernorm", "input_layernorm.weight", hidden)]
    if q_rank:
        units += [
            Stacked(
                ("self_attn.q_a_proj.weight", kv_a[0]),
                ("self_attention.linear_q_down_proj.weight", kv_a[1]),
                "self_attn.fused_qkv_a_proj.weight",
                (q_rank, kv_rank + rope),
                hidden,
                replicated=True,
            ),
            _norm("self_attn.q_a_layernorm", "self_attention.linear_q_up_proj.layer_norm_weight", q_rank),
        ]
        query = ("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", q_rank)
    else:
        units.append(Matrix(*kv_a, kv_a[0], (kv_rank + rope, hidden)))
        query = ("self_attn.q_proj.weight", "self_attention.linear_q_proj.weight", hidden)
    kv_b = "self_attn.kv_b_proj.weight"
    output = "self_attn.o_proj.weight"
    return (
        *units,
        Matrix(query[0], query[1], query[0], (heads * (nope + rope), query[2]), 0),
        _norm("self_attn.kv_a_layernorm", "self_attention.linear_kv_up_proj.layer_norm_weight", kv_rank),
        Matrix(kv_b, "self_attention.linear_kv_up_proj.weight", kv_b, (heads * (nope + value), kv_rank), 0),
        Matrix(output, "self_attention.linear_proj.weight", output, (hidden, heads * value), 1),
    )


def _deepseek_v3(config: Config) -> Architecture:
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    inner = config["moe_intermediate_size"]
    shared = config.get("n_shared_experts") or 0
    if config.get("moe_layer_freq", 1) != 1:
        raise CatalogError("only moe_layer_freq 1 is known to Megatron-Bridge's mappings of DeepSeek-V3")
    attention = _latent_attention(config)
    dense = (*attention, *_dense_mlp(config))
    sparse = (
        *attention,
        _norm("post_attention_layernorm", "pre_mlp_layernorm.weight", hidden),
        _router("mlp.gate.weight", "mlp.router.weight", (experts, hidden)),
        _router(
            "mlp.gate.e_score_correction_bias",
            "mlp.router.expert_bias",
            (experts,),
            torch.float32,
        ),
        GatedExperts("mlp.experts.", "mlp.experts.", "mlp.experts.", experts, inner, hidden),
        *(_mlp(hidden, inner * shared, "mlp.shared_experts.", "mlp.shared_experts.") if shared else ()),
    )
    count, first = config["num_hidden_layers"], config["first_k_dense_replace"]
    layers = [dense] * min(first, count) + [sparse] * max(0, count - first)
    sections = _decoder(config, layers)
    for i in range(config.get("num_nextn_predict_layers") or 0):
        sections += _prediction_layer(sections[0].units, sparse, hidden, count + i, i)
    return Architecture(tuple(sections), count)


def _prediction_layer(
    embedding: tuple[Unit, ...], layer: tuple[Unit, ...], hidden: int, number: int, index: int
) -> list[Section]:
    """A multi-token-prediction layer: on Megatron's last stage, a trailing layer of the checkpoint, not vLLM's."""
    prefix = f"model.layers.{number}."
    around = (
        _norm("enorm", "enorm.weight", hidden),
        _norm("hnorm", "hnorm.weight", hidden),
        Matrix("eh_proj.weight", "eh_proj.weight", "eh_proj.weight", (hidden, 2 * hidden), 0),
        _norm("shared_head.norm", "final_layernorm.weight", hidden),
    )
    own = f"mtp.layers.{index}."
    sections = [
        Section(prefix, own, prefix, around, "last", None),
        Section(prefix, f"{own}mtp_model_layer.", prefix, layer, "last", None),
    ]
    if index == 0:
        # It reads the tokens again, so the last stage has an embedding too.
        sections.append(Section("model.", "", "", embedding, "last", None, second=True))
    return sections


def _gpt_oss(config: Config) -> Architecture:
    hidden, experts = config["hidden_size"], config["num_local_experts"]
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    unknown = "OAIAttention is not among the modules that are known to use their weights as loaded"
    sinks = Matrix(
        "self_attn.sinks",
        "self_attention.core_attention.softmax_offset",
        "attn.sinks",
        (heads,),
        0,
        gen_refused=unknown,
    )
    layer = (
        _norm("input_layernorm", "self_attention.linear_qkv.layer_norm_weight", hidden),
        *_qkv(config, "self_attn.", bias=True, columns=hidden, vllm="attn."),
        Matrix(
            "self_attn.o_proj.weight",
            "self_attention.linear_proj.weight",
            "attn.o_proj.weight",
            (hidden, heads * head_dim),
            1,
        ),
        Matrix("self_attn.o_proj.bias", "self_attention.linear_proj.bias", "attn.o_proj.bias", (hidden,)),
        sinks,
        _norm("post_attention_layernorm", "pre_mlp_layernorm.weight", hidden),
        _router("mlp.router.weight", "mlp.router.weight", (experts, hidden)),
        _router("mlp.router.bias", "mlp.router.bias", (experts,)),
        StackedExperts(
            "mlp.experts.",
            "mlp.experts.",
            "mlp.experts.",
            experts,
            config["intermediate_size"],
            hidden,
        ),
    )
    count = config["num_hidden_layers"]
    sections = _decoder(config, [layer] * count, vllm_embedding="embedding", on_every_stage=True)
    return Architecture(tuple(sections), count)


def _nemotron_h(config: Config) -> Architecture:
    hidden = config["hidden_size"]
    kinds = {
        "M": (_mamba_mixer(config)),
        "*": (
            _norm("norm", "self_attention.linear_qkv.layer_norm_weight", hidden),
            *_qkv(
                config,
                "mixer.",
                bias=bool(config.get("attention_bias")),
                columns=hidden,
                vllm="mixer.",
            ),
            Matrix(
                "mixer.o_proj.weight",
                "self_attention.linear_proj.weight",
                "mixer.o_proj.weight",
                (hidden, config["num_attention_heads"] * _head_dim(config)),
                1,
            ),
        ),
        "-": (
            _norm("norm", "mlp.linear_fc1.layer_norm_weight", hidden),
            Matrix(
                "mixer.up_proj.weight",
                "mlp.linear_fc1.weight",
                "mixer.up_proj.weight",
                (config["intermediate_size"], hidden),
                0,
            ),
            Matrix(
                "mixer.down_proj.weight",
                "mlp.linear_fc2.weight",
                "mixer.down_proj.weight",
                (hidden, config["intermediate_size"]),
                1,
            ),
        ),
    }
    pattern = config["hybrid_override_pattern"]
    odd = sorted(set(pattern) - set(kinds))
    if odd or config.get("mlp_bias") or config.get("use_bias") or config.get("num_nextn_predict_layers"):
        raise CatalogError(
            f"a NemotronH model with layers {odd}, biases of linear layers or prediction layers is not in the catalogue"
        )
    layers: list[tuple[Unit, ...]] = [kinds[letter] for letter in pattern]
    sections = _decoder(
        config,
        layers,
        hf="backbone.",
        embedding="embeddings",
        norm="norm_f",
        megatron_norm="decoder.final_norm.weight",
        on_every_stage=True,
    )
    return Architecture(tuple(sections), len(pattern))


def _head_dim(config: Config) -> int:
    found = config.get("head_dim") or config.get("attention_head_dim")
    return int(found or config["hidden_size"] // config["num_attention_heads"])


def _mamba_mixer(config: Config) -> tuple[Unit, ...]:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    groups = config["n_groups"]
    state = groups * config["ssm_state_size"]
    mixer = "MambaMixer2 is not among the modules that are known to use their weights as loaded"
    norm = "Mixer2RMSNormGated is not among the modules that are known to use their weights as loaded"
    in_proj = "mapping MambaInProjMapping has no shard rule"
    conv = "mapping MambaConv1dMapping has no shard rule"

    def by_heads(name: str, length: int, refused: str) -> Matrix:
        return Matrix(f"mixer.{name}", f"mixer.{name}", f"mixer.{name}", (length,), 0, gen_refused=refused)

    units: list[Unit] = [
        _norm("norm", "mixer.in_proj.layer_norm_weight", hidden),
        Blocks(
            "mixer.in_proj.weight",
            "mixer.in_proj.weight",
            "mixer.in_proj.weight",
            (inner, inner, state, state, heads),
            (hidden,),
            groups,
            in_proj,
        ),
        Blocks(
            "mixer.conv1d.weight",
            "mixer.conv1d_weight",
            "mixer.conv1d.weight",
            (inner, state, state),
            (1, config["conv_kernel"]),
            groups,
            conv,
        ),
    ]
    if config.get("use_conv_bias", True):
        units.append(
            Blocks(
                "mixer.conv1d.bias",
                "mixer.conv1d_bias",
                "mixer.conv1d.bias",
                (inner, state, state),
                (),
                groups,
                conv,
            )
        )
    return (
        *units,
        Matrix(
            "mixer.A_log", "mixer.A_log", "mixer.A", (heads,), 0, gen_dtype=torch.float32, gen_refused=mixer
        ),
        by_heads("D", heads, mixer),
        by_heads("dt_bias", heads, mixer),
        by_heads("norm.weight", inner, norm),
        Matrix(
            "mixer.out_proj.weight",
            "mixer.out_proj.weight",
            "mixer.out_proj.weight",
            (hidden, inner),
            1,
        ),
    )


_FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "nemotron_h": _nemotron_h,
}
FAMILIES = tuple(sorted(_FAMILIES))
