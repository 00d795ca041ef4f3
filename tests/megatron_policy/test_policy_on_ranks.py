"""The policy in parallel layouts against transformers, against a single rank, and across a restart."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_ranks import Case, four_ranks, one_rank, two_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlrefit.integration.quantize.formats import Int4
from rlrefit.recipes.algorithms.rates import LR_DECAYS, learning_rate
from rlrefit.recipes.tiny.checkpoints import resolve_model_path
from rlrefit.recipes.tiny.make_tokenizer import PAD, vocabulary
from rlrefit.workers.trainers.megatron.lora_targets import megatron_targets
from rlrefit.workers.trainers.qat.config import DEFAULT_EXCLUDED, QATConfig
from tests.ahead import FoundAhead, left_to_all, of_all_tests
from tests.policy_scenes import (
    LENGTHS,
    assert_reference_stays,
    assert_resumed,
    plain_logprobs,
    token_ids,
    write_checkpoint,
)
from tests.spawn import PATIENT_S, run_ranks, run_together

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "tied": ("qwen3-tied", {}),
    "odd vocabulary": ("qwen3", {"vocab_size": 65}),
    "moe": ("qwen3-moe", {}),
    "llama": ("llama", {"num_hidden_layers": 4}),
    "windows and sinks": ("gpt-oss", {"sliding_window": 4}),
}
# Name of the layout's case: (checkpoint, layout).
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": ("qwen3", {"tensor_parallel": 2}),
    "TP2 with a padded vocabulary": ("odd vocabulary", {"tensor_parallel": 2}),
    "PP2 with tied embeddings": ("tied", {"pipeline_parallel": 2}),
    "PP2 with two virtual stages": ("llama", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "PP2 with three layers and one": (
        "llama",
        {
            "pipeline_parallel": 2,
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 1,
        },
    ),
    "PP2 with virtual stages of its own": (
        "llama",
        {"pipeline_parallel": 2, "virtual_pipeline": 2, "pipeline_model_parallel_layout": "Et|tt|t|L"},
    ),
    "TP2 and EP2": ("moe", {"tensor_parallel": 2, "expert_parallel": 2}),
    "TP2 and ETP2": ("moe", {"tensor_parallel": 2, "expert_tensor_parallel": 2}),
    "CP2": ("qwen3", {"context_parallel": 2}),
    "CP2 and EP2": ("moe", {"context_parallel": 2, "expert_parallel": 2}),
    "DP2": ("qwen3", {}),
    "DP2 and EP2": ("moe", {"expert_parallel": 2}),
    "CP2 with windows and sinks": ("windows and sinks", {"context_parallel": 2}),
}
# The same of four ranks.
ON_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2 and CP2": ("qwen3", {"tensor_parallel": 2, "context_parallel": 2}),
    "PP2 and CP2": ("tied", {"pipeline_parallel": 2, "context_parallel": 2}),
    "PP2 with two virtual stages and CP2": (
        "llama",
        {"pipeline_parallel": 2, "virtual_pipeline": 2, "context_parallel": 2},
    ),
    "TP2, EP2 and CP2": ("moe", {"tensor_parallel": 2, "expert_parallel": 2, "context_parallel": 2}),
    "DP2 and CP2": ("qwen3", {"context_parallel": 2}),
    # One of the rows has fewer tokens than there are chunks of it.
    "CP4": ("qwen3", {"context_parallel": 4}),
}
ALL = LAYOUTS | ON_FOUR
# Name of a layout's case: what its training computes again.
RECOMPUTED: dict[str, dict[str, Any]] = {
    "TP2": {"granularity": "full", "method": "uniform", "num_layers": 1},
    "TP2 and EP2": {"granularity": "selective", "modules": ("core_attn", "moe")},
    "CP2": {"granularity": "full", "method": "uniform", "num_layers": 1},
    "CP2 and EP2": {"granularity": "selective", "modules": ("core_attn", "moe")},
}
# Factors of Megatron's layers, experts' among them.
LORA = {"rank": 4, "alpha": 8, "target_modules": megatron_targets(["all-linear"])}
# Name of the layout's case with adapters: the layout's own.
ADAPTED = {
    f"{name} with adapters": name for name in ("TP2", "PP2 with tied embeddings", "TP2 and EP2", "DP2")
}
IN_BFLOAT16 = ("TP2", "PP2 with tied embeddings", "TP2 and EP2", "CP2")
# Left to make test-all: other cases have each part of these. Policies under FSDP2 resume in NVFP4.
_MORE = {
    "layouts": {"TP2 and CP2", "PP2 with two virtual stages and CP2", "DP2 and CP2", "DP2 and EP2"},
    "bfloat16": {"TP2", "PP2 with tied embeddings"},
    "recomputing": {"TP2 and EP2", "CP2"},
    "adapters": {"TP2 with adapters", "DP2 with adapters"},
    "resumed": {"CP2_EP2", "TP2_EP2_with_adapters", "PP2_in_NVFP4"},
}


def _marked(cases: Iterable[str], of: str) -> list[Any]:
    return left_to_all(cases, _MORE[of])


@dataclass(frozen=True)
class World:
    paths: dict[str, str]
    single: dict[str, Any]
    double: list[dict[str, Any]]
    four: list[dict[str, Any]]


def run_all_cases(root: Path) -> World:
    return _run(root, more=False)


@of_all_tests
def run_more_cases(root: Path) -> World:
    """Without the single rank that all cases are held against."""
    return _run(root, more=True)


def _run(root: Path, more: bool) -> World:
    def wanted(cases: Mapping[str, Any], of: str) -> dict[str, Any]:
        return {name: case for name, case in cases.items() if (name in _MORE[of]) == more}

    paths = {
        name: write_checkpoint(kind, root / name.replace(" ", "_"), **changes)
        for name, (kind, changes) in CHECKPOINTS.items()
    }
    bad = root / "bad"
    shutil.copytree(paths["qwen3"], bad)
    (bad / "model.safetensors").unlink()

    plain = {name: Case(paths[of], layout) for name, (of, layout) in LAYOUTS.items()}
    trained = wanted(plain, "layouts")
    for name in wanted(dict.fromkeys(IN_BFLOAT16), "bfloat16"):
        trained[f"{name} in bfloat16"] = replace(plain[name], dtype="bfloat16", steps=0)
    for name, recompute in wanted(RECOMPUTED, "recomputing").items():
        trained[f"{name} recomputing"] = replace(plain[name], recompute=recompute)
    of_grpo = {"kl_coef": 0.1, "aggregation": "sequence"}
    for name, of in wanted(ADAPTED, "adapters").items():
        trained[name] = replace(plain[of], lora=LORA, kl_coef=0.1)
    if not more:
        trained["CP2 with GRPO's loss"] = replace(plain["CP2"], **of_grpo)
        trained["DP2 without distributed optimizer"] = Case(paths["qwen3"], distributed_optimizer=False)
    resumed = {
        "TP2_EP2": Case(paths["moe"], LAYOUTS["TP2 and EP2"][1], "bfloat16", eps=1e-8),
        "DP2": Case(paths["qwen3"], {}, "bfloat16", eps=1e-8),
        "CP2_EP2": Case(paths["moe"], LAYOUTS["CP2 and EP2"][1], "bfloat16", eps=1e-8),
        "PP2_plain": Case(
            paths["tied"], {"pipeline_parallel": 2}, "bfloat16", distributed_optimizer=False, eps=1e-8
        ),
        "TP2_with_adapters": Case(paths["qwen3"], LAYOUTS["TP2"][1], "bfloat16", eps=1e-8, lora=LORA),
        "TP2_EP2_with_adapters": Case(
            paths["moe"], LAYOUTS["TP2 and EP2"][1], "bfloat16", eps=1e-8, lora=LORA
        ),
        "PP2_in_NVFP4": Case(paths["moe"], {"pipeline_parallel": 2}, "bfloat16", eps=1e-8, qat=QATConfig()),
        "PP2_in_INT4": Case(
            paths["qwen3"],
            {"pipeline_parallel": 2},
            "bfloat16",
            eps=1e-8,
            # Down projections have rows of a group and a half.
            qat=QATConfig((*DEFAULT_EXCLUDED, "*.down_proj"), activations=False, format=Int4(32)),
        ),
    }
    alone = {name: Case(path) for name, path in paths.items()}
    alone["kl"] = Case(paths["qwen3"], **of_grpo)
    alone |= {
        f"{name} with adapters": Case(paths[name], lora=LORA, kl_coef=0.1)
        for name in ("qwen3", "tied", "moe")
    }
    # The oracle of all layouts computes every row as wide as the longest.
    alone = {name: replace(case, trimmed=False) for name, case in alone.items()}
    alone["one row at a time"] = Case(paths["qwen3"], micro_batch=1)
    for decay in LR_DECAYS:
        alone[decay] = Case(paths["qwen3"], lr_decay=decay, steps=3)
    other = Case(paths["moe"], LAYOUTS["TP2 and ETP2"][1], "bfloat16", eps=1e-8)
    folders = {"good": paths["qwen3"], "bad": str(bad)}
    resumed = wanted(resumed, "resumed")
    tiny = resolve_model_path("tiny:qwen3", root)
    on_four = wanted({name: Case(paths[of], layout) for name, (of, layout) in ON_FOUR.items()}, "layouts")
    [single], double, four = run_together(
        lambda: [{}] if more else run_ranks(one_rank, 1, alone, tiny, timeout_s=PATIENT_S),
        lambda: run_ranks(two_ranks, 2, trained, resumed, other, folders, str(root), timeout_s=PATIENT_S),
        lambda: run_ranks(four_ranks, 4, on_four, timeout_s=PATIENT_S),
    )
    return World(paths, single, double, four)


AHEAD = (run_all_cases, run_more_cases)


@pytest.fixture(scope="module")
def usual(found_ahead: FoundAhead) -> World:
    return found_ahead.by(run_all_cases)


@pytest.fixture(scope="module")
def whole(usual: World, found_ahead: FoundAhead) -> World:
    more = found_ahead.by(run_more_cases)
    double = [
        {**rank, **{part: rank[part] | also[part] for part in ("trained", "resumed")}}
        for rank, also in zip(usual.double, more.double, strict=True)
    ]
    four = [rank | also for rank, also in zip(usual.four, more.four, strict=True)]
    return replace(usual, double=double, four=four)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    full = request.node.get_closest_marker("full") is not None
    found: World = request.getfixturevalue("whole" if full else "usual")
    return found


def transformers_logprobs(folder: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return plain_logprobs(model)


close = partial(torch.testing.assert_close, rtol=0)


def on_all(world: World, case: str) -> list[Any]:
    """What each of the case's two or four ranks saw."""
    return [rank[case] for rank in (world.four if case in ON_FOUR else [r["trained"] for r in world.double])]


@pytest.mark.parametrize("case", _marked(ALL, "layouts"))
def test_log_probabilities_on_several_ranks_are_those_of_transformers_however_wide_a_row_is_computed(
    world: World, case: str
) -> None:
    wanted = transformers_logprobs(world.paths[ALL[case][0]])
    for report in on_all(world, case):
        close(report.logprobs, wanted, atol=2e-5)
        assert (report.logprobs[:, 0] == 0).all()
        for row, length in enumerate(LENGTHS):
            trimmed, whole = report.trimmed_logprobs[row, :length], report.logprobs[row, :length]
            close(trimmed, whole, atol=1e-6)


@pytest.mark.parametrize("case", _marked(IN_BFLOAT16, "bfloat16"))
def test_log_probabilities_in_bfloat16_stay_within_its_rounding(world: World, case: str) -> None:
    wanted = transformers_logprobs(world.paths[LAYOUTS[case][0]])
    for report in on_all(world, f"{case} in bfloat16"):
        difference = (report.logprobs - wanted).abs()
        assert difference.mean() < 0.006
        # Where two experts' scores nearly tie, rounding sends a token elsewhere: few, but far off.
        assert difference.quantile(0.97 if "EP" in case else 1.0) < 0.02


@pytest.mark.parametrize(
    "case",
    [
        *_marked(ALL, "layouts"),
        *_marked(ADAPTED, "adapters"),
        "CP2 with GRPO's loss",
        "DP2 without distributed optimizer",
    ],
)
def test_training_on_several_ranks_reports_and_moves_the_weights_as_a_single_rank_does(
    world: World, case: str
) -> None:
    # Sums in other orders: rounding of float32, which Adam does not enlarge with such an eps (ADAM in tests/policy_scenes.py).
    layout, adapters, _ = case.partition(" with adapters")
    own = {"CP2 with GRPO's loss": "kl", "DP2 without distributed optimizer": "qwen3"}.get(case)
    alone = world.single["trained"][own or ALL[layout][0] + adapters]
    for report in on_all(world, case):
        for ours, wanted in zip(report.metrics, alone.metrics, strict=True):
            assert ours == pytest.approx(wanted, rel=2e-4, abs=2e-6)
        assert report.weights.keys() == alone.weights.keys()
        for name, wanted in alone.weights.items():
            # Bridge exports the vocabulary's padding too.
            ours = report.weights[name][: len(wanted)]
            close(ours, wanted, atol=5e-6, msg=name)


@pytest.mark.parametrize("case", _marked(RECOMPUTED, "recomputing"))
def test_activations_that_are_computed_again_train_bit_for_bit_as_kept_ones(world: World, case: str) -> None:
    for kept, again in zip(on_all(world, case), on_all(world, f"{case} recomputing"), strict=True):
        assert again.digests == kept.digests
        assert again.metrics == kept.metrics


def test_the_warm_up_starts_above_zero_and_every_weight_moves_and_the_loss_falls(world: World) -> None:
    report = world.single["trained"]["moe"]
    assert [metrics["lr"] for metrics in report.metrics] == [5e-3, 1e-2]
    assert len(set(report.digests)) == len(report.digests)
    for name, tensor in load_file(Path(world.paths["moe"]) / "model.safetensors").items():
        assert (report.weights[name] - tensor.float()).abs().max() > 1e-6, name
    for report in world.single["trained"].values():
        losses = [metrics["loss"] for metrics in report.metrics]
        assert all(later < earlier for earlier, later in pairwise(losses))
    whole, cut = (world.single["trained"][name] for name in ("qwen3", "one row at a time"))
    assert cut.metrics[-1] == pytest.approx(whole.metrics[-1], rel=1e-4, abs=1e-6)


def test_both_trainers_begin_with_the_same_gradients_also_where_rows_have_the_padding_token(
    world: World,
) -> None:
    inside = [row[: length - 1] for row, length in zip(token_ids(), LENGTHS, strict=True)]
    assert vocabulary()[PAD] in torch.cat(inside)
    ours, theirs = world.single["first steps"]
    assert ours["grad_norm"] > 0
    assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-6)


@pytest.mark.parametrize("decay", LR_DECAYS)
def test_rates_are_those_that_every_trainer_takes(world: World, decay: str) -> None:
    report = world.single["trained"][decay]
    assert len(report.metrics) == 3
    schedule = {"warmup_steps": 1, "decay": decay, "decay_steps": 3, "min_lr": 4e-3}
    wanted = [learning_rate(step, 1e-2, **schedule) for step in range(len(report.metrics))]
    assert [metrics["lr"] for metrics in report.metrics] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("case", ["kl", "moe with adapters"])
def test_the_reference_policy_stays_where_the_policy_began(world: World, case: str) -> None:
    assert_reference_stays(world.single["trained"][case])


def test_the_reference_policy_stays_where_the_policy_began_on_parts_of_rows(world: World) -> None:
    for report in on_all(world, "CP2 with GRPO's loss"):
        assert_reference_stays(report)


@pytest.mark.parametrize(
    "case",
    _marked(
        [
            *("TP2_EP2", "DP2", "CP2_EP2", "PP2_plain", "PP2_in_NVFP4", "PP2_in_INT4"),
            *("TP2_with_adapters", "TP2_EP2_with_adapters"),
        ],
        "resumed",
    ),
)
def test_training_goes_on_bit_for_bit_after_a_restart_and_after_steps_that_were_left_out(
    world: World, case: str
) -> None:
    assert_resumed([rank["resumed"][case] for rank in world.double])


def test_a_state_of_another_layout_is_refused_and_nothing_is_changed(world: World) -> None:
    for rank in world.double:
        assert "expert_tensor_parallel was 1 and is 2" in rank["other layout"]["text"]
        assert rank["other layout"]["unchanged"]


def test_a_checkpoint_that_one_rank_finds_damaged_fails_on_all(world: World) -> None:
    assert all(rank["one bad rank"].startswith("rank 1: ") for rank in world.double)


def test_a_process_holds_models_of_one_layout_only(world: World) -> None:
    assert all("one layout per process" in rank["second layout"] for rank in world.double)


def test_a_model_that_is_none_of_megatrons_language_models_gets_no_parts_of_rows(world: World) -> None:
    assert all("Linear" in rank["another model"] for rank in world.double)


def test_the_stand_ins_are_announced_once_and_leave_torch_itself_as_it_was(world: World) -> None:
    assert len(world.single["warnings"]) == 1
    assert not any(world.single["changed"].values()), world.single["changed"]


def test_a_batch_that_cannot_be_trained_on_is_refused(world: World) -> None:
    told = ("advantages and old_logprobs", "no token", "kl_coef is 0")
    assert [part in text for part, text in zip(told, world.single["rejected"], strict=True)] == [True] * 3
