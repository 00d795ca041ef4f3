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


ODD = [Linear("model.layers.0.a.weight", 24), Linear("model.layers.0.b.weight", 64, "it is odd")]
WITHOUT_THE_LAST = [linear for linear in LINEARS if ".11." not in linear.name]
MANY_FAULTS = QATConfig(
    ("*.k_proj", "*.mispelt_proj", "*.gate"),
    first_layers=99,
    activations=False,
    force_dynamic_quantization=True,
)
REFUSED: dict[str, tuple[QATConfig, list[Linear], list[str]]] = {
    "all at once": (
        MANY_FAULTS,
        LINEARS,
        ["first_layers is 99", "force_dynamic_quantization", "'*.mispelt_proj'", "lm_head.weight"],
    ),
    "a part of a fused matrix": (
        QATConfig(exclude=(*DEFAULT_EXCLUDED, "*.3.self_attn.k_proj")),
        LINEARS,
        ["3.self_attn.k_proj.weight", "qkv_proj"],
    ),
    "cut blocks and unknown forms": (QATConfig(), ODD, ["a.weight: a rank holds 24", "b.weight: it is odd"]),
    "an end that leaves nothing out": (QATConfig(last_layers=1), WITHOUT_THE_LAST, ["last_layers is 1"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_quantized_so_is_refused_by_name(case: str) -> None:
    config, linears, told = REFUSED[case]
    with pytest.raises(ValueError) as error:
        select(config, linears, [*NAMES, "model.layers.0.a.weight", "model.layers.0.b.weight"])
    for part in told:
        assert part in str(error.value)


def test_an_exclusion_that_an_engine_would_read_for_more_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate_"):
        quantization_config(["model.layers.0.mlp.up_proj.weight"], ["model.layers.0.mlp.gate.weight"], "1")


def test_what_engines_fuse_shares_a_scale() -> None:
    layer = "model.layers.3"
    assert {fused_module(f"{layer}.self_attn.{p}_proj.weight") for p in "qkv"} == {
        f"{layer}.self_attn.qkv_proj"
    }
    experts = [f"{layer}.mlp.experts.{e}.{p}_proj.weight" for e in (0, 11) for p in ("gate", "up")]
    assert len({fused_module(name) for name in experts}) == 2
    assert {input_module(name) for name in experts} == {f"{layer}.mlp.experts.*.gate_up_proj"}


def _left_out(
    config: QATConfig, stacks: dict[str, int], *others: str, counted: int | None = None
) -> set[str]:
    """Layers that stay as they are, of stacks of so many."""
    linears = [Linear(f"{s}.layers.{i}.a.weight", 64) for s, count in stacks.items() for i in range(count)]
    names = [linear.name for linear in linears]
    return {
        n.removesuffix(".a.weight") for n in {*names} - select(config, linears, [*names, *others], counted)
    }


def test_the_last_layers_are_the_decoders_beside_a_vision_tower_and_prediction_layers() -> None:
    ends = QATConfig(first_layers=1, last_layers=1)
    embeddings = "model.embed_tokens.weight", "vision.patch_embed.proj.weight"
    stacks = {"vision": 7, "model": 5, "mtp": 1}
    assert _left_out(ends, stacks, *embeddings, counted=4) == {"model.layers.0", "model.layers.3"}
    assert _left_out(ends, stacks, *embeddings[:1]) == {"model.layers.0", "model.layers.4"}
    assert _left_out(ends, {"a": 3, "b": 2}) == {"a.layers.0", "a.layers.2", "b.layers.0", "b.layers.1"}
