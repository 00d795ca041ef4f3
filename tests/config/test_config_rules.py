"""Combinations of values that cannot run, and those that can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlrefit.recipes.algorithms.losses import AGGREGATIONS
from rlrefit.recipes.config.checks import CHOICES, LEAST, RANGES, config_violations, value_at
from rlrefit.recipes.config.load import TrainConfig, model_violations
from rlrefit.recipes.config.machine import gpu_violations


def texts(config: TrainConfig) -> list[str]:
    return [violation.text for violation in config_violations(config)]


def test_the_schemas_defaults_satisfy_every_rule() -> None:
    assert texts(TrainConfig()) == []


def test_every_rule_names_a_key_of_the_schema() -> None:
    keys = [*CHOICES, *LEAST, *(key for key, _, _ in RANGES)]
    assert len(keys) == len(set(keys))
    for key in keys:
        value_at(TrainConfig(), key)
    assert CHOICES["algorithm.aggregation"] == AGGREGATIONS


def test_a_value_outside_its_range_is_one_violation_however_many_rules_build_on_it() -> None:
    config = TrainConfig()
    config.trainer.tensor_parallel = 0
    assert texts(config) == ["trainer.tensor_parallel: 0 is no parallel size; give at least 1"]


def test_a_group_of_one_is_refused_because_it_has_no_baseline() -> None:
    config = TrainConfig()
    config.algorithm.group_size = 1
    (found,) = texts(config)
    assert found.startswith("algorithm.group_size: 1 leaves a rollout nothing to be compared with")


def test_the_experts_mesh_has_to_divide_the_ranks_as_well() -> None:
    config = TrainConfig()
    config.trainer.ranks = 4
    config.trainer.tensor_parallel = 2
    config.trainer.expert_parallel = 4
    config.trainer.expert_tensor_parallel = 2
    (found,) = texts(config)
    assert "4 is no multiple of 8, the ranks of one copy of the experts" in found
    assert "expert_tensor_parallel 2 x expert_parallel 4 x pipeline_parallel 1" in found


def test_rollouts_that_do_not_split_evenly_get_the_next_number_of_prompts_that_does() -> None:
    config = TrainConfig()
    config.trainer.ranks = 3
    config.algorithm.minibatches = 4
    (found,) = texts(config)
    assert (
        "32 prompts in groups of 8 rollouts cannot be split evenly into 4 minibatches of whole groups"
        in found
    )
    assert "give 36 prompts" in found
    config.algorithm.prompts_per_step = 36  # 9 groups, so 72 rollouts, in a minibatch: 24 for each rank
    assert texts(config) == []


def test_a_minibatch_has_whole_groups_even_where_single_rollouts_would_split() -> None:
    config = TrainConfig()
    config.algorithm.prompts_per_step = 6
    config.algorithm.minibatches = 4  # 48 rollouts would be 12 each, one and a half groups
    (found,) = texts(config)
    assert "give 8 prompts" in found


@pytest.mark.parametrize(
    ("key", "value", "off"), [("dynamic_sampling", True, "false"), ("overlong_buffer", 2, "0")]
)
def test_keys_of_dapo_are_refused_with_grpo(key: str, value: object, off: str) -> None:
    config = TrainConfig()
    setattr(config.algorithm, key, value)
    (found,) = texts(config)
    assert found.endswith(f"set algorithm.name=dapo or algorithm.{key}={off}")
    config.algorithm.name = "dapo"
    assert texts(config) == []


def test_a_penalty_zone_longer_than_the_completions_is_refused() -> None:
    config = TrainConfig()
    config.algorithm.name = "dapo"
    config.algorithm.overlong_buffer = 5
    (found,) = texts(config)
    assert found.startswith("algorithm.overlong_buffer: 5 is longer than generation.max_new_tokens 4")


def test_vllm_has_to_take_the_longest_prompt_and_completion() -> None:
    config = TrainConfig()
    config.generation.vllm.max_model_len = 19
    assert texts(config) == []  # the transformers engine does not read it
    config.generation.backend = "vllm"
    (found,) = texts(config)
    assert "19 is less than data.max_prompt_tokens + generation.max_new_tokens = 20" in found


def test_the_refit_configurations_own_violations_are_reported_under_their_key(violations) -> None:
    (found,) = violations("policy.refit.verify=always")
    assert found.startswith("policy.refit.verify: 'always' is not one of off, sampled, full")
    assert found.endswith("[override 'policy.refit.verify=always']")


def test_a_transport_that_carries_no_refits_is_refused_and_those_offered_in_its_place_are_taken(
    violations,
) -> None:
    (found,) = violations("policy.refit.transport=m2n")
    assert found.startswith("policy.refit.transport: m2n carries no refits; give auto, ipc, p2p or golden")
    for offered in ("auto", "ipc", "p2p", "golden"):
        assert violations(f"policy.refit.transport={offered}") == ()


@pytest.mark.parametrize("name", ["arithmetic", "my.rewards.score", "my.rewards:score"])
def test_a_reward_is_bundled_or_a_dotted_path(violations, name: str) -> None:
    assert violations(f"reward.function='{name}'") == ()


def test_a_reward_that_is_neither_is_refused(violations) -> None:
    (found,) = violations("reward.function=arithmetik")
    assert "names no function; give arithmetic, boxed_math, math_verify, package.module.function" in found


DENSE = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 1000,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 48}


def layout(**sizes: int) -> TrainConfig:
    config = TrainConfig()
    for name, size in sizes.items():
        setattr(config.trainer, name, size)
    return config


@pytest.mark.parametrize(
    ("sizes", "key", "name"),
    [
        ({"tensor_parallel": 32}, "trainer.tensor_parallel", "num_attention_heads 16"),
        ({"tensor_parallel": 16}, "trainer.tensor_parallel", "vocab_size 1000"),
        ({"tensor_parallel": 6}, "trainer.tensor_parallel", "num_key_value_heads 4"),
        ({"pipeline_parallel": 4}, "trainer.pipeline_parallel", "num_hidden_layers 6"),
        ({"expert_parallel": 2}, "trainer.expert_parallel", "(qwen3) has no experts"),
        ({"expert_tensor_parallel": 2}, "trainer.expert_tensor_parallel", "(qwen3) has no experts"),
    ],
)
def test_a_layout_that_the_dense_model_cannot_take_names_its_size(sizes, key: str, name: str) -> None:
    assert any(
        text.startswith(f"{key}: ") and name in text for text in model_violations(layout(**sizes), DENSE)
    )


def test_more_tensor_parallel_ranks_than_query_groups_replicate_them() -> None:
    assert model_violations(layout(tensor_parallel=8), DENSE) == []


def test_experts_divide_by_their_own_parallel_sizes_only() -> None:
    assert model_violations(layout(expert_parallel=4, expert_tensor_parallel=3), MOE) == []
    (found,) = model_violations(layout(expert_parallel=3), MOE)
    assert found == (
        "trainer.expert_parallel: 3 does not divide the model's experts (num_experts 8); give a divisor of 8"
    )


def test_transformers_engines_cannot_replicate_kv_heads_and_vllm_can() -> None:
    config = TrainConfig()
    config.generation.tensor_parallel = 8
    (found,) = model_violations(config, DENSE)
    assert found.startswith("generation.tensor_parallel: 8 does not divide the model's KV heads")
    config.generation.backend = "vllm"
    assert model_violations(config, DENSE) == []


def test_prompts_and_completions_beyond_the_models_positions_are_refused() -> None:
    config = TrainConfig()
    config.generation.max_new_tokens = 60
    (found,) = model_violations(config, DENSE)
    assert "reach 76 tokens, more than the model's 64 positions" in found
    assert found.endswith("shorten either by 12")


def test_a_multimodal_models_language_part_is_read() -> None:
    assert model_violations(layout(pipeline_parallel=4), {"model_type": "vlm", "text_config": DENSE})


def test_transformers_configurations_are_read_like_their_json() -> None:
    from transformers import Qwen3Config

    (found,) = model_violations(layout(pipeline_parallel=4), Qwen3Config(num_hidden_layers=6, vocab_size=64))
    assert "num_hidden_layers 6" in found


def test_a_local_model_is_checked_while_the_recipe_is_read(violations, tmp_path: Path) -> None:
    (found,) = violations(f"model.path={tmp_path}")
    assert found.startswith(f"model.path: there is no {tmp_path}/config.json")
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "num_attention_heads": 3}))
    (found,) = violations(f"model.path={tmp_path}", "generation.tensor_parallel=1")
    assert found.startswith("trainer.tensor_parallel: 2 does not divide the model's attention heads")
    (tmp_path / "config.json").write_text("{")
    (found,) = violations(f"model.path={tmp_path}")
    assert "config.json is not JSON" in found


def test_an_unknown_bundled_model_lists_the_ones_that_are_there(violations) -> None:
    (found,) = violations("model.path='tiny:llama'")
    assert "is no bundled model; give one of tiny:qwen3, " in found


def test_data_files_that_are_not_there_are_both_named(violations, tmp_path: Path) -> None:
    found = violations(f"data.train={tmp_path}/a.jsonl", f"data.validation={tmp_path}/b.parquet")
    assert [
        f"there is no file {tmp_path}/{name}" in text for name, text in zip(("a", "b"), found, strict=True)
    ]
    assert violations("data.train=openai/gsm8k") == ()  # a data set of the hub, not a file


def test_ranks_have_to_fit_a_local_machines_gpus_and_not_a_clusters() -> None:
    config = layout(ranks=6)
    config.generation.replicas = 3
    (found,) = gpu_violations(config, gpus=8)
    assert "6 trainer and 3 generation ranks take a GPU each, 9 in all, and this machine has 8" in found.text
    assert list(gpu_violations(config, gpus=9)) == []
    assert list(gpu_violations(config, gpus=0)) == []  # ranks run on CPUs
    config.ray.address = "auto"
    assert list(gpu_violations(config, gpus=8)) == []


def test_the_trainer_quantizes_for_engines_that_hold_fp8_and_from_16_bits() -> None:
    config = TrainConfig()
    config.policy.refit.trainer_quantize_fp8 = True
    assert [text.partition(":")[0] for text in texts(config)] == ["policy.refit.trainer_quantize_fp8"]
    config.generation.weight_dtype = "fp8"
    assert texts(config) == []
    config.model.dtype = "float32"
    (found,) = texts(config)
    assert "codes are made of BF16 or FP16 weights" in found


def test_an_adapter_alone_is_refused_as_no_recipe_trains_one() -> None:
    config = TrainConfig()
    config.policy.refit.lora = "adapter"
    (found,) = texts(config)
    assert found.startswith("policy.refit.lora: no recipe trains an adapter")
    assert "give merge" in found


def test_only_vllm_quantizes_weights_itself() -> None:
    config = TrainConfig()
    config.generation.weight_dtype = "fp8"
    for backend in ("transformers", "sglang"):
        config.generation.backend = backend
        (found,) = texts(config)
        assert found.startswith(
            f"generation.weight_dtype: the {backend} engine does not quantize weights itself"
        )
        assert "give policy.refit.trainer_quantize_fp8=true" in found
    config.generation.backend = "vllm"
    assert texts(config) == []


def test_a_rate_that_decays_has_steps_to_do_so_and_does_not_rise() -> None:
    config = TrainConfig()
    config.trainer.optimizer.warmup_steps = config.algorithm.steps
    assert texts(config) == []
    config.trainer.optimizer.lr_decay = "linear"
    config.trainer.optimizer.min_lr = 1.0
    assert [text.partition(":")[0] for text in texts(config)] == [
        "trainer.optimizer.warmup_steps",
        "trainer.optimizer.min_lr",
    ]
    config.trainer.optimizer.lr_decay_steps = config.algorithm.steps + 1
    config.trainer.optimizer.min_lr = config.trainer.optimizer.lr
    assert texts(config) == []
