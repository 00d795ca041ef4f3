"""A Megatron rank that fails alone at TP2: the other one is not left in a gather of Megatron-Bridge's export."""

from __future__ import annotations

from typing import Any

import pytest

from tests.refit.models import make_model
from tests.spawn import run_ranks

from .failing_megatron_ranks import FAILS, TIMEOUT_S, run


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    checkpoint = make_model("qwen3", tmp_path_factory.mktemp("models") / "qwen3", 0)
    found: list[dict[str, dict[str, Any]]] = run_ranks(run, 2, checkpoint, timeout_s=200.0)
    return found


def test_a_parameter_that_a_module_replaced_reaches_an_engine_that_is_sent_all_by_bridges_export(
    told: Any,
) -> None:
    assert told[0]["replaced"]["values"] == [7.0]


def test_a_rank_that_refuses_leaves_the_engine_clean_and_the_next_epoch_refits(told: Any) -> None:
    first, second = (rank["refuses"] for rank in told)
    assert (first["error"][0], first["error"][2]) == ("PeerLost", FAILS)
    assert second["error"][0] == "RefitError"
    assert first["engine"][0] is None
    assert (first["engine"][1][0], first["engine"][1][2]) == ("PeerLost", FAILS)
    assert (first["clean"], first["same"]) == (True, True)
    assert max(first["seconds"], second["seconds"]) < TIMEOUT_S / 2
    assert (first["next"], second["next"], first["wrong"]) == (None, None, False)


def test_a_rank_that_fails_in_bridges_export_ends_the_gather_of_the_other_within_the_limit(told: Any) -> None:
    first, second = (rank["export"] for rank in told)
    assert first["error"] == ("PeerLost", "export", FAILS)
    assert second["error"][0] == "ValueError"
    assert (first["engine"][1][0], first["engine"][1][2], first["clean"]) == ("PeerLost", FAILS, False)
    assert max(first["seconds"], second["seconds"]) < TIMEOUT_S
    assert first["next"] == ("RefitError", "export", -1)
    assert (second["next"][0], second["next"][2]) == ("PeerLost", 0)
