"""Gemma 4's language models: dense ones, such with embeddings of each layer and shared keys, and such with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .attention_units import QueryKeyValue
from .expert_units import JoinedExperts
from .sections import Architecture, CatalogError, Config, Section, decoder, gated_mlp, norm, router
from .units import Matrix, Stacked, Unit, Vocabulary

_BUFFER = "buffer: exported as Bridge converts it"
_FULL = "full_attention"


def gemma4_text(config: Config) -> Architecture:
    """A language model alone. Bridge builds those without experts in layers of its own, on one pipeline stage."""
    if config.get("attention_bias"):
        raise CatalogError("biases of attention (attention_bias) are not in the catalogue")
    if not config.get("tie_word_embeddings", True):
        raise CatalogError("a Gemma 4 model with a head of its own is not in the catalogue")
    sparse = bool(config.get("enable_moe_block"))
    # What transformers has another default of than none must be told.
    layer_dim = config["hidden_size_per_layer_input"] or 0
    shared = config.get("num_kv_shared_layers") or 0
    if sparse and (layer_dim or shared):
        raise CatalogError(
            "a Gemma 4 model with experts, and with embeddings of each layer (hidden_size_per_layer_input) or shared keys "
            "(num_kv_shared_layers), is not known to Megatron-Bridge's mappings"
        )
    if shared and config.get("attention_k_eq_v"):
        raise CatalogError(
            "a Gemma 4 model that takes keys as values (attention_k_eq_v), and in its last layers those of others (num_kv_shared_layers), is not "
            "in the catalogue"
        )
    kinds = _layer_types(config)
    first = len(kinds) - shared
    if not {*kinds[first:]} <= {*kinds[:first]}:
        raise CatalogError(
            f"the last {shared} layers of this Gemma 4 model (num_kv_shared_layers) take keys and values of layers before them, of which "
            "none attends as they do (layer_types)"
        )
    # Layers of one kind are one object.
    made: dict[tuple[str, bool], tuple[Unit, ...]] = {}
    layers = []
    for i, kind in enumerate(kinds):
        wide = bool(config.get("use_double_wide_mlp")) and i >= first
        if (kind, wide) not in made:
            made[kind, wide] = tuple(
                _sparse_layer(config, kind) if sparse else _dense_layer(config, kind, layer_dim, wide)
            )
        layers.append(made[kind, wide])
    tied = {"tie_word_embeddings": True}
    sections = decoder({**config, **tied}, layers, on_every_stage=True, padding="ranks" if sparse else "all")
    if layer_dim:
        sections.append(
            Section("model.", "", "model.", _layer_embeddings(config, layer_dim), "first", "every")
        )
    # Each takes those of the last layer of its kind that has its own.
    sharing = tuple((i, first - 1 - kinds[:first][::-1].index(kinds[i])) for i in range(first, len(kinds)))
    return Architecture(tuple(sections), len(layers), pipelined=sparse, sharing=sharing)


def _layer_types(config: Config) -> list[str]:
    """As transformers has it: each sixth layer attends to all where nothing else is said, and the last one always."""
    count = config["num_hidden_layers"]
    told = config.get("layer_types") or ["sliding_attention" if (i + 1) % 6 else _FULL for i in range(count)]
    return [*told[: count - 1], _FULL]


def _attention(config: Config, kind: str, first_norm: str) -> Iterator[Unit]:
    """Grouped queries, with heads of another size in layers that attend to all; these may take keys as values."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    groups, head_dim, keys_as_values = config["num_key_value_heads"], config["head_dim"], False
    if kind == _FULL:
        head_dim = config["global_head_dim"]
        keys_as_values = bool(config.get("attention_k_eq_v"))
        own = config.get("num_global_key_value_heads") or groups
        if own != groups and not keys_as_values:
            raise CatalogError(
                "a Gemma 4 model with another number of keys in layers that attend to all (num_global_key_value_heads), and with "
                "values of their own (attention_k_eq_v), is no model of transformers' or vLLM's"
            )
        groups = own
    output = "self_attn.o_proj.weight"
    yield norm("input_layernorm", first_norm, hidden)
    yield QueryKeyValue(
        "self_attn.",
        "weight",
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        heads,
        groups,
        head_dim,
        hidden,
        keys_as_values=keys_as_values,
    )
    yield Matrix(output, "self_attention.linear_proj.weight", output, (hidden, heads * head_dim), 1)
    for x in "qk":
        yield norm(f"self_attn.{x}_norm", f"self_attention.{x}_layernorm.weight", head_dim)
    yield Matrix(
        "layer_scalar",
        "layer_scalar",
        "layer_scalar",
        (1,),
        train_refused=_BUFFER,
        gen_refused="a buffer of vLLM's",
    )


def _dense_layer(config: Config, kind: str, layer_dim: int, wide: bool) -> Iterator[Unit]:
    """``layer_dim``: width of its embedding; 0 for none. ``wide``: its MLP has twice the width."""
    hidden = config["hidden_size"]
    yield from _attention(config, kind, "input_layernorm.weight")
    yield norm("post_attention_layernorm", "post_self_attn_layernorm.weight", hidden)
    yield norm("pre_feedforward_layernorm", "pre_mlp_layernorm.weight", hidden)
    yield from gated_mlp(hidden, config["intermediate_size"] * (1 + wide))
    yield norm("post_feedforward_layernorm", "post_mlp_layernorm.weight", hidden)
    if layer_dim:
        for name, shape in (
            ("per_layer_input_gate.weight", (layer_dim, hidden)),
            ("per_layer_projection.weight", (hidden, layer_dim)),
        ):
            yield Matrix(name, name, name, shape)
        yield norm("post_per_layer_input_norm", "post_per_layer_input_norm.weight", hidden)


def _sparse_layer(config: Config, kind: str) -> Iterator[Unit]:
    """Experts beside an MLP, which Megatron has as a shared expert."""
    hidden, experts = config["hidden_size"], config["num_experts"]
    yield from _attention(config, kind, "self_attention.linear_qkv.layer_norm_weight")
    for hf, megatron in (
        ("post_attention_layernorm", "self_attention.linear_proj.post_layernorm.weight"),
        ("pre_feedforward_layernorm", "pre_shared_expert_layernorm.weight"),
        ("post_feedforward_layernorm_1", "mlp.post_shared_expert_layernorm.weight"),
        ("pre_feedforward_layernorm_2", "pre_mlp_layernorm.weight"),
        ("post_feedforward_layernorm_2", "mlp.post_moe_layernorm.weight"),
        ("post_feedforward_layernorm", "post_ffn_layernorm.weight"),
    ):
        yield norm(hf, megatron, hidden)
    yield from gated_mlp(hidden, config["intermediate_size"], "mlp.", "mlp.shared_experts.")
    yield router("router.proj.weight", "mlp.router.weight", (experts, hidden))
    yield router("router.scale", "mlp.router.scale", (hidden,))
    scale = router("router.per_expert_scale", "mlp.router.per_expert_scale", (experts,))
    yield replace(scale, vllm="moe.per_expert_scale")
    yield JoinedExperts(
        "experts.", "mlp.experts.", "moe.experts.", experts, config["moe_intermediate_size"], hidden
    )


def _layer_embeddings(config: Config, layer_dim: int) -> tuple[Unit, ...]:
    """The embeddings of all layers in one table, and what the word's own embedding adds to them."""
    hidden, width = config["hidden_size"], layer_dim * config["num_hidden_layers"]
    rows = config["vocab_size_per_layer_input"]
    table = "embed_tokens_per_layer.weight"
    return (
        Vocabulary(table, "per_layer_embedding.weight", table, rows, width, padding="none"),
        Stacked(
            ("per_layer_model_projection.weight",),
            ("per_layer_model_proj.weight",),
            "per_layer_model_projection.weight",
            (width,),
            hidden,
        ),
        norm("per_layer_projection_norm", "per_layer_proj_norm.weight", layer_dim),
    )
