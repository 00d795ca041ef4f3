"""Families of models: from a Hugging Face configuration to sections of units.

Names are those of the published checkpoints and of Megatron-Bridge 0.6's mappings, which the tests compare with
transformers' own models and with Bridge's export.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attention_units import NormOverHeads, QueryKeyValue
from .expert_units import Experts, JoinedExperts, StackedExperts
from .gemma4 import gemma4_text
from .image_encoders import gemma3_encoder, kimi_encoder, qwen2_5_encoder, qwen3_encoder
from .nemotron_h import nemotron_h
from .qwen3_next import qwen3_5, qwen3_next
from .sections import (
    Architecture,
    CatalogError,
    Config,
    Section,
    attention,
    decoder,
    dense_mlp,
    fused_qkv,
    gated_mlp,
    language_model,
    norm,
    router,
)
from .units import Matrix, Stacked, Unit

# How the keys of sizes begin, which layouts are computed with.
_SIZES = ("num_", "hidden_size", "intermediate_size", "vocab_size", "head_dim")


def architecture_of(config: Config) -> Architecture:
    """The sections of the model that ``config`` describes.

    Raises:
        CatalogError: an unknown ``model_type``, or a key that is missing, no number or not supported.
    """
    kind = config.get("model_type")
    build = _FAMILIES.get(str(kind))
    if build is None:
        raise CatalogError(
            f"no layout is known for model_type {kind!r}; known are {', '.join(sorted(_FAMILIES))}. "
            "A model of another family can be refitted, but not planned without its weights."
        )
    for key, value in {**config, **language_model(config)}.items():
        if key.startswith(_SIZES) and isinstance(value, str | float):
            raise CatalogError(
                f"{key} of this {kind} model's configuration is {value!r}, and no whole number"
            )
    try:
        return build(config)
    except KeyError as missing:
        raise CatalogError(f"the configuration of this {kind} model lacks the key {missing}") from None


def _llama(config: Config, *, qkv_bias: bool = False, head_norms: bool = False, **names: Any) -> Architecture:
    """``names``: of :func:`decoder`, where they are not Llama's."""
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise CatalogError("biases of linear layers (attention_bias, mlp_bias) are not in the catalogue")
    layer = (
        *attention(config, qkv_bias=qkv_bias, head_norms=head_norms),
        *dense_mlp(config),
    )
    count = config["num_hidden_layers"]
    return Architecture(tuple(decoder(config, [layer] * count, **names)), count)


def _qwen2(config: Config) -> Architecture:
    return _llama(config, qkv_bias=True)


def _qwen3(config: Config) -> Architecture:
    return _llama(config, head_norms=True)


def _qwen3_moe(config: Config) -> Architecture:
    # Published under the first name; transformers 5 saves it under the second.
    experts = config["num_experts" if "num_experts" in config else "num_local_experts"]
    prefix = "mlp.experts."
    routed = Experts(prefix, prefix, prefix, experts, config["moe_intermediate_size"], config["hidden_size"])
    return _qwen3_sparse(config, routed)


def _qwen3_sparse(config: Config, routed: Experts | JoinedExperts, **names: str) -> Architecture:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise CatalogError(
            "a Qwen3-MoE model with dense layers among the others (mlp_only_layers, decoder_sparse_step) is not known "
            "to Megatron-Bridge's mappings"
        )
    hidden = config["hidden_size"]
    layer = (
        *attention(config, head_norms=True),
        norm("post_attention_layernorm", "pre_mlp_layernorm.weight", hidden),
        router("mlp.gate.weight", "mlp.router.weight", (routed.count, hidden)),
        routed,
    )
    count = config["num_hidden_layers"]
    return Architecture(tuple(decoder(config, [layer] * count, on_every_stage=True, **names)), count)


# Names of language models inside of larger ones.
_INSIDE = {"hf": "model.language_model.", "inside": "language_model."}


def _qwen3_vl(config: Config) -> Architecture:
    return _with_encoder(
        _llama(language_model(config), head_norms=True, **_INSIDE), qwen3_encoder(config["vision_config"])
    )


def _qwen3_vl_moe(config: Config) -> Architecture:
    text = language_model(config)
    prefix = "mlp.experts."
    sizes = text["num_experts"], text["moe_intermediate_size"], text["hidden_size"]
    routed = JoinedExperts(prefix, prefix, prefix, *sizes, turned=True)
    return _with_encoder(_qwen3_sparse(text, routed, **_INSIDE), qwen3_encoder(config["vision_config"]))


def _qwen2_5_vl(config: Config) -> Architecture:
    text = _llama(language_model(config), qkv_bias=True, hf="model.", inside=_INSIDE["inside"])
    return _with_encoder(text, qwen2_5_encoder(config["vision_config"]))


def _gemma3_vl(config: Config) -> Architecture:
    text = language_model(config)
    own = _gemma(text, head_norms=True, hf="language_model.model.", inside=_INSIDE["inside"])
    return _with_encoder(own, gemma3_encoder(config["vision_config"], text["hidden_size"]))


def _with_encoder(text: Architecture, encoder: list[Section]) -> Architecture:
    return Architecture((*text.sections, *encoder), text.layers)


def _minimax_m2(config: Config) -> Architecture:
    if not config.get("use_qk_norm") or config.get("qk_norm_type", "per_layer") != "per_layer":
        raise CatalogError(
            "a MiniMax-M2 model without a norm over all heads of a layer is not in the catalogue"
        )
    hidden, experts = config["hidden_size"], config["num_local_experts"]
    heads, groups, head_dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    own, moe = "self_attention.", "block_sparse_moe."
    layer = (
        *attention(config),
        *(
            NormOverHeads(f"self_attn.{x}_norm.weight", f"{own}{x}_layernorm.weight", count, head_dim)
            for x, count in (("q", heads), ("k", groups))
        ),
        norm("post_attention_layernorm", "pre_mlp_layernorm.weight", hidden),
        router(f"{moe}gate.weight", "mlp.router.weight", (experts, hidden), gen_fp32=True),
        router(f"{moe}e_score_correction_bias", "mlp.router.expert_bias", (experts,), torch.float32),
        Experts(
            f"{moe}experts.",
            "mlp.experts.",
            f"{moe}experts.",
            experts,
            config["intermediate_size"],
            hidden,
            wide=("w1", "w3"),
            narrow="w2",
        ),
    )
    count = config["num_hidden_layers"]
    return Architecture(tuple(decoder(config, [layer] * count)), count)


def _gemma(config: Config, *, head_norms: bool = False, **names: str) -> Architecture:
    """Norms before and behind attention and MLP; those behind stand in Megatron's projections before them."""
    if config.get("attention_bias"):
        raise CatalogError("biases of attention (attention_bias) are not in the catalogue")
    hidden = config["hidden_size"]
    layer = (
        *attention(config, head_norms=head_norms),
        norm("post_attention_layernorm", "self_attention.linear_proj.post_layernorm.weight", hidden),
        norm("pre_feedforward_layernorm", "mlp.linear_fc1.layer_norm_weight", hidden),
        *gated_mlp(hidden, config["intermediate_size"]),
        norm("post_feedforward_layernorm", "mlp.linear_fc2.post_layernorm.weight", hidden),
    )
    count = config["num_hidden_layers"]
    tied = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
    return Architecture(tuple(decoder({**config, **tied}, [layer] * count, **names)), count)


def _gemma3(config: Config) -> Architecture:
    return _gemma(config, head_norms=True)


def _latent_attention(config: Config, *, fused_norms: bool = True) -> tuple[Unit, ...]:
    """Multi-head latent attention: the down projections whole on every rank, the up projections cut by heads.

    ``fused_norms``: Megatron has the norms of latent vectors in its up projections.
    """
    if config.get("attention_bias"):
        raise CatalogError("biases of latent attention (attention_bias) are not in the catalogue")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config.get("q_lora_rank"), config["kv_lora_rank"]
    kv_a = ("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight")
    norms = {
        x: f"linear_{x}_up_proj.layer_norm_weight" if fused_norms else f"{x}_layernorm.weight"
        for x in ("q", "kv")
    }
    units: list[Unit] = [norm("input_layernorm", "input_layernorm.weight", hidden)]
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
            norm("self_attn.q_a_layernorm", f"self_attention.{norms['q']}", q_rank),
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
        norm("self_attn.kv_a_layernorm", f"self_attention.{norms['kv']}", kv_rank),
        Matrix(kv_b, "self_attention.linear_kv_up_proj.weight", kv_b, (heads * (nope + value), kv_rank), 0),
        Matrix(output, "self_attention.linear_proj.weight", output, (hidden, heads * value), 1),
    )


def _deepseek_v3(config: Config, **names: str) -> Architecture:
    """``names``: of :func:`decoder`, where the model is a part of a larger one."""
    if config.get("moe_layer_freq", 1) != 1:
        raise CatalogError("only moe_layer_freq 1 is known to Megatron-Bridge's mappings of DeepSeek-V3")
    return _experts_after_dense_layers(config, _latent_attention(config), **names)


def _kimi_k25(config: Config) -> Architecture:
    """Kimi-K2 beside an image encoder."""
    text = language_model(config)
    if text.get("num_nextn_predict_layers"):
        raise CatalogError("a Kimi-K2.5 model with prediction layers is not in the catalogue")
    inside = "language_model."
    own = _deepseek_v3(text, hf=f"{inside}model.", head=inside, inside=inside)
    return _with_encoder(own, kimi_encoder(config["vision_config"], text["hidden_size"]))


def _glm4_moe(config: Config) -> Architecture:
    if config.get("n_shared_experts") != 1:
        raise CatalogError("only n_shared_experts 1 is known to Megatron-Bridge's mappings of GLM-4.5")
    bias, norms = bool(config.get("attention_bias")), bool(config.get("use_qk_norm"))
    own = attention(config, qkv_bias=bias, head_norms=norms)
    return _experts_after_dense_layers(config, own, gen_fp32=True)


def _glm4_moe_lite(config: Config) -> Architecture:
    if config.get("n_shared_experts") != 1:
        raise CatalogError("only n_shared_experts 1 is known to Megatron-Bridge's mappings of GLM-4.7-Flash")
    return _experts_after_dense_layers(
        config, _latent_attention(config), gen_fp32=True, copies=bool(config.get("num_nextn_predict_layers"))
    )


def _glm_moe_dsa(config: Config) -> Architecture:
    """Latent attention to the tokens that an indexer chooses. Bridge leaves the prediction layer out."""
    if set(config.get("indexer_types") or ()) - {"full"}:
        raise CatalogError("layers that share their indexer (indexer_types) are not in the catalogue")
    hidden, size, heads = config["hidden_size"], config["index_head_dim"], config["index_n_heads"]
    own, megatron = "self_attn.indexer.", "self_attention.core_attention.indexer."
    query = f"{own}wq_b.weight"
    indexer = (
        Matrix(query, f"{megatron}linear_wq_b.weight", query, (heads * size, config["q_lora_rank"])),
        Stacked(
            (f"{own}wk.weight", f"{own}weights_proj.weight"),
            (f"{megatron}linear_wk.weight", f"{megatron}linear_weights_proj.weight"),
            f"{own}wk_weights_proj.weight",
            (size, heads),
            hidden,
            replicated=True,
        ),
        *(
            Matrix(
                f"{own}k_norm.{kind}",
                f"{megatron}k_norm.{kind}",
                f"{own}k_norm.{kind}",
                (size,),
                gen_dtype=torch.float32,
                gen_refused="vLLM keeps it in FP32",
            )
            for kind in ("weight", "bias")
        ),
    )
    attention = (*_latent_attention(config, fused_norms=False), *indexer)
    return _experts_after_dense_layers({**config, "num_nextn_predict_layers": 0}, attention)


def _ling(config: Config) -> Architecture:
    """Ling 2.0: queries, keys and values in one tensor of the checkpoint."""
    if config["model_type"] == "bailing_moe" and "BailingMoeV2ForCausalLM" not in config["architectures"]:
        raise CatalogError("of Ling models (bailing_moe), only BailingMoeV2ForCausalLM is in the catalogue")
    if not config.get("use_qk_norm") or config.get("use_qkv_bias") or config.get("use_bias"):
        raise CatalogError(
            "a Ling model without norms of heads (use_qk_norm), or with biases (use_qkv_bias, use_bias), is not in the "
            "catalogue"
        )
    if config.get("num_nextn_predict_layers"):
        raise CatalogError("a Ling model with prediction layers is not in the catalogue")
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    own, dense = "attention.", "attention.dense.weight"
    attention = (
        norm("input_layernorm", "self_attention.linear_qkv.layer_norm_weight", hidden),
        QueryKeyValue(
            own,
            "weight",
            "self_attention.linear_qkv.weight",
            f"{own}query_key_value.weight",
            heads,
            config["num_key_value_heads"],
            head_dim,
            hidden,
            joined="query_key_value",
        ),
        Matrix(dense, "self_attention.linear_proj.weight", dense, (hidden, heads * head_dim), 1),
        *(
            norm(f"{own}{name}_layernorm", f"self_attention.{name[0]}_layernorm.weight", head_dim)
            for name in ("query", "key")
        ),
    )
    # The same under DeepSeek's names of keys.
    keys = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    return _experts_after_dense_layers(
        {**config, **keys}, attention, bias="expert_bias", embedding="word_embeddings"
    )


def _experts_after_dense_layers(
    config: Config,
    attention: tuple[Unit, ...],
    *,
    gen_fp32: bool = False,
    bias: str = "e_score_correction_bias",
    embedding: str = "embed_tokens",
    copies: bool = False,
    **names: str,
) -> Architecture:
    """Dense layers first, then such with a shared expert beside the others, then those of multi-token prediction.

    ``gen_fp32``: vLLM has routers in FP32. ``bias``: of routers, in the checkpoint. ``copies``: the prediction layer has the
    embedding and the head once more. ``names``: of :func:`decoder`.
    """
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    inner = config["moe_intermediate_size"]
    shared = config.get("n_shared_experts") or 0
    dense = (*attention, *dense_mlp(config))
    sparse = (
        *attention,
        norm("post_attention_layernorm", "pre_mlp_layernorm.weight", hidden),
        router("mlp.gate.weight", "mlp.router.weight", (experts, hidden), gen_fp32=gen_fp32),
        router(f"mlp.gate.{bias}", "mlp.router.expert_bias", (experts,), torch.float32),
        Experts("mlp.experts.", "mlp.experts.", "mlp.experts.", experts, inner, hidden),
        *(gated_mlp(hidden, inner * shared, "mlp.shared_experts.", "mlp.shared_experts.") if shared else ()),
    )
    count, first = config["num_hidden_layers"], config["first_k_dense_replace"]
    layers = [dense] * min(first, count) + [sparse] * max(0, count - first)
    sections = decoder(
        config,
        layers,
        embedding=embedding,
        vllm_embedding=embedding,
        copied_to=count if copies else None,
        **names,
    )
    for i in range(config.get("num_nextn_predict_layers") or 0):
        sections += _prediction_layer(sections[0].units, sparse, hidden, count + i, i)
    return Architecture(tuple(sections), count)


def _prediction_layer(
    embedding: tuple[Unit, ...], layer: tuple[Unit, ...], hidden: int, number: int, index: int
) -> list[Section]:
    """A multi-token-prediction layer: on Megatron's last stage, a trailing layer of the checkpoint, not vLLM's."""
    prefix = f"model.layers.{number}."
    around = (
        norm("enorm", "enorm.weight", hidden),
        norm("hnorm", "hnorm.weight", hidden),
        Matrix("eh_proj.weight", "eh_proj.weight", "eh_proj.weight", (hidden, 2 * hidden), 0),
        norm("shared_head.norm", "final_layernorm.weight", hidden),
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
    if not config.get("attention_bias", True):
        raise CatalogError("GPT-OSS without biases of its attention is not in the catalogue")
    sinks = Matrix(
        "self_attn.sinks",
        "self_attention.core_attention.softmax_offset",
        "attn.sinks",
        (heads,),
        0,
    )
    layer = (
        norm("input_layernorm", "self_attention.linear_qkv.layer_norm_weight", hidden),
        *fused_qkv(config, "self_attn.", bias=True, columns=hidden, vllm="attn."),
        Matrix(
            "self_attn.o_proj.weight",
            "self_attention.linear_proj.weight",
            "attn.o_proj.weight",
            (hidden, heads * head_dim),
            1,
        ),
        Matrix("self_attn.o_proj.bias", "self_attention.linear_proj.bias", "attn.o_proj.bias", (hidden,)),
        sinks,
        norm("post_attention_layernorm", "pre_mlp_layernorm.weight", hidden),
        router("mlp.router.weight", "mlp.router.weight", (experts, hidden)),
        router("mlp.router.bias", "mlp.router.bias", (experts,)),
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
    sections = decoder(config, [layer] * count, vllm_embedding="embedding", on_every_stage=True)
    return Architecture(tuple(sections), count)


_FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "llama": _llama,
    "mistral": _llama,
    "gemma2": _gemma,
    "gemma3_text": _gemma3,
    "gemma4_text": gemma4_text,
    "minimax_m2": _minimax_m2,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3_vl,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "kimi_k25": _kimi_k25,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "glm_moe_dsa": _glm_moe_dsa,
    # Published under the first name; the class of its configuration, as Megatron-Bridge has it, has the second.
    "bailing_moe": _ling,
    "bailing_moe_v2": _ling,
    "gpt_oss": _gpt_oss,
    "nemotron_h": nemotron_h,
}
FAMILIES = tuple(sorted(_FAMILIES))
