"""Sections of a model, and units that several families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .attention_units import QueryKeyValue
from .units import ROUTER, Matrix, Padding, Stacked, Unit, Vocabulary

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
        pipelined: whether Megatron-Bridge builds it on several pipeline stages.
        sharing: layers that take keys and values of another one, and that one; vLLM has both on one stage.
    """

    sections: tuple[Section, ...]
    layers: int
    pipelined: bool = True
    sharing: tuple[tuple[int, int], ...] = ()


def norm(hf: str, megatron: str, size: int) -> Matrix:
    """A norm's scale, whole on every rank."""
    return Matrix(f"{hf}.weight", megatron, f"{hf}.weight", (size,))


def fused_qkv(
    config: Config,
    prefix: str,
    *,
    bias: bool,
    columns: int,
    vllm: str = "self_attn.",
    gated: bool = False,
) -> tuple[Unit, ...]:
    """Query, key and value projections of one layer: weights, and biases if it has them; ``gated``: with output gates."""
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
            gated,
        )
        for kind in (("weight", "bias") if bias else ("weight",))
    )


def attention(
    config: Config, *, qkv_bias: bool = False, head_norms: bool = False, gated: bool = False
) -> tuple[Unit, ...]:
    """Grouped-query attention, with the layer's first norm fused into Megatron's projection."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    units: list[Unit] = [
        norm("input_layernorm", "self_attention.linear_qkv.layer_norm_weight", hidden),
        *fused_qkv(config, "self_attn.", bias=qkv_bias, columns=hidden, gated=gated),
        Matrix(
            "self_attn.o_proj.weight",
            "self_attention.linear_proj.weight",
            "self_attn.o_proj.weight",
            (hidden, heads * head_dim),
            1,
        ),
    ]
    if head_norms:
        units += [norm(f"self_attn.{x}_norm", f"self_attention.{x}_layernorm.weight", head_dim) for x in "qk"]
    return tuple(units)


def gated_mlp(hidden: int, inner: int, hf: str = "mlp.", megatron: str = "mlp.") -> tuple[Unit, ...]:
    """Gate, up and down matrices; ``hf`` is the prefix of the names on vLLM's side, too."""
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


def dense_mlp(config: Config) -> tuple[Unit, ...]:
    """A dense layer's MLP, with the norm before it fused into Megatron's first projection."""
    hidden = config["hidden_size"]
    return (
        norm("post_attention_layernorm", "mlp.linear_fc1.layer_norm_weight", hidden),
        *gated_mlp(hidden, config["intermediate_size"]),
    )


def router(
    hf: str,
    megatron: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    gen_fp32: bool = False,
) -> Matrix:
    """A part of an MoE router, which the trainer's side does not place; ``gen_fp32``: vLLM casts it to FP32."""
    if not gen_fp32:
        return Matrix(hf, megatron, hf, shape, dtype=dtype, train_refused=ROUTER)
    refused = "vLLM's router is in FP32"
    return Matrix(
        hf, megatron, hf, shape, None, dtype, torch.float32, train_refused=ROUTER, gen_refused=refused
    )


def language_model(config: Config) -> dict[str, Any]:
    """What a configuration says of its language model: beside an image encoder's keys it may stand in a part of its own.

    Whether embeddings are tied, the whole says there.
    """
    own = config.get("text_config")
    if own is None:
        return dict(config)
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**own, **tied}


def decoder(
    config: Config,
    layers: list[tuple[Unit, ...]],
    *,
    hf: str = "model.",
    head: str = "",
    inside: str = "",
    embedding: str = "embed_tokens",
    last_norm: str = "norm",
    megatron_norm: str = "decoder.final_layernorm.weight",
    vllm_embedding: str = "embed_tokens",
    on_every_stage: bool = False,
    copied_to: int | None = None,
    padding: Padding = "ranks",
) -> list[Section]:
    """The sections around the layers, and the layers.

    ``head``: what stands before the name of the head in the checkpoint.
    ``inside``: what stands before Megatron's and vLLM's names, where the language model is a part of a larger one.
    ``on_every_stage``: vLLM's model holds embedding, last norm and head on all pipeline stages, used or not.
    ``copied_to``: number of the prediction layer beside which Bridge exports the embedding and the head once more.
    ``padding``: of the vocabulary in Megatron, as of :class:`Vocabulary`.
    """
    first: Stage = "every" if on_every_stage else "first"
    final: Stage = "every" if on_every_stage else "last"
    rows, hidden = config["vocab_size"], config["hidden_size"]
    tied = bool(config.get("tie_word_embeddings", False))
    words, output = "embedding.word_embeddings.weight", "output_layer.weight"
    embed = Vocabulary(
        f"{embedding}.weight", words, f"{vllm_embedding}.weight", rows, hidden, padding=padding
    )
    last = Vocabulary("lm_head.weight", output, "lm_head.weight", rows, hidden)
    if copied_to is not None:
        told = "made of {} by Bridge's export, and no part of {}"
        copies = (f"layers.{copied_to}.embed_tokens.weight",)
        embed = replace(embed, copies=copies, copied=told.format(f"{hf}{embed.hf}", words))
        copies = (f"{hf}layers.{copied_to}.shared_head.head.weight",)
        last = replace(last, copies=copies, copied=told.format(last.hf, output))
    model = f"{inside}model."
    sections = [Section(hf, inside, model, (embed,), "first", first)]
    sections += [
        Section(f"{hf}layers.{i}.", f"{inside}decoder.layers.{i}.", f"{model}layers.{i}.", units, i, i)
        for i, units in enumerate(layers)
    ]
    sections.append(
        Section(hf, inside, model, (norm(last_norm, megatron_norm, hidden),), "last", final),
    )
    if tied:
        copy = Vocabulary("", output, "", rows, hidden)
        sections.append(Section("", inside, inside, (copy,), "last", None, second=True))
        if not on_every_stage:
            sections.append(Section(hf, inside, model, (embed,), None, "last", second=True))
    else:
        sections.append(Section(head, inside, inside, (last,), "last", final))
    return sections
