"""NemotronH: layers of Mamba-2 mixers, attention and plain MLPs, in the order that a pattern gives."""

from __future__ import annotations

import torch

from .mamba_units import Blocks
from .sections import Architecture, CatalogError, Config, decoder, fused_qkv, norm
from .units import Matrix, Unit


def nemotron_h(config: Config) -> Architecture:
    hidden = config["hidden_size"]
    kinds = {
        "M": (_mamba_mixer(config)),
        "*": (
            norm("norm", "self_attention.linear_qkv.layer_norm_weight", hidden),
            *fused_qkv(
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
            norm("norm", "mlp.linear_fc1.layer_norm_weight", hidden),
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
    sections = decoder(
        config,
        layers,
        hf="backbone.",
        embedding="embeddings",
        last_norm="norm_f",
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

    def by_heads(name: str, length: int) -> Matrix:
        return Matrix(f"mixer.{name}", f"mixer.{name}", f"mixer.{name}", (length,), 0)

    units: list[Unit] = [
        norm("norm", "mixer.in_proj.layer_norm_weight", hidden),
        Blocks(
            "mixer.in_proj.weight",
            "mixer.in_proj.weight",
            "mixer.in_proj.weight",
            (inner, inner, state, state, heads),
            (hidden,),
            groups,
        ),
        Blocks(
            "mixer.conv1d.weight",
            "mixer.conv1d_weight",
            "mixer.conv1d.weight",
            (inner, state, state),
            (1, config["conv_kernel"]),
            groups,
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
            )
        )
    return (
        *units,
        Matrix(
            "mixer.A_log",
            "mixer.A_log",
            "mixer.A",
            (heads,),
            0,
            gen_dtype=torch.float32,
            gen_refused="vLLM computes with what it makes of it, in FP32",
        ),
        by_heads("D", heads),
        by_heads("dt_bias", heads),
        by_heads("norm.weight", inner),
        Matrix(
            "mixer.out_proj.weight",
            "mixer.out_proj.weight",
            "mixer.out_proj.weight",
            (hidden, inner),
            1,
        ),
    )
