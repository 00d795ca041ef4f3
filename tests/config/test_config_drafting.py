"""Recipes whose trainer has MTP layers, or whose vLLM or SGLang decodes speculatively."""

from __future__ import annotations

from typing import Any

import pytest

from rlrefit.recipes.config.checks import config_violations
from rlrefit.recipes.config.drafting import ALGORITHM, MTP, SPECULATIVE
from rlrefit.recipes.config.engines import DRAFT_SIZES, ENABLED, needed_context
from rlrefit.recipes.config.load import load_config, model_violations
from rlrefit.recipes.config.machine import gpu_violations
from rlrefit.recipes.config.model import catalog_model
from rlrefit.recipes.plan.catalog import open_model
from rlrefit.recipes.policy.make import policy_config
from rlrefit.recipes.rollout.arguments import sglang_arguments, vllm_arguments

DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}
BASE: dict[str, Any] = {"generation.backend": "vllm", "model.path": "policy"}
TRAINS = BASE | {MTP: 0.1}
DUMMY = {"generation.vllm.load_format": "dummy"}
SHARED: dict[str, Any] = {ENABLED: True, "trainer.distributed_optimizer": True, "model.dtype": "bfloat16"}
ARGUMENTS = "generation.sglang.server_args"
SIZES = dict(zip(DRAFT_SIZES, (1, 1, 2), strict=True))
EAGLE = SIZES | {"speculative_algorithm": "EAGLE"}
SGLANG = BASE | {"generation.backend": "sglang"}


def sglang(**arguments: Any) -> dict[str, Any]:
    return SGLANG | {ARGUMENTS: EAGLE | arguments}


@pytest.mark.parametrize(
    "values",
    [
        BASE | {SPECULATIVE: DRAFTS},
        BASE | {SPECULATIVE: {"method": "eagle3", "model": "eagle"}},
        BASE | {SPECULATIVE: {"method": "mtp", "model": "another"}},
        BASE | DUMMY | {SPECULATIVE: {"method": "ngram", "prompt_lookup_max": 3}},
        BASE | DUMMY | {SPECULATIVE: {"model": "ngram", "prompt_lookup_max": 3}},
        BASE | DUMMY | {SPECULATIVE: {"model": "eagle", "draft_load_config": {"load_format": "auto"}}},
        TRAINS,
        TRAINS | {SPECULATIVE: DRAFTS},
        TRAINS | DUMMY | {SPECULATIVE: DRAFTS | {"model": "policy"}},
        # Another engine does not read it.
        {SPECULATIVE: {"num_speculative_tokens": 1}},
        sglang(),
        sglang(speculative_algorithm="STANDALONE", speculative_draft_model_path="another"),
        sglang(speculative_draft_load_format="auto") | {"generation.sglang.load_format": "dummy"},
        sglang(enable_weights_cpu_backup=True) | SHARED,
        SGLANG | {ARGUMENTS: {"speculative_algorithm": "NGRAM"}},
        SGLANG | {MTP: 0.1},
        sglang() | {MTP: 0.1, "generation.sglang.load_format": "dummy"} | SHARED,
        sglang(speculative_algorithm="nextn", speculative_draft_model_path="policy") | {MTP: 0.1},
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
        (BASE | DUMMY | {SPECULATIVE: {"model": "suffix"}}, ("generation.vllm.load_format", SPECULATIVE), "random weights"),
        (BASE | {SPECULATIVE: {"model": "policy"}}, (SPECULATIVE, "model.path"), "keep the first weights"),
        (TRAINS | {SPECULATIVE: DRAFTS | {"model": "another"}}, (SPECULATIVE, MTP), "leave model out"),
        (BASE | DUMMY | {SPECULATIVE: DRAFTS}, ("generation.vllm.load_format", SPECULATIVE), "random weights"),
        (BASE | SHARED | {SPECULATIVE: DRAFTS}, (ENABLED, SPECULATIVE), "discard their weights"),
        (sglang() | SHARED, (ENABLED, ALGORITHM), "enable_draft_weights_cpu_backup=true"),
        (
            sglang() | {"generation.sglang.load_format": "dummy"},
            ("generation.sglang.load_format", ALGORITHM),
            "speculative_draft_load_format=auto",
        ),
        (sglang(speculative_algorithm="EAGLE3"), (ALGORITHM, "model.path"), "of the policy's own weights"),
        (sglang(speculative_algorithm="DFLASH"), (ALGORITHM, "model.path"), "was not read"),
        (sglang(speculative_token_map="hot"), (ALGORITHM, "model.path"), "a copy of some rows"),
        (sglang(enable_multi_layer_eagle=True), (ALGORITHM, "model.path"), "several models"),
        (
            sglang(speculative_num_steps=None),
            (ALGORITHM, f"{ARGUMENTS}.speculative_num_steps"),
            "room in the context",
        ),
        (
            sglang(speculative_accept_threshold_acc=0.5),
            (f"{ARGUMENTS}.speculative_accept_threshold_acc", ALGORITHM),
            "of another distribution",
        ),
        (
            sglang() | {"ray.generation_env": {"SGLANG_SIMULATE_ACC_LEN": "2"}},
            ("ray.generation_env.SGLANG_SIMULATE_ACC_LEN", ALGORITHM),
            "of another distribution",
        ),
        (
            sglang(speculative_adaptive=True),
            (f"{ARGUMENTS}.speculative_adaptive", "generation.backend"),
            "room",
        ),
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
        "generation.backend": "transformers",
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


def test_all_that_sglang_drafts_wrongly_beside_is_told_at_once(config_of) -> None:
    more = {"generation.weight_dtype": "fp8", "policy.refit.kv_scales": True, **SHARED}
    given = {"speculative_algorithm": "STANDALONE", "speculative_accept_threshold_single": 0.5}
    found = [
        v for v in config_violations(config_of(SGLANG | more | {ARGUMENTS: given})) if ALGORITHM in v.keys
    ]
    threshold = f"{ARGUMENTS}.speculative_accept_threshold_single"
    keys = {"generation.weight_dtype", "policy.refit.kv_scales", threshold, ALGORITHM}
    assert {v.keys[0] for v in found} == keys
    assert len([v for v in found if v.keys[0] == ALGORITHM]) == 2  # the policy itself, and no sizes


def test_a_context_has_room_for_what_sglang_drafts(config_of) -> None:
    plain = needed_context(config_of(SGLANG))
    assert needed_context(config_of(sglang())) == plain + 2
    wide = sglang(speculative_num_steps=3, speculative_eagle_topk=4, speculative_num_draft_tokens=8)
    assert needed_context(config_of(wide)) == plain + 12
    assert needed_context(config_of(SGLANG | {ARGUMENTS: {"speculative_algorithm": "NGRAM"}})) == plain


def test_sglang_takes_the_policys_own_mtp_layers_from_the_folder_that_it_serves(config_of) -> None:
    config = config_of(sglang(speculative_draft_model_path="policy") | {"model.dtype": "bfloat16"})
    found = sglang_arguments(config, None, 1, 0)
    assert {name: found[name] for name in EAGLE} == EAGLE
    assert "speculative_draft_model_path" not in found
    other = config_of(sglang(speculative_draft_model_path="another") | {"model.dtype": "bfloat16"})
    assert sglang_arguments(other, None, 1, 0)["speculative_draft_model_path"] == "another"


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


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (BASE | {SPECULATIVE: {"method": "ngram"}}, SPECULATIVE),
        (SGLANG | {ARGUMENTS: {"speculative_algorithm": "NGRAM"}}, ALGORITHM),
    ],
    ids=["vllm", "sglang"],
)
@pytest.mark.parametrize(("gpus", "address", "told"), [(0, None, 1), (8, None, 0), (0, "auto", 0)])
def test_engines_without_gpus_which_lose_the_temperature_of_drafts_are_refused(
    config_of, values: dict[str, Any], key: str, gpus: int, address: str | None, told: int
) -> None:
    config = config_of(values | {"ray.address": address})
    assert len([v for v in gpu_violations(config, gpus) if v.keys == (key, "ray.address")]) == told
