"""Layouts: how they are read, what they refuse, and which ranks store what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlrefit.recipes.plan.catalog import (
    FsdpLayout,
    GenLayout,
    LayoutError,
    Model,
    TrainLayout,
    open_model,
    parse_gen,
    parse_train,
    train_storage,
    violations,
)

from .shrunken import CONFIGS


def test_layouts_are_read_from_text_and_all_that_is_wrong_with_one_is_told() -> None:
    assert parse_train("tp=4, ep=8,pp=2") == TrainLayout(tp=4, ep=8, pp=2)
    assert parse_train("") == TrainLayout()
    assert parse_train("replicate=2, fsdp=4") == FsdpLayout(4, 2)
    assert parse_gen("tp=8,dp=2") == GenLayout(tp=8, dp=2)
    with pytest.raises(LayoutError) as error:
        parse_train("tp=x,foo=2,pp=1,pp=2,ep")
    for complaint in ("tp is 'x'", "'foo' is none of tp, pp", "pp stands twice", "ep is ''", "fsdp="):
        assert complaint in str(error.value)
    with pytest.raises(LayoutError, match="'tp' is none of fsdp, replicate"):
        parse_train("fsdp=4,tp=2")


def test_copies_of_a_sharded_model_are_the_outer_dimension() -> None:
    layout = FsdpLayout(2, 3)
    assert [layout.coordinates(rank).fsdp.rank for rank in range(layout.world_size)] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (TrainLayout(pp=16, ep=16), 256),
        (TrainLayout(tp=4, pp=8, ep=16), 128),
        (TrainLayout(tp=2, ep=2, etp=2), 4),
        (TrainLayout(tp=2, cp=2, dp=3), 12),
        (TrainLayout(tp=4, ep=2), 4),
    ],
)
def test_data_parallelism_is_the_smallest_that_the_experts_allow(layout: TrainLayout, ranks: int) -> None:
    assert layout.world_size == ranks
    assert not layout.violations()
    if layout.dp is None and layout.data_parallel > 1:
        assert replace(layout, dp=layout.data_parallel - 1).violations()


LAST = "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("layout", "layers", "counts", "told"),
    [
        # As Megatron-Bridge's recipe for DeepSeek-V3 has it.
        (TrainLayout(pp=16), 61, [4] * 15 + [1], f"set {LAST}=1"),
        (TrainLayout(pp=8), 94, [12] * 7 + [10], f"set {LAST}=10"),
        (TrainLayout(pp=5), 36, [7, 7, 7, 7, 8], f"set {LAST}=8"),
        (TrainLayout(pp=3), 4, [1, 1, 2], f"set {LAST}=2"),
        (
            TrainLayout(pp=3, first=2, last=4),
            9,
            [2, 3, 4],
            f"num_layers_in_first_pipeline_stage=2 and {LAST}=4",
        ),
        (TrainLayout(pp=4), 36, [9] * 4, ""),
        (TrainLayout(), 36, [36], ""),
    ],
)
def test_pipelines_that_do_not_divide_take_another_number_for_the_last_stage(
    layout: TrainLayout, layers: int, counts: list[int], told: str
) -> None:
    assert [len(stage) for stage in layout.stage_layers(layers)] == counts
    found = layout.uneven_stages(layers)
    assert told in found if told else found == ""


def test_chunks_of_an_interleaved_pipeline_alternate() -> None:
    assert TrainLayout(pp=2, vpp=2).stage_layers(8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert TrainLayout(pp=2, vpp=4).stage_layers(8) == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("layout", "layers", "complaint"),
    [
        (TrainLayout(pp=2, first=3, last=3), 8, "leave 2 for 0 equal pipeline stages"),
        (TrainLayout(pp=4, vpp=2), 12, "vpp = 2 equal chunks"),
        (TrainLayout(pp=9), 8, "8 layers can't be split over pp = 9"),
    ],
)
def test_pipelines_that_megatron_cannot_build_are_refused(
    layout: TrainLayout, layers: int, complaint: str
) -> None:
    with pytest.raises(LayoutError, match=complaint):
        layout.stage_layers(layers)


@pytest.mark.parametrize(
    ("name", "layout", "complaints"),
    [
        ("qwen3-30b-a3b", TrainLayout(tp=3, ep=7), ["tp = 3", "128 by ep = 7"]),
        ("qwen3-8b", TrainLayout(dp=1, ep=2), ["no multiple of etp x ep = 2"]),
        ("qwen3-8b", TrainLayout(ep=2), ["train: ep is 2, and the model has no experts"]),
        ("qwen3-8b", TrainLayout(last=4), ["give pp above 1"]),
        ("qwen3-8b", FsdpLayout(0), ["train: fsdp is 0"]),
        ("qwen3-30b-a3b", GenLayout(tp=2, dp=2, ep=3), ["ep is 3"]),
        ("qwen3-8b", GenLayout(tp=2, ep=2), ["gen: ep is 2, and the model has no experts"]),
        ("qwen3-8b", GenLayout(tp=0), ["gen: tp is 0"]),
        ("qwen3-30b-a3b", TrainLayout(ep=2), []),
        ("qwen3-30b-a3b", GenLayout(tp=2, ep=2), []),
    ],
)
def test_every_violation_of_a_model_is_told_at_once(
    name: str, layout: TrainLayout | FsdpLayout | GenLayout, complaints: list[str]
) -> None:
    found = violations(open_model(name), layout)
    assert bool(found) is bool(complaints)
    assert [text for text in complaints if text not in "\n".join(found)] == []


def test_layers_that_share_keys_are_on_one_stage_of_an_engine_and_dense_ones_of_gemma_4_on_one_of_a_trainer() -> (
    None
):
    dense, shared = (Model(name, CONFIGS[name]) for name in ("gemma4", "gemma4-shared"))
    assert violations(shared, GenLayout(tp=2)) == []
    [told] = violations(shared, GenLayout(pp=2))
    assert "layer 2 takes keys and values of layer 0" in told
    assert violations(dense, GenLayout(pp=2)) == []
    assert "pp = 1" in violations(dense, TrainLayout(pp=2))[0]
    assert violations(Model("sparse", CONFIGS["gemma4-moe"]), TrainLayout(pp=2)) == []


def test_storage_of_a_layout_that_cannot_be_is_refused_and_split_query_groups_are_not_misplaced() -> None:
    with pytest.raises(LayoutError, match="by tp = 3"):
        train_storage(open_model("qwen3-8b"), TrainLayout(tp=3), 0)
    with pytest.raises(LayoutError, match="rank 4 is not among the 4"):
        train_storage(open_model("qwen3-8b"), TrainLayout(tp=4), 4)
    stored = train_storage(Model("llama", CONFIGS["llama"]), TrainLayout(tp=8), 0)
    (fused,) = [p for p in stored if p.name == "decoder.layers.0.self_attention.linear_qkv.weight"]
    assert fused.reason == "QKV: 4 query groups can't be split over TP 8"
    assert fused.parts == ()
    assert len(fused.refused) == 3
