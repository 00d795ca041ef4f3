"""NemotronH: layers of Mamba-2 mixers, attention, plain MLPs and experts, in the order that a pattern gives."""

from __future__ import annotations

import torch

from .expert_units import Experts
from .mamba_units import Blocks
from .sections import Architecture, CatalogError, Config, Section, decoder, fused_qkv, norm, router
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
    }
    pattern, predicting = config["hybrid_override_pattern"], _predicting(config)
    if "-" in pattern + predicting:
        kinds["-"] = (
            norm("norm", "mlp.linear_fc1.layer_norm_weight", hidden),
            *_mlp("mixer.", "mlp.", config["intermediate_size"], hidden),
        )
    if "E" in pattern + predicting:
        kinds["E"] = _experts(config)
    odd = sorted(set(pattern + predicting) - set(kinds))
    if odd or config.get("mlp_bias") or config.get("use_bias"):
        raise CatalogError(
            f"a NemotronH model with layers {odd} or biases of linear layers is not in the catalogue"
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
    if predicting:
        sections += _prediction_layers(sections[0].units, [kinds[letter] for letter in predicting], hidden)
    return Architecture(tuple(sections), len(pattern))


def _predicting(config: Config) -> str:
    """The pattern of the layers that predict one token more; empty without.

    Raises:
        CatalogError: more tokens than one.
    """
    depth = config.get("num_nextn_predict_layers") or 0
    if depth > 1:
        raise CatalogError(f"a NemotronH model that predicts {depth} tokens more is not in the catalogue")
    return str(config["mtp_hybrid_override_pattern"]) if depth else ""


def _prediction_layers(
    embedding: tuple[Unit, ...], layers: list[tuple[Unit, ...]], hidden: int
) -> list[Section]:
    """On Megatron's last stage inside of one layer, which reads the tokens again; vLLM's model leaves them aside."""
    own, last = "mtp.layers.0.", f"mtp.layers.{len(layers) - 1}."
    before = (
        norm("enorm", "enorm.weight", hidden),
        norm("hnorm", "hnorm.weight", hidden),
        Matrix("eh_proj.weight", "eh_proj.weight", "eh_proj.weight", (hidden, 2 * hidden), 0),
    )
    after = (norm("final_layernorm", "final_layernorm.weight", hidden),)
    return [
        Section("mtp.layers.0.", own, "mtp.layers.0.", before, "last", None),
        *(
            Section(f"mtp.layers.{i}.", f"{own}mtp_model_layer.layers.{i}.", "", units, "last", None)
            for i, units in enumerate(layers)
        ),
        Section(last, own, last, after, "last", None),
        Section("backbone.", "", "", embedding, "last", None, second=True),
    ]


def _mlp(hf: str, megatron: str, inner: int, hidden: int) -> tuple[Unit, ...]:
    """Up and down matrices without a gate; ``hf`` is the prefix of the names on vLLM's side, too."""
    up, down = f"{hf}up_proj.weight", f"{hf}down_proj.weight"
    return (
        Matrix(up, f"{megatron}linear_fc1.weight", up, (inner, hidden), 0),
        Matrix(down, f"{megatron}linear_fc2.weight", down, (hidden, inner), 1),
    )


def _experts(config: Config) -> tuple[Unit, ...]:
    """Experts without gates and one that is shared; behind projections to a latent size, if it has one."""
    hidden, experts, latent = config["hidden_size"], config["n_routed_experts"], config.get("moe_latent_size")
    if config.get("n_shared_experts") != 1:
        raise CatalogError("only n_shared_experts 1 is known to Megatron-Bridge's mappings of NemotronH")
    projections = (
        Matrix(f"mixer.{name}.weight", f"mlp.{name}.weight", f"mixer.{name}.weight", shape)
        for name, shape in (
            (("fc1_latent_proj", (latent, hidden)), ("fc2_latent_proj", (hidden, latent))) if latent else ()
        )
    )
    bias = "mixer.gate.e_score_correction_bias"
    return (
        norm("norm", "pre_mlp_layernorm.weight", hidden),
        router("mixer.gate.weight", "mlp.router.weight", (experts, hidden), gen_fp32=True),
        router(bias, "mlp.router.expert_bias", (experts,), torch.float32),
        *projections,
        Experts(
            "mixer.experts.",
            "mlp.experts.",
            "mixer.experts.",
            experts,
            config["moe_intermediate_size"],
            latent or hidden,
            wide=("up_proj",),
        ),
        *_mlp(
            "mixer.shared_experts.",
            "mlp.shared_experts.",
            config["moe_shared_expert_intermediate_size"],
            hidden,
        ),
    )


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
