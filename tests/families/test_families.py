"""Every family in layouts that cover all others: fragments of all ranks, put together, are Bridge's own export, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from rlrefit.integration.layout import Fragment
from rlrefit.workers.trainers.megatron import self_check
from rlrefit.workers.trainers.megatron.rules import Refused, experts, fragments_of_task, state_space

from . import mappings
from .cases import BROKEN, CASES, CHANGED, CONVERSIONS, COPIED, COVERING, FEW_GROUPS, INT4, Case
from .checkpoints import config_of
from .expected import MISC, is_of
from .report import Report, examine_covering

AHEAD = (examine_covering,)

_TWO_GROUPS = {"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_state_dim": 3, "mamba_num_groups": 2}
# One key size, so that TP 4 divides neither the heads nor the rows.
_TWO_KEY_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 6,
}


def check(case: Case, report: Report) -> None:
    """All is exported bit for bit, and takes the misc path for known reasons alone."""
    found = report.of(case)
    assert found["wrong"] == []
    assert found["weights"] > 20
    expected = MISC.get(case.family, ())
    assert {reason for _, reason in expected} == set(found["reasons"].values())
    for name, reason in found["reasons"].items():
        assert is_of(name, [(part, why) for part, why in expected if why == reason]), (name, reason)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_a_family_in_a_layout(case: Case, report: Report) -> None:
    check(case, report)


def test_the_layouts_of_each_change_have_every_family_and_every_part_of_a_layout() -> None:
    def parts(cases: Iterable[Case]) -> set[str]:
        layouts = {
            part for case in cases for part in re.findall("[a-z]+", str(case.layout).split("stages")[0])
        }
        stages = {"stages" for case in cases if case.layout.stages}
        return {case.family for case in cases} | layouts | stages

    assert set(COVERING) <= set(CASES)
    assert parts(COVERING) == parts(CASES)


_CHANGED = "this version of Megatron-Bridge converts {} in another way than its rule"
_QKV = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize(
    ("case", "parts", "per_layer", "why"),
    [
        (FEW_GROUPS, _QKV, 3, "QKV: 2 query groups can't be split over TP 4"),
        (CHANGED[0], _QKV, 3, _CHANGED.format("QKVMapping")),
        (CHANGED[1], ("norm",), 4, _CHANGED.format("AutoMapping")),
    ],
    ids=str,
)
def test_heads_that_ranks_can_not_share_and_rules_that_bridge_no_longer_follows_take_the_misc_path(
    case: Case, parts: tuple[str, ...], per_layer: int, why: str, report: Report
) -> None:
    found = report.of(case)
    assert found["wrong"] == []
    assert set(found["reasons"].values()) == {why}
    assert all(any(part in name for part in parts) for name in found["reasons"])
    of_layers = [name for name in found["reasons"] if ".layers." in name]
    assert len(of_layers) == per_layer * config_of(case.family, short=case.checkpoint[1])["num_hidden_layers"]


def test_the_copy_of_a_tied_embedding_takes_the_misc_path(report: Report) -> None:
    found = report.of(COPIED)
    assert found["wrong"] == []
    assert found["reasons"].keys() == {"lm_head.weight"}


@pytest.mark.parametrize("case", INT4, ids=str)
def test_experts_of_an_int4_checkpoint_are_sent_as_codes_of_what_bridge_exports(
    case: Case, report: Report
) -> None:
    found = report.of(case)
    assert found["wrong"] == []
    coded = {name for name in found["sizes"] if name.endswith(("weight_packed", "weight_scale"))}
    assert len(coded) == 2 * 3 * 4
    assert all(".mlp.experts." in name for name in coded)
    # Whose columns ranks of ETP share.
    cut = {name for name in coded if ".down_proj." in name} if case.layout.etp > 1 else set()
    assert coded & found["reasons"].keys() == cut


def test_a_rule_that_raises_on_one_rank_ends_the_preparation_on_all(report: Report) -> None:
    errors = report.of(BROKEN)["errors"]
    assert all("a shard rule failed on trainer rank 0: AttributeError: no such" in text for text, _ in errors)
    assert [cause for _, cause in errors] == ["AttributeError", "NoneType", "NoneType", "NoneType"]


@pytest.mark.parametrize("tensor_parallel", CONVERSIONS, ids=str)
@pytest.mark.parametrize("name", [*mappings.CONVERSIONS, "unclassified"])
def test_a_rule_places_what_its_mapping_class_converts_and_every_class_of_bridges_has_one_or_a_reason(
    name: str, tensor_parallel: Case, report: Report
) -> None:
    assert report.of(tensor_parallel)[name] == []


def test_kinds_of_large_weights_are_tried_one_after_another_and_those_of_small_ones_at_once() -> None:
    small, large = (1 << 10, 1 << 10), (1 << 13, 1 << 13)
    shapes = {"a": [small], "b": [small], "c": [large], "d": [small], "e": [large, large], "f": [small]}
    batches = self_check._batches((name, "Mapping", tuple(held)) for name, held in shapes.items())
    assert [[name for name, *_ in batch] for batch in batches] == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]


def test_a_class_that_only_bears_a_known_name_is_refused() -> None:
    class QKVMapping:
        hf_param: ClassVar = {"q": "q", "k": "k", "v": "v"}

    task = SimpleNamespace(
        mapping=QKVMapping(),
        param_weight=torch.nn.Parameter(torch.zeros(4, 4)),
        global_param_name="decoder.layers.0.self_attention.linear_qkv.weight",
        export_hook=None,
        weight_dtype=None,
    )
    with pytest.raises(Refused, match=rf"{__name__} has no shard rule"):
        fragments_of_task(task)


@pytest.mark.parametrize(
    ("rule", "names", "sizes", "told"),
    [
        (state_space.mamba_projection, "w", _TWO_GROUPS, "rows of a block of w"),
        (state_space.mamba_convolution, "w", _TWO_GROUPS, "rows of a block of w"),
        (state_space.gdn_projection, {"qkvz": "x", "ba": "y"}, _TWO_KEY_HEADS, "key heads"),
        (state_space.gdn_projections, {k: k for k in ("qkv", "z", "b", "a")}, _TWO_KEY_HEADS, "net's block"),
        (state_space.gdn_convolution, "w", _TWO_KEY_HEADS, "rows of a block of w"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_that_ranks_can_not_share_are_refused(
    rule: Callable[[Any], Any], names: Any, sizes: dict[str, int], told: str
) -> None:
    class ColumnParallelMapping:
        """By its name, rows are what TP ranks hold parts of."""

    mapping = SimpleNamespace(
        hf_param=names,
        tp_size=4,
        tp_rank=1,
        _tp_mapping=ColumnParallelMapping(),
        _get_config=lambda module: SimpleNamespace(**sizes),
    )
    parameter = torch.nn.Parameter(torch.zeros(24, 4))
    task = SimpleNamespace(mapping=mapping, megatron_module=None, param_weight=parameter)
    with pytest.raises(Refused, match=told):
        rule(task)


def test_a_bias_of_experts_that_bridge_would_transpose_is_refused() -> None:
    bias = Fragment("experts.bias", (8, 6), ((0, 1), (0, 6)), torch.zeros(1, 6))
    task = SimpleNamespace(mapping=SimpleNamespace(transpose_on_export=True))
    with pytest.raises(Refused, match="transposes matrices alone"):
        experts._turned(task, bias, {})
