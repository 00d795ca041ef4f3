"""Qwen3-Next and Qwen3.5: layers of gated delta nets, every few of them attention with output gates, dense or with experts."""

from __future__ import annotations

from .delta_net_units import gated_delta_net
from .expert_units import Experts, JoinedExperts
from .image_encoders import qwen3_encoder
from .sections import (
    Architecture,
    CatalogError,
    Config,
    Section,
    attention,
    decoder,
    dense_mlp,
    gated_mlp,
    language_model,
    norm,
    router,
)
from .units import Matrix, Unit


def qwen3_next(config: Config) -> Architecture:
    """Its checkpoint has the projections of a gated delta net by key heads, and experts with matrices of their own."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise CatalogError(
            "a Qwen3-Next model with dense layers among the others (mlp_only_layers, decoder_sparse_step) is not known to "
            "Megatron-Bridge's mappings"
        )
    if config.get("num_nextn_predict_layers"):
        raise CatalogError("a Qwen3-Next model that trains its prediction layers is not in the catalogue")
    layers = _layers(config, _with_experts(config, joined=False), by_head=True)
    return Architecture(tuple(decoder(config, layers, on_every_stage=True)), len(layers))


def qwen3_5(config: Config) -> Architecture:
    """A language model alone, or with its image encoder; dense, or with experts that the checkpoint has in one tensor."""
    whole = "vision_config" in config
    text = language_model(config)
    hidden = text["hidden_size"]
    sparse = "num_experts" in text
    mlp = _with_experts(text, joined=True) if sparse else dense_mlp(text)
    layers = _layers(text, mlp, by_head=False)
    hf, inside = ("model.language_model.", "language_model.") if whole else ("model.", "")
    sections = decoder(text, layers, hf=hf, inside=inside, on_every_stage=sparse)
    predicting = text.get("mtp_num_hidden_layers") or 0
    if predicting > 1:
        raise CatalogError(f"a Qwen3.5 model that predicts {predicting} tokens more is not in the catalogue")
    if predicting:
        own = (*_gated_attention(text), *(_with_experts(text, joined=False) if sparse else dense_mlp(text)))
        sections += _prediction_layer(sections[0], own, hidden, inside)
    if whole:
        sections += qwen3_encoder(config["vision_config"])
    return Architecture(tuple(sections), len(layers))


def _layers(config: Config, mlp: tuple[Unit, ...], *, by_head: bool) -> list[tuple[Unit, ...]]:
    if config.get("attention_bias"):
        raise CatalogError("biases of attention (attention_bias) are not in the catalogue")
    kinds = {
        "linear_attention": (*gated_delta_net(config, by_head=by_head), *mlp),
        "full_attention": (*_gated_attention(config), *mlp),
    }
    every = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [
        "linear_attention" if i % every else "full_attention"
        for i in range(1, config["num_hidden_layers"] + 1)
    ]
    return [kinds[kind] for kind in types]


def _gated_attention(config: Config) -> tuple[Unit, ...]:
    return attention(config, head_norms=True, gated=True)


def _with_experts(config: Config, *, joined: bool) -> tuple[Unit, ...]:
    """Experts and one that is shared, which has a gate of its own."""
    hidden, experts, inner = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    prefix, gate = "mlp.experts.", "mlp.shared_expert_gate.weight"
    return (
        norm("post_attention_layernorm", "pre_mlp_layernorm.weight", hidden),
        router("mlp.gate.weight", "mlp.router.weight", (experts, hidden)),
        JoinedExperts(prefix, prefix, prefix, experts, inner, hidden)
        if joined
        else Experts(prefix, prefix, prefix, experts, inner, hidden),
        *gated_mlp(
            hidden, config["shared_expert_intermediate_size"], "mlp.shared_expert.", "mlp.shared_experts."
        ),
        Matrix(gate, "mlp.shared_experts.gate_weight", gate, (1, hidden)),
    )


def _prediction_layer(embedding: Section, layer: tuple[Unit, ...], hidden: int, inside: str) -> list[Section]:
    """A layer of attention that predicts one token more: on Megatron's last stage, which reads the tokens again; not vLLM's."""
    around = (
        norm("pre_fc_norm_embedding", "enorm.weight", hidden),
        norm("pre_fc_norm_hidden", "hnorm.weight", hidden),
        Matrix("fc.weight", "eh_proj.weight", "fc.weight", (hidden, 2 * hidden), 0),
        norm("norm", "final_layernorm.weight", hidden),
    )
    own = f"{inside}mtp.layers.0."
    return [
        Section("mtp.", own, "mtp.", around, "last", None),
        Section("mtp.layers.0.", f"{own}mtp_model_layer.", "mtp.layers.0.", layer, "last", None),
        Section(embedding.hf, inside, "", embedding.units, "last", None, second=True),
    ]
