"""``trainer=fsdp``: what it changes of a recipe, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlrefit.recipes.algorithms.losses import PolicyLossConfig
from rlrefit.recipes.config.checks import MEGATRON_ONLY, config_violations, value_at
from rlrefit.recipes.config.load import ConfigError, TrainConfig, bundled_recipes, load_config
from rlrefit.recipes.config.model import shape_violations
from rlrefit.recipes.plan.catalog import FsdpLayout, TrainLayout
from rlrefit.recipes.plan.recipe import plan_of
from rlrefit.recipes.policy.base import AdamConfig
from rlrefit.recipes.policy.fsdp import FSDPPolicyConfig
from rlrefit.recipes.policy.make import policy_config
from rlrefit.workers.trainers.fsdp.model import FSDPLayout


@pytest.mark.parametrize("recipe", bundled_recipes())
def test_one_key_runs_any_bundled_recipe_under_fsdp_over_all_of_its_ranks(recipe: str) -> None:
    theirs, whole = load_config(recipe).trainer, load_config(recipe, ["trainer=fsdp"])
    ours = whole.trainer
    assert (ours.backend, ours.ranks, ours.tensor_parallel) == ("fsdp", theirs.ranks, 1)
    assert (ours.optimizer, ours.micro_batch_size) == (theirs.optimizer, theirs.micro_batch_size)
    assert ours.recompute.granularity == theirs.recompute.granularity
    assert all(value_at(whole, key) == value_at(TrainConfig(), key) for key in MEGATRON_ONLY)


def test_the_choice_comes_before_all_values_and_after_all_files(tmp_path: Path) -> None:
    before = load_config("grpo_tiny_pp", ["trainer.tensor_parallel=2", "trainer=fsdp"]).trainer
    assert (before.tensor_parallel, before.pipeline_parallel) == (2, 1)
    assert load_config("grpo_tiny", ["trainer=megatron"]) == load_config("grpo_tiny")
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [grpo_tiny, trainer: fsdp, _self_]\ntrainer:\n  fsdp:\n    replicate: 2\n")
    assert load_config(str(file)).trainer.fsdp.replicate == 2
    assert load_config(str(file), ["trainer=fsdp"]) == load_config(str(file))
    file.write_text("defaults: [grpo_tiny, _self_]\ntrainer:\n  context_parallel: 2\n")
    assert load_config(str(file), ["trainer=fsdp"]).trainer.context_parallel == 1


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["trainer=fsdp", "trainer.pipeline_parallel=2", "trainer.optimizer.cpu_offload_fraction=1"],
            ["trainer.pipeline_parallel: 2 is Megatron's", "trainer.fsdp.cpu_offload=true"],
        ),
        (["trainer.backend=fsdp"], ["_tiny.yaml:"]),
        (["trainer.fsdp.cpu_offload=true"], ["true is FSDP's"]),
        (["trainer=fsdp2"], ["fsdp, megatron"]),
        (["trainer=fsdp", "trainer.fsdp.replicate=0"], ["trainer.fsdp.replicate: 0"]),
        (
            ["trainer=fsdp", "trainer.fsdp.replicate=2", "trainer.tensor_parallel=2"],
            ["2 is no multiple of 4"],
        ),
        (["trainer=fsdp", "trainer.recompute.granularity=selective"], ["give full, or null"]),
        (["trainer=fsdp", "trainer.ranks=3"], ["give 72 prompts"]),
        (
            ["trainer=fsdp", "trainer.ranks=4", "trainer.tensor_parallel=4"],
            ["trainer.tensor_parallel: 4 does not divide the model's KV heads"],
        ),
    ],
)
def test_what_cannot_be_is_told_under_its_key_and_all_at_once(overrides: list[str], told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("grpo_tiny", overrides)
    for part, violation in zip(told, caught.value.violations, strict=True):
        assert part in violation


def test_tensor_parallelism_cuts_every_expert_under_fsdp_and_not_under_megatron() -> None:
    config = TrainConfig()
    config.trainer.ranks = config.trainer.tensor_parallel = 4
    config.trainer.backend = "fsdp"
    shape = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 8, "moe_intermediate_size": 6}
    assert config_violations(config) == []
    (found,) = shape_violations(config, shape)
    assert "trainer.tensor_parallel: 4 does not divide the model's expert width" in found.text
    config.trainer.backend = "megatron"
    assert shape_violations(config, shape) == []


def test_a_policy_in_nvfp4_takes_no_checkpoint_that_is_quantized_and_none_of_gpt_oss() -> None:
    config = TrainConfig()
    config.policy.qat = "w4a4"
    shape = {"num_attention_heads": 8, "num_key_value_heads": 8}
    assert shape_violations(config, shape | {"num_experts": 8}) == []
    for more in ({"quantization_config": {"quant_method": "fp8"}}, {"model_type": "gpt_oss"}):
        (found,) = shape_violations(config, shape | more)
        assert found.keys == ("policy.qat", "model.path")


@pytest.mark.parametrize(
    "model", ["model.path=tiny:qwen3-moe", "model.catalog=qwen3-30b-a3b model.path=org/one-that-is-not-here"]
)
def test_experts_in_nvfp4_are_for_machines_with_gpus(model: str) -> None:
    packed = ["trainer=fsdp", "policy.qat=w4a4", *model.split()]
    with pytest.raises(ConfigError) as caught:
        load_config("grpo_tiny_vllm", packed)
    (found,) = caught.value.violations
    assert found.startswith("policy.qat: w4a4, but the model has experts")
    assert load_config("grpo_tiny_vllm", [*packed, "ray.address=gpus:6379"]).policy.qat == "w4a4"


def test_every_key_reaches_the_policy() -> None:
    config = load_config("grpo_qwen3_4b", ["trainer=fsdp"])
    config.trainer.tensor_parallel = config.trainer.fsdp.replicate = 2
    config.trainer.fsdp.reshard_after_forward, config.trainer.fsdp.cpu_offload = False, True
    config.trainer.optimizer.lr_decay, config.trainer.optimizer.lr_decay_steps = "cosine", 100
    config.trainer.optimizer.min_lr, config.trainer.optimizer.max_skipped_steps = 1e-7, 5
    made = policy_config(config, "model", PolicyLossConfig())
    assert isinstance(made, FSDPPolicyConfig)
    assert made.layout == FSDPLayout(replicate=2, tensor_parallel=2)
    assert (made.reshard_after_forward, made.cpu_offload, made.recompute) == (False, True, True)
    assert (made.model_path, made.micro_batch, made.dtype, made.max_skipped_steps) == (
        "model",
        4,
        torch.bfloat16,
        5,
    )
    decay = {"lr_decay": "cosine", "lr_decay_steps": 200, "min_lr": 1e-7}
    assert made.optimizer == AdamConfig(
        lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, warmup_steps=20, **decay
    )


def test_a_run_that_ends_in_its_warm_up_would_decay_after_it() -> None:
    config = load_config("grpo_qwen3_4b", ["algorithm.steps=1", "trainer.optimizer.lr_decay=linear"])
    made = policy_config(config, "model", PolicyLossConfig()).optimizer
    assert made.lr_decay_steps == made.warmup_steps + config.algorithm.minibatches


def test_a_policy_that_cannot_be_says_all_that_is_wrong() -> None:
    with pytest.raises(ValueError) as caught:
        FSDPPolicyConfig("model", micro_batch=0, optimizer=AdamConfig(cpu_offload_fraction=0.5))
    assert "micro_batch is 0" in str(caught.value)
    assert "cpu_offload_fraction is Megatron's" in str(caught.value)
    assert FSDPLayout(replicate=2, tensor_parallel=2).violations(6) == [
        "6 ranks are no multiple of replicate x tensor_parallel = 4"
    ]


def test_a_refit_from_fsdp_is_planned_from_its_shards_but_not_over_tensor_parallelism() -> None:
    def plan(*overrides: str) -> TrainLayout | FsdpLayout:
        return plan_of(load_config("grpo_qwen3_4b", ["trainer=fsdp", "trainer.ranks=4", *overrides])).train

    assert plan() == FsdpLayout(4)
    assert plan("trainer.fsdp.replicate=2") == FsdpLayout(2, 2)
    with pytest.raises(ConfigError, match="FSDP2 over TP 2 can't be planned"):
        plan("trainer.tensor_parallel=2")
    assert plan("policy.qat=w4a4") == FsdpLayout(4)
    assert plan(
        "policy.qat=int4", "generation.weight_dtype=int4", "policy.refit.trainer_quantize_int4=true"
    ) == FsdpLayout(4)
