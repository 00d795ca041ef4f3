"""Combinations of values that cannot run, and those that can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.recipes.algorithms.losses import AGGREGATIONS
from rlrefit.recipes.config.checks import CHOICES, LEAST, RANGES, config_violations, value_at
from rlrefit.recipes.config.engines import ENABLED, needs_bfloat16
from rlrefit.recipes.config.load import TrainConfig, load_config, model_violations
from rlrefit.recipes.config.machine import gpu_violations

VLLM = {"generation.backend": "vllm"}
FP8 = {"generation.weight_dtype": "fp8"}
MXFP8 = {"generation.weight_dtype": "mxfp8"}
QUANTIZES = {"policy.refit.trainer_quantize_fp8": True}
MXFP4 = VLLM | {"policy.refit.trainer_quantize_mxfp4": True, "generation.weight_dtype": "mxfp4"}
INT4 = VLLM | {"policy.refit.trainer_quantize_int4": True, "generation.weight_dtype": "int4"}
DAPO = {"algorithm.name": "dapo"}
SHARED = {ENABLED: True, "trainer.distributed_optimizer": True}
OFFLOAD = "trainer.optimizer.cpu_offload_fraction"
GRANULARITY = "trainer.recompute.granularity"
PROMPTS, MINIBATCHES = "algorithm.prompts_per_step", {"algorithm.minibatches": 4}
EXPERTS = {
    "trainer.tensor_parallel": 2,
    "trainer.expert_parallel": 4,
    "trainer.expert_tensor_parallel": 2,
}
LORA = {"trainer.backend": "fsdp", "trainer.lora.rank": 4}
MEGATRON_LORA, TP = {"trainer.lora.rank": 4}, "trainer.tensor_parallel"
ALONE = {"policy.refit.lora": "adapter"}
NATIVE = VLLM | FP8 | QUANTIZES | {"trainer.fp8_param": True, "trainer.distributed_optimizer": True}
INT4_QAT = INT4 | {"policy.qat": "int4"}
QAT = VLLM | {"trainer.backend": "fsdp", "trainer.distributed_optimizer": False, "policy.qat": "w4a4"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        # One violation, however many rules build on the value.
        ({"trainer.tensor_parallel": 0}, "at least 1"),
        ({"algorithm.group_size": 1}, "at least 2"),
        ({"seed": 2**31}, "less than 2147483648"),
        # vLLM would take 0.01 in its place.
        ({"generation.temperature": 0.005}, "at least 0.01"),
        (EXPERTS | {"trainer.ranks": 4}, "4 is no multiple of 8, the ranks of one copy of the experts"),
        (MINIBATCHES | {"trainer.ranks": 3, PROMPTS: 32}, "give 36 prompts"),
        # 48 rollouts would be 12 each, one and a half groups.
        (MINIBATCHES | {PROMPTS: 6}, "give 8 prompts"),
        ({"algorithm.dynamic_sampling": True}, "algorithm.name=dapo"),
        ({"algorithm.overlong_buffer": 2}, "algorithm.name=dapo"),
        (DAPO | {"algorithm.overlong_buffer": 5}, "at most 4"),
        (DAPO, "no part of DAPO is on"),
        (VLLM | {"generation.vllm.max_model_len": 19}, "at least 20"),
        (QUANTIZES, "give generation.weight_dtype=fp8"),
        (FP8 | {"model.dtype": "float32"} | QUANTIZES, "BF16 or FP16"),
        (FP8, "give policy.refit.trainer_quantize_fp8=true"),
        ({"generation.backend": "sglang"} | FP8, "the sglang engine"),
        ({"generation.backend": "sglang"} | QUANTIZES | MXFP8, "to vLLM alone"),
        (VLLM | MXFP8, "give policy.refit.trainer_quantize_fp8=true"),
        (VLLM | MXFP8 | QUANTIZES | {"generation.vllm.kv_cache_dtype": "fp8"}, "has not run"),
        (VLLM | MXFP8 | {"model.dtype": "float32"} | QUANTIZES, "BF16 or FP16"),
        ({"policy.refit.trainer_quantize_mxfp4": True}, "give generation.weight_dtype=mxfp4"),
        (
            VLLM | MXFP8 | QUANTIZES | {"policy.refit.trainer_quantize_mxfp4": True},
            "give generation.weight_dtype=mxfp4",
        ),
        ({"policy.refit.trainer_quantize_int4": True}, "give generation.weight_dtype=int4"),
        (INT4 | {"generation.weight_group": 16}, "give 32, 64 or 128"),
        (VLLM | {"generation.weight_group": 64}, "of generation.weight_dtype=int4 alone"),
        (MXFP4 | QUANTIZES, "give generation.weight_dtype=fp8"),
        (LORA | MXFP4 | ALONE, "weight_dtype mxfp4 takes from the trainer"),
        ({"policy.refit.lora": "adapter"}, "give merge"),
        ({"trainer.ranks": 2, TP: 2, "trainer.lora.rank": 3}, "over whose ranks Megatron cuts it"),
        (MEGATRON_LORA | {"trainer.lora.target_modules": ["q_proj", "v_proj"]}, "without k_proj"),
        (
            MEGATRON_LORA | {"trainer.lora.target_modules": ["lm_head"]},
            "no layer that Megatron has adapters for",
        ),
        (
            {"trainer.ranks": 2, "trainer.expert_tensor_parallel": 2} | MEGATRON_LORA,
            "give trainer.expert_tensor_parallel=1",
        ),
        (SHARED | MEGATRON_LORA, "out of the buffers by which it leaves a GPU"),
        (LORA | {"trainer.lora.target_modules": []}, "names no layer"),
        ({"trainer.ranks": 2, "trainer.tensor_parallel": 2} | LORA, "give trainer.tensor_parallel=1"),
        (LORA | VLLM | {"generation.vllm.load_format": "dummy"} | ALONE, "leaves random"),
        (LORA | {"generation.tensor_parallel": 2} | ALONE, "more generation.replicas"),
        (VLLM | ALONE | LORA | {"trainer.lora.rank": 600}, "above 512"),
        (LORA | {ENABLED: True} | ALONE, "discard as they sleep"),
        ({"policy.qat": "fp4"}, "off, w4a4, w4a16, int4"),
        ({"trainer.optimizer.lr_decay": "linear", "trainer.optimizer.min_lr": 1.0}, "would rise"),
        (
            {
                "trainer.optimizer.lr_decay": "linear",
                "trainer.optimizer.lr_decay_steps": 5,
                "trainer.optimizer.warmup_steps": 5,
            },
            "give at most 4",
        ),
        ({"trainer.backend": "fsdp", "trainer.ranks": 4, "trainer.context_parallel": 2}, "whole rows"),
        ({"trainer.context_parallel": 2, "trainer.ranks": 3}, "3 is no multiple of 2"),
        ({"trainer.virtual_pipeline": 2}, "more stages"),
        ({"trainer.num_layers_in_first_pipeline_stage": 1}, "more stages"),
        ({GRANULARITY: "all"}, "full nor selective"),
        ({GRANULARITY: "full"}, "uniform or block, and num_layers"),
        ({"trainer.recompute.method": "block"}, "granularity full"),
        ({"trainer.recompute.modules": ["moe"]}, "granularity selective"),
        ({GRANULARITY: "selective", "trainer.recompute.modules": ["attention"]}, "core_attn"),
        ({OFFLOAD: 1.5}, "0 (none) to 1 (all)"),
        ({"trainer.distributed_optimizer": False, OFFLOAD: 1}, "distributed_optimizer=true"),
        ({"generation.pipeline_parallel": 2}, "generation.backend=vllm"),
        (VLLM | {"generation.vllm.distributed_executor_backend": "ray"}, "give mp"),
        ({"data.overlong_prompts": "cut"}, "one of error, drop"),
        ({"reward.function": "arithmetik"}, "give arithmetic, boxed_math"),
        # Trainer and engine on the same GPUs.
        (SHARED | {OFFLOAD: 0.5}, "give 0"),
        (SHARED | {"trainer.ranks": 2}, "give generation.replicas=2"),
        (SHARED | {"generation.tensor_parallel": 2, "trainer.ranks": 1}, "give trainer.ranks=2"),
        ({"generation.colocated.multi_stage_wake_up": False}, f"{ENABLED}=true"),
    ],
)
def test_what_cannot_be_is_one_violation_of_its_key(config_of, values: dict[str, Any], told: str) -> None:
    (found,) = config_violations(config_of(values))
    assert found.keys[0] == [*values][-1]
    assert told in found.text


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"trainer.ranks": 3, "algorithm.minibatches": 4, "algorithm.prompts_per_step": 36},
        # Context-parallel ranks have the same rollouts, which need not divide by them.
        {"trainer.ranks": 6, "trainer.context_parallel": 3},
        DAPO | {"algorithm.dynamic_sampling": True, "algorithm.overlong_buffer": 2},
        {"generation.vllm.max_model_len": 19},  # the transformers engine does not read it
        QUANTIZES | FP8,
        VLLM | FP8,
        VLLM | MXFP8 | QUANTIZES,
        MXFP4,
        MXFP4 | {"policy.refit.delta": "always", "trainer.backend": "fsdp", "trainer.distributed_optimizer": False},
        # A short run takes the first steps of its recipe's warm-up.
        {"trainer.optimizer.warmup_steps": 2 * TrainConfig().algorithm.steps},
        {"trainer.optimizer.warmup_steps": 2 * TrainConfig().algorithm.steps, "trainer.optimizer.lr_decay": "linear"},
        {"trainer.optimizer.lr_decay": "linear", "trainer.optimizer.min_lr": TrainConfig().trainer.optimizer.lr},
        {"reward.function": "my.rewards.score"},
        {"reward.function": "my.rewards:score"},
        SHARED | {"generation.colocated.multi_stage_wake_up": False},
        LORA,
        MEGATRON_LORA | {"trainer.ranks": 2, TP: 2},
        MEGATRON_LORA | {"trainer.lora.target_modules": ["up_proj", "gate_proj", "linear_qkv", "q_proj"]},
        VLLM | MEGATRON_LORA | {"generation.tensor_parallel": 2} | ALONE,
        VLLM | LORA | {"generation.tensor_parallel": 2} | ALONE,
        QAT,
        QAT | {"generation.tensor_parallel": 2, "generation.replicas": 2, "policy.refit.delta": "always"},
        QAT | {ENABLED: True},
        INT4_QAT,
        INT4_QAT | {"generation.weight_group": 128, "trainer.tensor_parallel": 2, "trainer.ranks": 2},
        NATIVE,
        NATIVE | {ENABLED: True},
    ],
)  # fmt: skip
def test_what_can_be_is_no_violation(config_of, values: dict[str, Any]) -> None:
    assert [found.text for found in config_violations(config_of(values))] == []


@pytest.mark.parametrize(
    ("base", "values"),
    [
        (
            QAT | {"trainer.ranks": 2},
            {
                "trainer.tensor_parallel": 2,
                "trainer.lora.rank": 4,
                "generation.backend": "transformers",
                "generation.vllm.kv_cache_dtype": "fp8",
                "trainer.fsdp.cpu_offload": True,
                "model.dtype": "float32",
            },
        ),
        (VLLM | {"policy.qat": "w4a16"}, {"trainer.optimizer.cpu_offload_fraction": 0.5}),
        (
            INT4_QAT,
            {
                "generation.weight_dtype": "auto",
                "policy.refit.trainer_quantize_int4": False,
                "generation.backend": "transformers",
                "trainer.optimizer.cpu_offload_fraction": 0.5,
                "model.dtype": "float32",
            },
        ),
        (QAT, {"generation.weight_dtype": "int4"}),
    ],
)
def test_all_that_keeps_a_policy_from_training_in_four_bits_is_told_at_once(
    config_of, base: dict[str, Any], values: dict[str, Any]
) -> None:
    found = [v.keys for v in config_violations(config_of(base | values)) if v.keys[0] == "policy.qat"]
    assert {other for _, other in found} == values.keys()


def test_all_that_keeps_experts_from_travelling_in_mxfp4_is_told_at_once(config_of) -> None:
    values = {
        "policy.refit.trainer_quantize_mxfp4": False,
        "generation.backend": "transformers",
        "model.dtype": "float32",
    }
    found = [v.keys for v in config_violations(config_of(MXFP4 | values))]
    assert found == [("generation.weight_dtype", key) for key in values]
    with pytest.raises(ValueError, match=r"policy\.refit\.trainer_quantize_mxfp4: "):
        RefitConfig(trainer_quantize_fp8=True, trainer_quantize_mxfp4=True)
    with pytest.raises(ValueError, match=r"policy\.refit\.delta_base: .*trainer_quantize_mxfp4"):
        RefitConfig(trainer_quantize_mxfp4=True, delta="always", delta_base="optimizer")


def test_all_that_keeps_weights_from_travelling_in_int4_is_told_at_once(config_of) -> None:
    values = {
        "policy.refit.trainer_quantize_int4": False,
        "generation.backend": "transformers",
        "model.dtype": "float32",
        "generation.vllm.kv_cache_dtype": "fp8",
    }
    found = [v.keys for v in config_violations(config_of(INT4 | values))]
    assert [keys for keys in found if "generation.weight_dtype" in keys[:1]] == [
        ("generation.weight_dtype", key) for key in values
    ]
    assert config_violations(config_of(INT4 | {"generation.weight_group": 128})) == []
    other = {"generation.sglang.server_args": {"moe_runner_backend": "flashinfer_trtllm"}}
    (one,) = config_violations(config_of(INT4 | {"generation.backend": "sglang"} | other))
    assert one.keys == ("generation.weight_dtype", "generation.sglang.server_args.moe_runner_backend")
    with pytest.raises(ValueError, match=r"policy\.refit\.trainer_quantize_int4: "):
        RefitConfig(trainer_quantize_fp8=True, trainer_quantize_int4=True)
    with pytest.raises(ValueError, match=r"policy\.refit\.delta_base: .*trainer_quantize_int4"):
        RefitConfig(trainer_quantize_int4=True, delta="always", delta_base="optimizer")
    with pytest.raises(ValueError, match=r"policy\.refit\.int4_scale: "):
        RefitConfig(trainer_quantize_int4=True, int4_scale="amax/8")
    with pytest.raises(ValueError, match=r"policy\.refit\.int4_scale: .*trainer_quantize_int4"):
        RefitConfig(int4_scale="amax/7")
    assert config_violations(config_of(INT4 | {"policy.refit.int4_scale": "amax/7"})) == []


def test_all_that_keeps_weights_from_staying_in_fp8_is_told_at_once(config_of) -> None:
    values = {
        "generation.weight_dtype": "auto",
        "model.dtype": "float32",
        "trainer.distributed_optimizer": False,
        "trainer.optimizer.cpu_offload_fraction": 0.5,
        "policy.qat": "w4a16",
    }
    keys = [v.keys for v in config_violations(config_of(NATIVE | values)) if v.keys[0] == "trainer.fp8_param"]
    assert {other for _, other in keys} == values.keys()
    quantizes = "policy.refit.trainer_quantize_fp8"
    found = config_violations(config_of(NATIVE | {quantizes: False}))
    assert [v.keys for v in found] == [("trainer.fp8_param", quantizes)]


def test_all_that_can_not_share_gpus_is_told_at_once_with_its_remedy(config_of) -> None:
    values = {
        "generation.tensor_parallel": 4,
        "generation.vllm.distributed_executor_backend": "ray",
        "ray.generation_env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "trainer.distributed_optimizer": False,
        "model.dtype": "float32",
    }
    remedies = {
        "trainer.ranks": "give trainer.ranks=4",
        "generation.vllm.distributed_executor_backend": "give mp",
        "ray.generation_env.PYTORCH_CUDA_ALLOC_CONF": "leave expandable_segments out",
        "trainer.distributed_optimizer": "give true",
        "model.dtype": "give bfloat16 or auto, or train with trainer=fsdp",
    }
    found = {v.keys[0]: v.text for v in config_violations(config_of(SHARED | VLLM | values))}
    assert found.keys() == remedies.keys()
    assert [key for key, remedy in remedies.items() if remedy not in found[key]] == []


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
@pytest.mark.parametrize("recipe", ["dapo_tiny", "grpo_tiny_moe", "grpo_tiny_pp"])
def test_either_trainer_and_algorithm_can_share_its_gpus(data, recipe: str, trainer: str) -> None:
    config = load_config(recipe, [*data, f"{ENABLED}=true", f"trainer={trainer}"])
    assert needs_bfloat16(config) is (trainer == "megatron")


def test_every_rule_names_a_key_of_the_schema() -> None:
    keys = [*CHOICES, *LEAST, *(key for key, _, _ in RANGES)]
    assert len(keys) == len(set(keys))
    for key in keys:
        value_at(TrainConfig(), key)
    assert CHOICES["algorithm.aggregation"] == AGGREGATIONS


def test_the_refit_configurations_own_violations_are_told_and_every_transport_is_taken(
    violations,
) -> None:
    transport, verify = violations("policy.refit.verify=always", "policy.refit.transport=m3n")
    assert verify.startswith("policy.refit.verify: ")
    assert verify.endswith("[override 'policy.refit.verify=always']")
    assert transport.startswith("policy.refit.transport: ")
    for offered in ("auto", "ipc", "pull", "p2p", "m2n", "golden"):
        assert violations(f"policy.refit.transport={offered}") == ()


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
WIDE = {**MOE, "intermediate_size": 256, "moe_intermediate_size": 192}
OSS = {**DENSE, "model_type": "gpt_oss", "num_local_experts": 8, "sliding_window": 8}
SEEING = {"model_type": "vlm", "text_config": DENSE}
SHARED_EXPERT = {"shared_expert_intermediate_size": 48}


@pytest.mark.parametrize(
    ("values", "model", "told"),
    [
        ({"trainer.tensor_parallel": 32}, DENSE, "num_attention_heads 16"),
        ({"trainer.tensor_parallel": 16}, DENSE, "vocab_size 1000"),
        ({"trainer.tensor_parallel": 6}, DENSE, "num_key_value_heads 4"),
        ({"trainer.tensor_parallel": 8}, DENSE, ""),  # more ranks than query groups replicate them
        ({"trainer.pipeline_parallel": 4}, DENSE, "num_hidden_layers 6"),
        ({"trainer.pipeline_parallel": 4}, SEEING, "num_hidden_layers 6"),
        ({"trainer.context_parallel": 2}, DENSE, ""),
        ({"trainer.context_parallel": 2}, SEEING, "text alone"),
        ({"trainer.context_parallel": 4}, OSS, ""),
        ({"trainer.tensor_parallel": 2, "trainer.context_parallel": 4}, OSS, "a rank has 2 "),
        ({"trainer.tensor_parallel": 8, "trainer.context_parallel": 2}, OSS, "a rank has 1 "),
        ({"trainer.tensor_parallel": 2, "trainer.context_parallel": 4}, DENSE, ""),
        *(
            ({"trainer.tensor_parallel": 2, "trainer.context_parallel": 4}, DENSE | family, "a rank has 2 ")
            for family in (
                {"model_type": "gemma3_text", "sliding_window": 8},
                {"model_type": "mistral", "sliding_window": 8},
            )
        ),
        # Mistral's later models have no window.
        (
            {"trainer.tensor_parallel": 2, "trainer.context_parallel": 4},
            DENSE | {"model_type": "mistral", "sliding_window": None},
            "",
        ),
        (VLLM | {"policy.qat": "w4a4"}, DENSE, ""),
        (
            VLLM | {"policy.qat": "w4a4", "trainer.tensor_parallel": 4},
            DENSE,
            "the trainer has 24 of intermediate_size",
        ),
        (
            VLLM | {"policy.qat": "w4a4", "generation.tensor_parallel": 4},
            DENSE,
            "the engine has 24 of intermediate_size",
        ),
        ({"trainer.expert_parallel": 2}, DENSE, "(qwen3) has no experts"),
        ({"trainer.expert_tensor_parallel": 2}, DENSE, "no experts"),
        ({"trainer.expert_parallel": 3}, MOE, "give a divisor of 8"),
        ({"trainer.expert_parallel": 4, "trainer.expert_tensor_parallel": 3}, MOE, ""),
        ({"generation.tensor_parallel": 8}, DENSE, "KV heads"),
        (VLLM | {"generation.tensor_parallel": 8}, DENSE, ""),
        (VLLM | {"generation.pipeline_parallel": 8}, DENSE, "the model's layers"),
        (VLLM | {"generation.vllm.enable_expert_parallel": True}, DENSE, "no experts"),
        ({"generation.max_new_tokens": 60}, DENSE, "shorten either by 12"),
        (MEGATRON_LORA | ALONE, MOE, "transformers keeps experts in one tensor"),
        (MEGATRON_LORA | VLLM | ALONE, MOE, ""),
        (INT4, DENSE, ""),
        (INT4, SEEING, "text alone"),
        (INT4 | {"generation.weight_group": 32}, MOE, "48 of moe_intermediate_size"),
        (INT4 | {"generation.tensor_parallel": 2}, DENSE, "48 of intermediate_size"),
        (INT4 | {"generation.tensor_parallel": 4, "generation.vllm.enable_expert_parallel": True}, WIDE, ""),
        (INT4 | {"generation.tensor_parallel": 4}, WIDE, "48 of moe_intermediate_size"),
        (INT4 | {"generation.tensor_parallel": 4}, WIDE | {"head_dim": 6}, "24 of num_attention_heads"),
        (
            INT4 | {"generation.weight_group": 32},
            WIDE | SHARED_EXPERT,
            "48 of shared_expert_intermediate_size",
        ),
        (INT4, WIDE | {"n_shared_experts": 1, "kv_lora_rank": 64}, ""),
        (
            INT4 | {"generation.vllm.enable_expert_parallel": True, "generation.tensor_parallel": 4},
            WIDE | {"n_shared_experts": 1},
            "48 of n_shared_experts times moe_intermediate_size",
        ),
        (INT4 | {"generation.backend": "sglang"}, WIDE, ""),
        (INT4 | {"generation.backend": "sglang"}, WIDE | {"n_shared_experts": 1}, "shared experts"),
        (INT4 | {"generation.backend": "sglang"}, WIDE | {"kv_lora_rank": 64}, "latent attention"),
        (INT4 | {"generation.backend": "sglang"}, DENSE | {"linear_num_value_heads": 8}, "linear attention"),
        (MXFP4, MOE, "only GPT-OSS's experts"),
        (MXFP4, OSS, ""),
        (MXFP4, OSS | {"quantization_config": {"quant_method": "mxfp4"}}, "a copy in BF16"),
        ({"model.path": "awq"}, DENSE | {"quantization_config": {"quant_method": "awq"}}, "quantized (awq)"),
        ({"model.path": "fp8"}, DENSE | {"quantization_config": {"quant_method": "fp8"}}, ""),
    ],
)
def test_a_layout_that_the_model_cannot_take_names_its_key_and_size(
    config_of, values: dict[str, Any], model: dict[str, Any], told: str
) -> None:
    found = model_violations(config_of(values), model)
    if told:
        (text,) = [text for text in found if told in text]
        assert [*values][-1] in text
    else:
        assert found == []


def test_a_local_model_is_checked_while_the_recipe_is_read(violations, tmp_path: Path) -> None:
    (found,) = violations(f"model.path={tmp_path}")
    assert found.startswith(f"model.path: there is no {tmp_path}/config.json")
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "num_attention_heads": 3}))
    (found,) = violations(f"model.path={tmp_path}", "generation.tensor_parallel=1")
    assert found.startswith("trainer.tensor_parallel: 2 does not divide the model's attention heads")
    (tmp_path / "config.json").write_text("{")
    (found,) = violations(f"model.path={tmp_path}")
    assert "config.json is not JSON" in found
    (found,) = violations(f"model.path={tmp_path / 'config.json'}")
    assert "config.json is a file" in found


def test_models_and_data_that_are_not_there_are_all_named(violations, tmp_path: Path) -> None:
    files = (f"data.train={tmp_path}/a.jsonl", f"data.validation={tmp_path}/b.parquet")
    train, validation, model = violations("model.path='tiny:llama'", *files)
    assert f"{tmp_path}/a.jsonl" in train
    assert f"{tmp_path}/b.parquet" in validation
    assert "give one of tiny:qwen3, " in model
    assert violations("data.train=openai/gsm8k") == ()  # a data set of the hub, not a file


@pytest.mark.parametrize(
    ("values", "gpus", "told"),
    [
        ({}, 8, "6 trainer and 3 generation ranks take a GPU each, 9 in all, and this machine has 8"),
        ({}, 9, ""),
        ({}, 0, ""),  # ranks run on CPUs
        ({"ray.address": "auto"}, 8, ""),
        # On shared GPUs each is counted once; the transformers engine needs its own.
        (VLLM | SHARED, 6, ""),
        (VLLM | SHARED, 5, "6 ranks share a GPU each"),
        (SHARED, 6, "give generation.backend=vllm or sglang"),
        (VLLM | MXFP8 | QUANTIZES, 9, ""),
        (VLLM | MXFP8 | QUANTIZES, 0, "for CPUs"),
    ],
)
def test_ranks_have_to_fit_a_local_machines_gpus_and_not_a_clusters(
    config_of, values: dict[str, Any], gpus: int, told: str
) -> None:
    replicas = 6 if ENABLED in values else 3
    config = config_of({"trainer.ranks": 6, "generation.replicas": replicas, **values})
    found = [violation.text for violation in gpu_violations(config, gpus)]
    assert [told in text for text in found] == [True] * bool(told)


@pytest.mark.parametrize(("has", "gpus", "told"), [(True, 0, 0), (False, 0, 1), (False, 2, 0)])
def test_int4_takes_a_gpu_or_a_cpu_whose_vllm_has_a_product_with_it(
    config_of, monkeypatch: pytest.MonkeyPatch, has: bool, gpus: int, told: int
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_f": has})
    keys = "generation.weight_dtype", "ray.address"
    assert [v.keys for v in gpu_violations(config_of(INT4), gpus) if v.keys == keys] == [keys] * told
