"""The policy under FSDP2 on four ranks against one plain process of torch and transformers, and across a restart."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlrefit.integration.quantize.formats import Int4
from rlrefit.workers.trainers.qat.config import DEFAULT_EXCLUDED, QATConfig
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.policy_scenes import LENGTHS, ROUTED_IN_FLOAT32, assert_reference_stays, assert_resumed
from tests.spawn import PATIENT_S, run_ranks

from .models import KINDS, Oracle, write_checkpoint
from .ranks import Case, everything, more

RANKS = 4
# Name of the case: (checkpoint, layout, further fields of the policy's configuration).
TRAINED: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "FSDP4": ("qwen3", {}, {}),
    "FSDP4, tied embeddings, gathered until the backward pass": (
        "qwen3-tied",
        {},
        {"reshard_after_forward": False},
    ),
    "HSDP 2x2, recomputing": ("qwen3", {"replicate": 2}, {"recompute": True}),
    "FSDP2 x TP2, tied embeddings": ("qwen3-tied", {"tensor_parallel": 2}, {}),
    "FSDP4 in host memory": ("qwen3", {}, {"cpu_offload": True}),
    "FSDP4 of six experts": ("qwen3-moe", {}, {}),
    "HSDP 2x1 x TP2 of experts": ("qwen3-moe", {"replicate": 2, "tensor_parallel": 2}, {}),
}
IN_BFLOAT16, WITH_REFERENCE = "FSDP4 in bfloat16", "HSDP 2x2 with a reference"
# Their down projections have rows of a group and a half.
IN_INT4 = QATConfig((*DEFAULT_EXCLUDED, "*.down_proj"), activations=False, format=Int4(32))
RESUMED: dict[str, tuple[str, dict[str, int], torch.dtype, dict[str, Any]]] = {
    "HSDP": ("qwen3-tied", {"replicate": 2}, torch.bfloat16, {}),
    "FSDP x TP": ("qwen3-moe", {"tensor_parallel": 2}, torch.float32, {}),
    ROUTED_IN_FLOAT32: (ROUTED_IN_FLOAT32, {}, torch.bfloat16, {}),
    "FSDP4 in NVFP4": ("qwen3-moe", {}, torch.bfloat16, {"qat": QATConfig()}),
    "FSDP4 in INT4": ("qwen3-tied", {}, torch.bfloat16, {"qat": IN_INT4}),
}
# Left to make test-all: other cases have each part of these (weights that are frozen, every rank's ``unused``). Megatron's policies
# resume in INT4.
_MORE = {"FSDP4", ROUTED_IN_FLOAT32, "FSDP4 in INT4"}


@dataclass(frozen=True)
class World:
    oracles: dict[str, Oracle]
    ranks: list[dict[str, Any]]

    def of(self, case: str) -> list[Any]:
        return [rank["trained"][case] for rank in self.ranks]


def run_all_cases(root: Path) -> World:
    paths, trained, resumed = _cases(root, more=False)
    trained[IN_BFLOAT16] = Case(paths["qwen3"], dtype=torch.bfloat16)
    trained[WITH_REFERENCE] = Case(paths["qwen3"], {"replicate": 2}, torch.bfloat16, kl_coef=0.1)
    other = Case(paths["qwen3-tied"], {}, torch.bfloat16)
    with_reference = trained[WITH_REFERENCE]
    references = (
        with_reference,
        replace(with_reference, checkpoint=_shifted(paths["qwen3"], root / "shifted")),
    )
    routed = Case(paths[ROUTED_IN_FLOAT32], {}, torch.bfloat16, micro_batch=2)
    cases = trained, resumed, other, references, routed
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, everything, RANKS, *cases, str(root), timeout_s=PATIENT_S)
        oracles = {kind: Oracle(path) for kind, path in paths.items() if kind in KINDS}
        return World(oracles, ranks.result())


@of_all_tests
def run_more_cases(root: Path) -> list[dict[str, Any]]:
    """Held against the same oracles."""
    _, trained, resumed = _cases(root, more=True)
    return run_ranks(more, RANKS, trained, resumed, str(root), timeout_s=PATIENT_S)


def _cases(root: Path, *, more: bool) -> tuple[dict[str, str], dict[str, Case], dict[str, Case]]:
    """Checkpoints, and the cases to train and to resume."""
    paths = {kind: write_checkpoint(kind, root / f"{kind}-model") for kind in (*KINDS, ROUTED_IN_FLOAT32)}

    def wanted(cases: Mapping[str, Any]) -> dict[str, Any]:
        return {name: case for name, case in cases.items() if (name in _MORE) == more}

    trained = {
        name: Case(paths[of], layout, options=options)
        for name, (of, layout, options) in wanted(TRAINED).items()
    }
    resumed = {
        name: Case(paths[of], layout, dtype, micro_batch=2, options=options)
        for name, (of, layout, dtype, options) in wanted(RESUMED).items()
    }
    return paths, trained, resumed


def _shifted(path: str, folder: Path) -> str:
    """The checkpoint with other weights."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    return str(folder)


AHEAD = (run_all_cases, run_more_cases)


@pytest.fixture
def world(request: pytest.FixtureRequest, usual: World) -> World:
    if request.node.get_closest_marker("full") is None:
        return usual
    found: World = request.getfixturevalue("whole")
    return found


@pytest.fixture(scope="module")
def usual(found_ahead: FoundAhead) -> World:
    return found_ahead.by(run_all_cases)


@pytest.fixture(scope="module")
def whole(usual: World, found_ahead: FoundAhead) -> World:
    ranks = zip(usual.ranks, found_ahead.by(run_more_cases), strict=True)
    parts = ("trained", "resumed")
    return replace(
        usual, ranks=[rank | {part: rank[part] | also[part] for part in parts} for rank, also in ranks]
    )


close = partial(torch.testing.assert_close, atol=2e-6, rtol=0)


@pytest.mark.parametrize("case", left_to_all(TRAINED, _MORE))
def test_log_probabilities_and_steps_are_those_of_one_process_with_the_whole_model(
    world: World, case: str
) -> None:
    oracle = world.oracles[TRAINED[case][0]]
    first, *_ = reports = world.of(case)
    for report in reports:
        close(report.logprobs, oracle.first_logprobs)
        assert (report.logprobs[:, 0] == 0).all()
        for row, length in enumerate(LENGTHS):
            close(report.trimmed_logprobs[row, :length], oracle.first_logprobs[row, :length])
        for ours, wanted in zip(report.metrics, oracle.metrics, strict=True):
            assert ours.keys() == wanted.keys()
            assert ours == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert report.weights.keys() == oracle.weights.keys()
        for name, wanted in oracle.weights.items():
            close(report.weights[name], wanted, msg=name)
        # All ranks report the same bit for bit.
        assert report.metrics == first.metrics
        assert torch.equal(report.later_logprobs, first.later_logprobs)
        assert all(torch.equal(report.weights[name], tensor) for name, tensor in first.weights.items())


def test_ranks_share_the_weights_and_replicas_hold_them_twice(world: World) -> None:
    for case, copies in (("FSDP4 of six experts", 1), ("HSDP 2x2, recomputing", 2)):
        whole = sum(weight.numel() for weight in world.oracles[TRAINED[case][0]].weights.values())
        assert sum(rank["kept"][case].count for rank in world.ranks) == copies * whole


def test_bfloat16_is_computed_in_and_float32_is_kept(world: World) -> None:
    oracle = world.oracles["qwen3"]
    assert {dtype for rank in world.ranks for dtype in rank["kept"][IN_BFLOAT16].dtypes} == {torch.float32}
    for report in world.of(IN_BFLOAT16):
        difference = (report.logprobs - oracle.first_logprobs).abs()
        assert 0 < difference.mean() < 0.02
        assert report.metrics[-1]["loss"] < report.metrics[0]["loss"]
        moved = [n for n, w in report.weights.items() if not torch.equal(w, w.bfloat16().float())]
        assert moved  # by less than bfloat16 could tell


def test_the_reference_policy_stays_where_the_policy_began(world: World) -> None:
    for report in world.of(WITH_REFERENCE):
        assert_reference_stays(report)


@pytest.mark.parametrize("case", left_to_all(RESUMED, _MORE))
def test_training_goes_on_bit_for_bit_after_a_restart_and_after_steps_that_were_left_out(
    world: World, case: str
) -> None:
    assert_resumed([rank["resumed"][case] for rank in world.ranks])
    # Nor do a module without gradients and a frozen one hinder a restart.
    assert all(rank["unused"] for rank in world.ranks)


@pytest.mark.parametrize(
    ("state", "told"), [("other layout", "replicate was 2 and is 1"), ("cut off", "can't be read")]
)
def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_nothing_is_changed(
    world: World, state: str, told: str
) -> None:
    for rank in world.ranks:
        assert told in rank[state]["text"]
        assert rank[state]["unchanged"]


def test_a_state_is_resumed_with_the_reference_policy_that_it_began_with_or_none(world: World) -> None:
    for rank in world.ranks:
        same, other, none = rank["references"]
        assert (same, none) == ("", "")
        assert "the reference policy" in other


def test_what_transformers_keeps_in_float32_computes_in_it_and_what_is_frozen_stays_so(world: World) -> None:
    for rank in world.ranks:
        assert rank["routers"]["computed"] == {torch.float32}
        (name,) = rank["routers"]["frozen"]
        assert name.endswith("e_score_correction_bias")
