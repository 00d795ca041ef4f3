"""Recipes for real models: checked without their files, down to stages, memory and engines."""

from __future__ import annotations

import pytest

from rlrefit.recipes.config.load import bundled_recipes, load_config, model_violations
from rlrefit.recipes.plan.catalog import open_model
from rlrefit.recipes.plan.recipe import layout_text, plan_of
from rlrefit.recipes.policy.make import policy_config
from rlrefit.recipes.rollout.arguments import vllm_arguments, vllm_bundles
from rlrefit.recipes.run.cluster import bundles_by_host
from rlrefit.workers.checkpoint_folder import CheckpointUnreachable, checkpoint_folder, is_hub_name
from rlrefit.workers.trainers.megatron.model import MegatronLayout, Recompute
from rlrefit.workers.trainers.megatron.pipeline_layout import pipeline_layout_violations, pipeline_stages

REAL = [name for name in bundled_recipes() if "tiny" not in name]


@pytest.mark.parametrize("recipe", REAL)
def test_a_real_recipe_is_checked_against_the_shapes_of_its_model(recipe: str, violations) -> None:
    assert violations(recipe=recipe) == ()
    (found, *_) = violations("trainer.tensor_parallel=7", "trainer.ranks=7", recipe=recipe)
    assert "7" in found
    assert any(
        "num_attention_heads" in text for text in violations("generation.tensor_parallel=7", recipe=recipe)
    )


def test_a_checkpoint_of_other_shapes_than_were_planned_is_told_with_every_difference() -> None:
    config = load_config("grpo_deepseek_v3")
    real = dict(open_model("deepseek-v3").config)
    assert model_violations(config, real) == []
    # Layers for multi-token prediction are not built, so it does not matter how many there are.
    assert model_violations(config, {**real, "num_nextn_predict_layers": 3}) == []
    (found,) = model_violations(config, {**real, "hidden_size": 5120, "moe_intermediate_size": 1536})
    assert "is not that of deepseek-v3" in found
    assert "hidden_size is 5120 and not 7168" in found
    assert "moe_intermediate_size is 1536 and not 2048" in found


def test_a_catalogue_name_that_is_not_bundled_is_refused(violations) -> None:
    (found,) = violations("model.catalog=deepseek", recipe="grpo_deepseek_v3")
    assert "model.catalog: 'deepseek' is not bundled; give one of deepseek-v3" in found


def test_stages_that_the_layers_do_not_fill_are_refused(violations) -> None:
    recipe = "grpo_qwen3_235b_a22b"
    (found,) = violations(
        "trainer.num_layers_in_first_pipeline_stage=null",
        "trainer.num_layers_in_last_pipeline_stage=null",
        recipe=recipe,
    )
    assert "8 does not divide the model's layers (num_hidden_layers 94)" in found
    assert "set trainer.num_layers_in_first_pipeline_stage" in found
    (found,) = violations("trainer.num_layers_in_last_pipeline_stage=10", recipe=recipe)
    assert "94 layers with first = 11 and last = 10 leave 73 for 6 equal pipeline stages" in found
    (found,) = violations("trainer.virtual_pipeline=5", recipe=recipe)
    assert "can't be cut into vpp = 5 equal chunks" in found


def test_stages_of_ones_own_are_read_as_megatron_reads_them(violations) -> None:
    assert pipeline_stages("Ettt|(tt|)*2,m|L") == ["Ettt", "tt", "tt", "m", "L"]
    assert pipeline_stages("Et*3|t*2L") == ["Ettt", "ttL"]
    assert pipeline_layout_violations("Et|tt|t|L", 4, 4) == []
    assert pipeline_layout_violations("Ex|tL", 2) == [
        "'x' is none of E, t, m and L; repeat with x*n or (…)*n"
    ]
    found = pipeline_layout_violations("tE|tm", 3, 4)
    assert [text.partition(" ")[2] for text in found] == [
        "has 2 stages where PP x virtual stages = 3",
        "must begin with the only E and end with the only L",
        "has multi-token-prediction layers (m), which the policy is built without",
        "has 2 layers (t) where the model has 4",
    ]
    one_end = "trainer.num_layers_in_first_pipeline_stage=3"
    recipe = "grpo_deepseek_v3"
    both = violations(one_end, "trainer.pipeline_model_parallel_layout='Ett|(tttt|)*14ttL'", recipe=recipe)
    assert [text.partition(": ")[2].partition(",")[0] for text in both][:1] == [
        "tells the layers of all stages"
    ]
    assert any("it has 60 layers (t) where the model has 61" in text for text in both)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainer.context_parallel=2", "trainer.ranks=4"], "log-probabilities are computed on whole rows"),
        (["trainer.virtual_pipeline=2"], "trainer.pipeline_parallel is 1"),
        (["trainer.num_layers_in_first_pipeline_stage=1"], "trainer.pipeline_parallel is 1"),
        (["trainer.recompute.granularity=all"], "neither full nor selective"),
        (["trainer.recompute.granularity=full"], "needs method uniform or block, and num_layers"),
        (["trainer.recompute.method=block"], "belongs to granularity full"),
        (["trainer.recompute.modules=[moe]"], "belongs to granularity selective"),
        (
            ["trainer.recompute.granularity=selective", "trainer.recompute.modules=[attention]"],
            "attention is none of Megatron's core_attn",
        ),
        (["trainer.recompute.modules=moe"], "is not a list of strings"),
        (["trainer.optimizer.cpu_offload_fraction=1.5"], "no part of the optimizer's state"),
        (
            ["trainer.optimizer.cpu_offload_fraction=1", "trainer.distributed_optimizer=false"],
            "Megatron's hybrid optimizer builds on the distributed one",
        ),
        (["generation.pipeline_parallel=2"], "transformers generates without pipeline stages"),
        (
            ["generation.backend=vllm", "generation.vllm.enable_expert_parallel=true"],
            "the model (qwen3) has no experts",
        ),
        (
            [
                "generation.backend=vllm",
                "generation.tensor_parallel=1",
                "generation.vllm.distributed_executor_backend=ray",
            ],
            "an engine has one here; give mp",
        ),
        (["generation.backend=vllm", "generation.pipeline_parallel=4"], "more than the model's layers"),
        (["data.overlong_prompts=cut"], "not one of error, drop"),
    ],
)
def test_what_cannot_be_is_told_under_its_key(violations, overrides: list[str], told: str) -> None:
    (found,) = violations(*overrides)
    assert told in found


def test_every_key_reaches_megatron_and_vllm() -> None:
    config = load_config(
        "grpo_deepseek_v3",
        ["trainer.optimizer.cpu_offload_fraction=0.5", "generation.vllm.enable_expert_parallel=true"],
    )
    policy = policy_config_without_check(config)
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
    assert "max_num_seqs" not in vllm_arguments(load_config("grpo_qwen3_4b"))
    assert vllm_bundles(load_config("grpo_qwen3_4b")) == 1


def policy_config_without_check(config) -> dict[str, object]:
    """The fields of the policy's configuration; itself, it refuses to offload where there is no GPU."""
    from unittest.mock import patch

    with patch("torch.cuda.is_available", return_value=True):
        return vars(policy_config(config, "model", None))


def test_a_recipes_layouts_are_told_in_the_planners_words() -> None:
    planned = plan_of(load_config("grpo_deepseek_v3", ["generation.vllm.enable_expert_parallel=true"]))
    assert layout_text(planned.train) == "pp=16,ep=16,dp=16,first=3,last=2"
    assert layout_text(planned.gen) == "tp=32,dp=8,ep=32"
    assert not [spec for spec in planned.model.specs() if spec.name.startswith("model.layers.61.")]
    tiny = plan_of(load_config("grpo_tiny_moe"))
    assert (layout_text(tiny.train), layout_text(tiny.gen)) == ("tp=2,ep=2", "tp=2")


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
