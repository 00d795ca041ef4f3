"""Refits of GPT-OSS's packed experts into the layouts of vLLM's MXFP4 kernels, beside what vLLM itself loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_mxfp4 import CASES, PADDED, REFUSED, SENT, UNKNOWN, refit_all

from tests.ahead import FoundAhead
from tests.qat.vllm_side import ENVIRONMENT
from tests.spawn import run_alone
from tests.vllm_processes import vllm_processes

Reports = dict[str, dict[str, Any]]
PARTS = {f"{proj}_{part}" for proj in ("gate_up_proj", "down_proj") for part in ("blocks", "scales", "bias")}


def refit_packed_experts(folder: Path) -> Reports:
    found: Reports = run_alone(refit_all, folder, environment=ENVIRONMENT, made_by=vllm_processes)
    return found


AHEAD = (refit_packed_experts,)


@pytest.mark.parametrize("case", CASES)
def test_packed_experts_land_in_place_and_become_what_vllm_loads(found_ahead: FoundAhead, case: str) -> None:
    found = found_ahead.by(refit_packed_experts)[case]
    assert found["backends"] == {CASES[case].backend}
    assert found["padded"] == {CASES[case].sizes == PADDED}
    assert found["untouched"]
    assert found["misc"] == found["misc anew"] == {}
    # Biases of what all ranks add up are zeros on all but the first.
    adds_nothing = CASES[case].rank > 0 and not CASES[case].expert
    assert found["bulk"] == PARTS - ({"down_proj_bias"} if adds_nothing else set())
    assert found["alike"] == set()
    # Such zeros are written at the end.
    assert found.get("in order once landed") == (
        not adds_nothing if CASES[case].backend == "MARLIN" else None
    )
    assert found["differing after 1"] == []
    assert found["differing after 2"] == []
    assert found["differing after 3"] == []
    assert found["differing after 4"] == []
    assert found["same places"]


def test_experts_of_a_kernel_that_does_more_than_was_read_are_reloaded(found_ahead: FoundAhead) -> None:
    found = found_ahead.by(refit_packed_experts)[UNKNOWN]
    assert {name.rpartition(".")[2] for name in found["misc"]} == PARTS
    assert found["rewritten"] == set()
    assert found["differing after 1"] == []
    assert found["differing after 2"] == []
    assert found["differing after 3"] == []
    assert found["differing after 4"] == []


def test_weights_of_the_other_kind_are_refused_before_anything_is_written(found_ahead: FoundAhead) -> None:
    found = found_ahead.by(refit_packed_experts)[REFUSED]
    of_packed, of_plain = found["engine 0"], found["engine 1"]
    assert of_packed[:2] == ("PlanError", "trace")
    assert "trainer_quantize_mxfp4" in of_packed[3]
    assert of_plain[:2] == ("RefitMismatch", "trace")
    assert of_plain[2].endswith(("_blocks", "_scales"))


@pytest.mark.parametrize("case", SENT)
def test_ranks_that_hold_experts_in_bf16_send_what_vllm_loads_from_a_packed_checkpoint(
    found_ahead: FoundAhead, case: str
) -> None:
    by_rank = found_ahead.by(refit_packed_experts)[case]["sent"]
    # A half of 160 columns cuts a block of 32, so such weights come whole. Nothing goes into a kernel that is not known.
    bulk = set() if case == UNKNOWN else PARTS - {"down_proj_blocks", "down_proj_scales"}
    assert by_rank == [([[], []], bulk)] * 3


@pytest.mark.parametrize("case", CASES)
def test_what_marlin_puts_in_order_is_told_to_sparse_refits(found_ahead: FoundAhead, case: str) -> None:
    found = found_ahead.by(refit_packed_experts)[case]
    assert found["rewritten"] == (found["bulk"] if CASES[case].backend == "MARLIN" else set())
