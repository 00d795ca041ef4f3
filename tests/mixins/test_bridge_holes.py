"""Parameters that Megatron-Bridge leaves out of its export are told by name."""

from __future__ import annotations

import pytest

from tests.refit.models import make_model
from tests.spawn import run_ranks

from .hole_ranks import LACKING, told_of_holes

Answers = list[dict[str, tuple[list[str], list[str]]]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("models")
    untied, tied = (make_model(kind, folder / kind, 0) for kind in ("qwen3", "qwen3-tied"))
    return run_ranks(told_of_holes, 2, untied, tied, timeout_s=300)


def test_a_parameter_without_a_mapping_is_told_by_the_first_rank_also_where_another_stage_holds_it(
    answers: Answers,
) -> None:
    first, second = answers
    assert all(rank["untied"][0] == rank["tied"][0] == [] for rank in answers), (
        "told of a model that is known whole"
    )
    [text] = first["unmapped"][0]
    assert "decoder.layers.1.gain" in text
    assert second["unmapped"][0] == []
    assert first["unmapped"][1] == first["untied"][1] == second["unmapped"][1]


def test_a_weight_that_the_checkpoint_of_the_bridge_lacks_is_told_with_its_name_there(
    answers: Answers,
) -> None:
    first, second = answers
    [text] = first["lacking"][0]
    assert f"decoder.layers.0.self_attention.q_layernorm.weight ({LACKING})" in text
    assert second["lacking"][0] == []
    assert set(first["untied"][1]) - set(first["lacking"][1]) == {LACKING}
