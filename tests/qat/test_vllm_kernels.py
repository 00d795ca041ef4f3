"""Refits of packed weights into the layouts of vLLM's NVFP4 kernels, beside what vLLM itself loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ahead import FoundAhead
from tests.spawn import run_alone
from tests.vllm_processes import vllm_processes

from .vllm_kernels import (
    CASES,
    EMULATION,
    MARLIN,
    PADDED,
    PADDED_BY_CUTLASS,
    RELOADED,
    SENT,
    UNKNOWN,
    refit_all,
)
from .vllm_side import ENVIRONMENT

Reports = dict[str, dict[str, Any]]


def refit_packed_layers(folder: Path) -> Reports:
    found: Reports = run_alone(refit_all, folder, environment=ENVIRONMENT, made_by=vllm_processes)
    return found


AHEAD = (refit_packed_layers,)


@pytest.mark.parametrize("case", CASES)
def test_packed_tensors_land_in_place_and_become_what_vllm_loads(found_ahead: FoundAhead, case: str) -> None:
    found = found_ahead.by(refit_packed_layers)[case]
    assert found["untouched"]
    assert found["packed on the misc path"] == {}
    assert found["packed in bulk"]
    assert found["padded"] == (case in PADDED | PADDED_BY_CUTLASS)
    assert found["differ"]
    assert found["differing after 1"] == []
    assert found["differing after 2"] == []
    assert found["differing after 3"] == []
    assert found["same places"]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].kernel != EMULATION])
def test_a_layer_that_has_landed_is_put_in_order_while_others_are_on_their_way(
    found_ahead: FoundAhead, case: str
) -> None:
    found = found_ahead.by(refit_packed_layers)[case]

    def differing(portion: int) -> set[str]:
        """Layers of which codes or block scales are not what vLLM has."""
        return {
            name.split(".layers.")[1].split(".")[0]
            for name in found[f"differing after portion {portion}"]
            if name.endswith(("weight", "weight_scale")) and ("_proj" in name or ".experts." in name)
        }

    assert differing(0) == {"0"}
    assert differing(1) == set()


@pytest.mark.parametrize("case", SENT)
def test_a_trainers_weights_are_packed_on_the_way_into_experts_in_marlins_layout(
    found_ahead: FoundAhead, case: str
) -> None:
    for differing, in_bulk in found_ahead.by(refit_packed_layers)[case]["sent"]:
        assert differing == [[], []]
        assert in_bulk == {"weight", "weight_scale", "weight_scale_2"}


def test_kernels_of_experts_that_are_reloaded_hold_new_values_where_cuda_graphs_have_them(
    found_ahead: FoundAhead,
) -> None:
    found = found_ahead.by(refit_packed_layers)[RELOADED]
    assert {name.rpartition(".")[2] for name in found["packed on the misc path"]} >= {"weight", "input_scale"}
    assert found["differing after 1"] == []
    assert found["differing after 2"] == []
    assert found["differing after 3"] == []
    assert not found["kernels moved after 1"]
    assert not found["kernels moved after 2"]


def test_layers_of_a_kernel_that_does_more_than_was_read_are_reloaded(found_ahead: FoundAhead) -> None:
    found = found_ahead.by(refit_packed_layers)[UNKNOWN]
    reasons = found["packed on the misc path"]
    assert {"mlp.experts.0.down_proj.weight", "self_attn.q_proj.weight"} <= {
        name.removeprefix("model.layers.0.") for name in reasons
    }
    assert found["rewritten"] == set()
    assert found["differing after 1"] == []
    assert found["differing after 2"] == []
    assert found["differing after 3"] == []


@pytest.mark.parametrize("case", CASES)
def test_what_kernels_have_in_an_order_of_their_own_is_told_to_sparse_refits(
    found_ahead: FoundAhead, case: str
) -> None:
    found = found_ahead.by(refit_packed_layers)[case]
    kernel = CASES[case].kernel
    experts = {kernel.upper()} if CASES[case].experts else set()
    assert found["kernels"] == {f"{kernel}NvFp4LinearKernel"} | experts
    in_order = {EMULATION: set(), MARLIN: {"weight", "weight_scale"}}
    assert found["rewritten"] == in_order.get(kernel, {"weight_scale"})
