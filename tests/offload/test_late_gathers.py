"""Megatron ranks that gather parameters late: a refit completes what it sends, and leaves alone what is complete."""

from __future__ import annotations

from typing import Any

import pytest

from tests.refit.models import make_model
from tests.spawn import run_ranks

from .late_gather_ranks import run


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    checkpoint = make_model("qwen3", tmp_path_factory.mktemp("models") / "qwen3", 0)
    found: list[dict[str, dict[str, Any]]] = run_ranks(run, 2, checkpoint, timeout_s=200.0)
    return found


def test_shards_that_other_ranks_have_updated_are_gathered_once(told: Any) -> None:
    for rank, found in enumerate(each["by_shards"] for each in told):
        mine = [5.0 + rank, 4.0] if rank else [3.0, 5.0]
        expected = {
            "after a step": [1.0, 2.0],
            "under way": [3.0, 4.0],
            "gathered before": mine,
            "staged": [7.0, 8.0],
        }
        for state, halves in expected.items():
            assert {tuple(bucket) for bucket in found[state]} == {tuple(halves)}, state
        assert found["in the gradients' memory"] == "export"


def test_gradients_that_are_being_added_up_outlive_a_refit_and_a_gather_under_way_is_finished(
    told: Any,
) -> None:
    for found in (each["by_layers"] for each in told):
        assert found == {"kept gradients": True, "under way": [[3.0], [4.0]]}
