"""Which layers are quantized, and what is refused before anything is."""

from __future__ import annotations

import pytest

from rlrefit.integration.quantize.nvfp4_checkpoint import fused_module, input_module, quantization_config
from rlrefit.workers.trainers.qat.config import DEFAULT_EXCLUDED, Linear, QATConfig, select

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
LINEARS = [
    Linear(f"model.layers.{i}.{p}.weight", 64) for i in range(12) for p in (*_PROJECTIONS, "mlp.gate")
] + [Linear("lm_head.weight", 64)]
NAMES = [linear.name for linear in LINEARS] + ["model.embed_tokens.weight", "model.norm.weight"]


def test_the_head_and_routers_stay_by_default_and_all_else_is_quantized() -> None:
    chosen = select(QATConfig(), LINEARS, NAMES)
    assert chosen == {f"model.layers.{i}.{p}.weight" for i in range(12) for p in _PROJECTIONS}


def test_first_and_last_layers_stay_and_their_numbers_are_not_taken_for_others() -> None:
    chosen = select(QATConfig(first_layers=2, last_layers=1), LINEARS, NAMES)
    assert {int(name.split(".")[2]) for name in chosen} == set(range(2, 11))
    kept = [linear.name for linear in LINEARS if linear.name not in chosen]
    made = quantization_config(chosen, kept, "1").hf_quant_config["quantization"]
    assert "model.layers.1.mlp.down_proj" in made["exclude_modules"]


def test_all_that_is_wrong_is_told_at_once() -> None:
    config = QATConfig(
        exclude=("*.k_proj", "*.mispelt_proj", "*.gate"),
        first_layers=99,
        activations=False,
        force_dynamic_quantization=True,
    )
    with pytest.raises(ValueError, match="NVFP4 training is not possible so") as raised:
        select(config, LINEARS, NAMES)
    text = str(raised.value)
    for part in (
        "first_layers is 99; the model has 12 layers",
        "force_dynamic_quantization is about activations",
        "'*.mispelt_proj', which matches no module",
        "lm_head.weight: engines hold the head unquantized",
    ):
        assert part in text


def test_a_part_of_a_fused_matrix_cannot_be_left_out_alone() -> None:
    with pytest.raises(
        ValueError, match=r"3.self_attn.k_proj.weight would be left out, and .*qkv_proj"
    ) as raised:
        select(QATConfig(exclude=(*DEFAULT_EXCLUDED, "*.3.self_attn.k_proj")), LINEARS, NAMES)
    assert str(raised.value).count("\n") == 1


def test_shards_that_cut_blocks_and_layers_of_unknown_form_are_refused_by_name() -> None:
    odd = [Linear("model.layers.0.a.weight", 24), Linear("model.layers.0.b.weight", 64, "it is odd")]
    with pytest.raises(
        ValueError, match=r"a.weight: a rank holds 24 columns, which cuts blocks of 16"
    ) as raised:
        select(QATConfig(), odd, [linear.name for linear in odd])
    assert "b.weight: it is odd. Leave its layer out by exclude" in str(raised.value)


def test_an_exclusion_that_an_engine_would_read_for_more_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'model.layers.0.mlp.gate' is also found in model.layers.0.mlp.gate_"
    ):
        quantization_config(["model.layers.0.mlp.up_proj.weight"], ["model.layers.0.mlp.gate.weight"], "1")


def test_what_engines_fuse_shares_a_scale() -> None:
    layer = "model.layers.3"
    assert {fused_module(f"{layer}.self_attn.{p}_proj.weight") for p in "qkv"} == {
        f"{layer}.self_attn.qkv_proj"
    }
    experts = [f"{layer}.mlp.experts.{e}.{p}_proj.weight" for e in (0, 11) for p in ("gate", "up")]
    assert len({fused_module(name) for name in experts}) == 2
    assert {input_module(name) for name in experts} == {f"{layer}.mlp.experts.*.gate_up_proj"}


def _of_stacks(**layers: int) -> list[Linear]:
    stacks = {name.replace("_", "."): count for name, count in layers.items()}
    return [
        Linear(f"{s}.layers.{i}.mlp.down_proj.weight", 64)
        for s, count in stacks.items()
        for i in range(count)
    ]


def _left_out(config: QATConfig, linears: list[Linear], *others: str, counted: int | None = None) -> set[str]:
    names = [linear.name for linear in linears]
    chosen = select(config, linears, [*names, *others], counted)
    return {name.removesuffix(".mlp.down_proj.weight") for name in set(names) - chosen}


def test_the_last_layers_are_the_decoders_beside_a_vision_tower_and_prediction_layers() -> None:
    ends = QATConfig(first_layers=1, last_layers=1)
    linears = _of_stacks(vision=7, model=5, mtp=1)
    found = _left_out(ends, linears, "model.embed_tokens.weight", "vision.patch_embed.proj.weight", counted=4)
    assert found == {"model.layers.0", "model.layers.3"}
    found = _left_out(ends, linears, "model.embed_tokens.weight")
    assert found == {"model.layers.0", "model.layers.4"}
    assert _left_out(ends, _of_stacks(a=3, b=2)) == {"a.layers.0", "a.layers.2", "b.layers.0", "b.layers.1"}


def test_layers_at_an_end_that_leave_nothing_out_are_an_error() -> None:
    linears = [linear for linear in _of_stacks(model=4) if "layers.3" not in linear.name]
    names = [linear.name for linear in linears] + ["model.layers.3.norm.weight"]
    with pytest.raises(ValueError, match=r"last_layers is 1, but .* so it leaves nothing out") as raised:
        select(QATConfig(first_layers=1, last_layers=1), linears, names)
    assert "first_layers" not in str(raised.value)
