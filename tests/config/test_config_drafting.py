"""Recipes whose trainer has MTP layers, or whose vLLM decodes speculatively."""

from __future__ import annotations

from typing import Any

import pytest

from rlrefit.recipes.config.checks import config_violations
from rlrefit.recipes.config.drafting import MTP, SPECULATIVE
from rlrefit.recipes.config.load import load_config, model_violations
from rlrefit.recipes.config.machine import gpu_violations
from rlrefit.recipes.config.model import catalog_model
from rlrefit.recipes.plan.catalog import open_model
from rlrefit.recipes.policy.make import policy_config
from rlrefit.recipes.rollout.arguments import vllm_arguments

DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}
BASE: dict[str, Any] = {"generation.backend": "vllm", "model.path": "policy"}
TRAINS = BASE | {MTP: 0.1}
DUMMY = {"generation.vllm.load_format": "dummy"}


@pytest.mark.parametrize(
    "values",
    [
        BASE | {SPECULATIVE: DRAFTS},
        BASE | {SPECULATIVE: {"method": "eagle3", "model": "eagle"}},
        BASE | {SPECULATIVE: {"method": "mtp", "model": "another"}},
        BASE | DUMMY | {SPECULATIVE: {"method": "ngram", "prompt_lookup_max": 3}},
        BASE | DUMMY | {SPECULATIVE: {"model": "eagle", "draft_load_config": {"load_format": "auto"}}},
        TRAINS,
        TRAINS | {SPECULATIVE: DRAFTS},
        TRAINS | DUMMY | {SPECULATIVE: DRAFTS | {"model": "policy"}},
        # Another engine does not read it.
        {SPECULATIVE: {"num_speculative_tokens": 1}},
    ],
)
def test_drafters_that_refits_bring_and_those_that_stay_are_taken(config_of, values: dict[str, Any]) -> None:
    assert [found.text for found in config_violations(config_of(values))] == []


@pytest.mark.parametrize(
    ("values", "keys", "told"),
    [
        (TRAINS | {MTP: -1.0}, (MTP,), "give a number above 0"),
        (BASE | {SPECULATIVE: {"num_speculative_tokens": 1}}, (SPECULATIVE,), "give method=mtp"),
        (
            BASE | {SPECULATIVE: {"method": "ngram", "rejection_sample_method": "synthetic"}},
            (SPECULATIVE,),
            "of another distribution",
        ),
        (BASE | {SPECULATIVE: {"method": "draft_model"}}, (SPECULATIVE, "model.path"), "keep the first weights"),
        (
            BASE | {SPECULATIVE: {"method": "eagle", "model": "policy"}},
            (SPECULATIVE, "model.path"),
            "a drafter's own model",
        ),
        (BASE | {SPECULATIVE: {"model": "policy"}}, (SPECULATIVE, "model.path"), "keep the first weights"),
        (TRAINS | {SPECULATIVE: DRAFTS | {"model": "another"}}, (SPECULATIVE, MTP), "leave model out"),
        (BASE | DUMMY | {SPECULATIVE: DRAFTS}, ("generation.vllm.load_format", SPECULATIVE), "random weights"),
    ],
)  # fmt: skip
def test_what_would_draft_or_learn_wrongly_is_one_violation(
    config_of, values: dict[str, Any], keys: tuple[str, ...], told: str
) -> None:
    (found,) = config_violations(config_of(values))
    assert found.keys == keys
    assert told in found.text


def test_all_that_has_not_run_with_trained_mtp_layers_is_told_at_once(config_of) -> None:
    values = {
        "generation.backend": "sglang",
        "generation.weight_dtype": "fp8",
        "policy.refit.trainer_quantize_fp8": True,
        "trainer.ranks": 2,
        "trainer.pipeline_parallel": 2,
        "trainer.pipeline_model_parallel_layout": "Et|tL",
        "trainer.lora.rank": 4,
    }
    more = {
        "trainer.ranks": 2,
        "trainer.context_parallel": 2,
        "trainer.distributed_optimizer": True,
        "trainer.optimizer.cpu_offload_fraction": 0.5,
        "trainer.fp8_param": True,
        "policy.qat": "w4a4",
    }
    found = set()
    for asked in (values, more):
        found |= {v.keys[0] for v in config_violations(config_of(TRAINS | asked)) if v.keys[1:] == (MTP,)}
    assert found == {
        "generation.backend",
        "generation.weight_dtype",
        "trainer.pipeline_model_parallel_layout",
        "trainer.lora.rank",
        "trainer.context_parallel",
        "trainer.optimizer.cpu_offload_fraction",
        "trainer.fp8_param",
        "policy.qat",
    }


def test_what_no_drafter_has_run_beside_is_told_of_one_that_stays_and_not_of_ngrams(config_of) -> None:
    values = BASE | {
        "generation.weight_dtype": "fp8",
        "policy.refit.lora": "adapter",
        "trainer.lora.rank": 4,
        SPECULATIVE: {"method": "eagle3", "model": "eagle"},
    }
    keys = {v.keys[0] for v in config_violations(config_of(values)) if v.keys[1:] == (SPECULATIVE,)}
    assert keys == {"generation.weight_dtype", "policy.refit.lora"}
    assert not [
        v for v in config_violations(config_of(values | {SPECULATIVE: {"method": "ngram"}})) if SPECULATIVE in v.keys
    ]  # fmt: skip


def test_a_model_without_mtp_layers_is_refused_where_they_are_to_be_trained(violations) -> None:
    (found,) = violations(f"{MTP}=0.1", "generation.backend=vllm", "generation.tensor_parallel=1")
    assert found.startswith(f"{MTP}: 0.1, but the model has no layers for multi-token prediction")


def test_a_recipe_has_mtp_layers_in_trainer_plan_and_engine_where_it_says_so() -> None:
    path = load_config("grpo_deepseek_v3").model.path
    key = f"{SPECULATIVE}={{method: mtp, model: {path}, num_speculative_tokens: 1}}"
    with_mtp, without = load_config("grpo_deepseek_v3", [f"{MTP}=0.3", key]), load_config("grpo_deepseek_v3")
    assert policy_config(with_mtp, "model", None).mtp_loss_scaling_factor == 0.3
    assert policy_config(without, "model", None).mtp_loss_scaling_factor == 0
    names = [{spec.name for spec in catalog_model(config).specs()} for config in (with_mtp, without)]
    assert {name for name in names[0] - names[1] if name.startswith("model.layers.61.")} == names[0] - names[
        1
    ]
    assert len(names[0] - names[1]) > 256
    assert vllm_arguments(with_mtp)["speculative_config"] == DRAFTS
    assert "speculative_config" not in vllm_arguments(without)
    real = dict(open_model("deepseek-v3").config)
    assert model_violations(with_mtp, real) == []
    assert len(model_violations(with_mtp, real | {"num_nextn_predict_layers": 0})) == 1


@pytest.mark.parametrize(("gpus", "address", "told"), [(0, None, 1), (8, None, 0), (0, "auto", 0)])
def test_vllm_without_gpus_which_loses_the_temperature_of_drafts_is_refused(
    config_of, gpus: int, address: str | None, told: int
) -> None:
    config = config_of(BASE | {SPECULATIVE: {"method": "ngram"}, "ray.address": address})
    found = [v for v in gpu_violations(config, gpus) if v.keys == (SPECULATIVE, "ray.address")]
    assert len(found) == told
