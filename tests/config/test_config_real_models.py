"""Recipes for real models: checked without their files, down to stages, memory and engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from rlrefit.integration.quantize.formats import Int4
from rlrefit.recipes.config.load import ConfigError, bundled_recipes, load_config, model_violations
from rlrefit.recipes.config.model import catalog_violations
from rlrefit.recipes.plan.catalog import open_model
from rlrefit.recipes.plan.recipe import layout_text, plan_of
from rlrefit.recipes.policy.make import policy_config
from rlrefit.recipes.rollout.arguments import int4, vllm_arguments, vllm_bundles
from rlrefit.recipes.run.cluster import bundles_by_host
from rlrefit.workers.checkpoint_folder import CheckpointUnreachable, checkpoint_folder, is_hub_name
from rlrefit.workers.trainers.megatron.model import MegatronLayout, Recompute
from rlrefit.workers.trainers.megatron.pipeline_layout import pipeline_layout_violations, pipeline_stages
from rlrefit.workers.trainers.qat.config import QATConfig

REAL = [name for name in bundled_recipes() if "tiny" not in name]


@pytest.mark.parametrize("recipe", REAL)
def test_a_real_recipe_is_checked_against_the_shapes_of_its_model(recipe: str, violations) -> None:
    assert violations(recipe=recipe) == ()
    layouts = ("trainer.tensor_parallel=7", "trainer.ranks=7", "generation.tensor_parallel=7")
    told = [text.partition(": ")[0] for text in violations(*layouts, recipe=recipe) if "num_" in text]
    assert {"trainer.tensor_parallel", "generation.tensor_parallel"} <= {*told}


def test_a_large_model_is_not_started_on_a_machine_without_gpus(data: list[str]) -> None:
    def told(*overrides: str, gpus: int = 0) -> list[str]:
        with patch("torch.cuda.device_count", return_value=gpus):
            try:
                load_config("grpo_qwen3_4b", [*data, *overrides], to_run=True)
            except ConfigError as error:
                return [text.partition(":")[0] for text in error.violations if "billion parameters" in text]
        return []

    assert told("ray.address=null") == ["model.path"]
    assert told("ray.address=null", gpus=16) == []
    assert told("ray.address=auto") == []  # the cluster is asked once it is joined
    assert told("ray.address=null", "model.path=Qwen/Qwen3-0.6B") == []


def test_a_checkpoint_of_other_shapes_than_were_planned_is_told_with_every_difference(violations) -> None:
    config = load_config("grpo_deepseek_v3")
    real = dict(open_model("deepseek-v3").config)
    assert model_violations(config, real) == []
    # Layers for multi-token prediction are not built, so it does not matter how many there are.
    assert model_violations(config, {**real, "num_nextn_predict_layers": 3}) == []
    (found,) = model_violations(config, {**real, "hidden_size": 5120, "moe_intermediate_size": 1536})
    assert "hidden_size is 5120 and not 7168" in found
    assert "moe_intermediate_size is 1536 and not 2048" in found
    (found,) = violations("model.catalog=deepseek", recipe="grpo_deepseek_v3")
    assert "model.catalog: 'deepseek' is not bundled; give one of deepseek-v3" in found


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen2.5-vl-7b", "ling-mini-2.0"])
def test_a_language_model_beside_an_image_encoder_is_compared_wherever_its_keys_stand(name: str) -> None:
    config = load_config("grpo_deepseek_v3")
    config = replace(config, model=replace(config.model, catalog=name))
    real = open_model(name).config
    text = real.get("text_config", {})
    flat = {**real, **text, "model_type": real["model_type"]}
    flat.pop("text_config", None)

    def differences(keys: dict[str, Any]) -> list[str]:
        return [v.text for v in catalog_violations(config, keys)]

    assert differences(real) == differences(flat) == []
    assert differences(flat | {"mtp_num_hidden_layers": 3}) == []
    (found,) = differences(flat | {"hidden_size": 100})
    assert "hidden_size is 100 and not" in found


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["num_layers_in_first_pipeline_stage=null", "num_layers_in_last_pipeline_stage=null"],
            "set trainer.num_layers_in_first_pipeline_stage",
        ),
        (
            ["num_layers_in_last_pipeline_stage=10"],
            "94 layers with first = 11 and last = 10 leave 73 for 6 equal pipeline stages",
        ),
        (["virtual_pipeline=5"], "can't be cut into vpp = 5 equal chunks"),
    ],
)
def test_stages_that_the_layers_do_not_fill_are_refused(violations, overrides: list[str], told: str) -> None:
    (found,) = violations(*(f"trainer.{text}" for text in overrides), recipe="grpo_qwen3_235b_a22b")
    assert told in found


def test_stages_of_ones_own_are_read_as_megatron_reads_them(violations) -> None:
    assert pipeline_stages("Ettt|(tt|)*2,m|L") == ["Ettt", "tt", "tt", "m", "L"]
    assert pipeline_stages("Et*3|t*2L") == ["Ettt", "ttL"]
    assert pipeline_layout_violations("Et|tt|t|L", 4, 4) == []
    (unknown,) = pipeline_layout_violations("Ex|tL", 2)
    assert unknown.startswith("'x' is none of E, t, m and L")
    found = pipeline_layout_violations("tE|tm", 3, 4)
    for told in ("has 2 stages", "only E and end with the only L", "(m)", "has 2 layers (t)"):
        assert sum(told in text for text in found) == 1
    assert len(found) == 4
    one_end = "trainer.num_layers_in_first_pipeline_stage=3"
    layout = "trainer.pipeline_model_parallel_layout='Ett|(tttt|)*14ttL'"
    both = violations(one_end, layout, recipe="grpo_deepseek_v3")
    assert any("tells the layers of all stages" in text for text in both)
    assert any("it has 60 layers (t) where the model has 61" in text for text in both)


def test_context_parallel_ranks_are_planned_as_copies_that_have_no_rollouts_of_their_own() -> None:
    config = load_config("grpo_qwen3_4b", ["trainer.context_parallel=2"])
    plan = plan_of(config)
    assert layout_text(plan.train) == "tp=2,cp=2,dp=2"
    assert policy_config(config, "model", None).layout == MegatronLayout(
        tensor_parallel=2, context_parallel=2
    )


def test_every_key_reaches_megatron_and_vllm() -> None:
    config = load_config(
        "grpo_deepseek_v3",
        ["trainer.optimizer.cpu_offload_fraction=0.5", "generation.vllm.enable_expert_parallel=true"],
    )
    with patch("torch.cuda.is_available", return_value=True):  # without a GPU nothing is offloaded
        policy = vars(policy_config(config, "model", None))
    assert policy["layout"] == MegatronLayout(
        pipeline_parallel=16,
        expert_parallel=16,
        num_layers_in_first_pipeline_stage=3,
        num_layers_in_last_pipeline_stage=2,
    )
    assert policy["recompute"] == Recompute("full", "uniform", 1)
    assert policy["optimizer"].cpu_offload_fraction == 0.5
    arguments = vllm_arguments(config)
    wanted = {
        "tensor_parallel_size": 32,
        "pipeline_parallel_size": 1,
        "enable_expert_parallel": True,
        "distributed_executor_backend": "ray",
        "max_model_len": 4096,
        "max_num_seqs": 128,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.85,
    }
    assert {name: arguments[name] for name in wanted} == wanted
    assert vllm_bundles(config) == 32
    small = load_config("grpo_qwen3_4b")
    assert "max_num_seqs" not in vllm_arguments(small)
    assert vllm_bundles(small) == 1


def test_kimi_k2_is_trained_in_what_its_engines_hold_and_an_engine_fits_on_a_host(violations) -> None:
    assert violations("model.trust_remote_code=true", recipe="grpo_kimi_k2_int4") == ()
    config = load_config("grpo_kimi_k2_int4")
    assert not config.model.trust_remote_code  # which a user has to ask for
    policy = policy_config(config, "model", None)
    assert policy.qat == QATConfig(activations=False, format=Int4(32))
    arguments = vllm_arguments(config, open_model("kimi-k2").config)
    assert arguments["hf_overrides"] == {"quantization_config": int4(32)}
    assert (arguments["enable_expert_parallel"], arguments["moe_backend"]) == (True, "marlin")
    assert vllm_bundles(config) == 1
    told = violations(
        "generation.weight_group=128", "generation.tensor_parallel=32", recipe="grpo_kimi_k2_int4"
    )
    assert [text for text in told if "64 of n_shared_experts times moe_intermediate_size" in text]


def test_a_recipes_layouts_are_told_in_the_planners_words() -> None:
    planned = plan_of(load_config("grpo_deepseek_v3", ["generation.vllm.enable_expert_parallel=true"]))
    assert layout_text(planned.train) == "pp=16,ep=16,dp=16,first=3,last=2"
    assert layout_text(planned.gen) == "tp=32,dp=8,ep=32"
    assert not [spec for spec in planned.model.specs() if spec.name.startswith("model.layers.61.")]


def test_a_hub_name_is_told_from_a_folder_and_unreachable_ones_say_what_to_do(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_hub_name("Qwen/Qwen3-4B")
    assert not any(map(is_hub_name, ("./Qwen/Qwen3-4B", "/models/qwen", "model", "a/b/c", str(tmp_path))))
    assert checkpoint_folder(tmp_path) == tmp_path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointUnreachable, match="hf download nobody/nothing --local-dir FOLDER"):
        checkpoint_folder("nobody/nothing", weights=False)


def test_ranks_in_a_row_share_a_host_however_ray_laid_out_the_bundles() -> None:
    assert bundles_by_host({0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]
    assert bundles_by_host(dict.fromkeys(range(12), "a")) == list(range(12))
