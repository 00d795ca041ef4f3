"""What recipes ask of vLLM for the model at hand."""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.kernel import KernelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import map_mxfp4_backend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import map_nvfp4_backend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import map_unquantized_backend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.rollout.arguments import vllm_arguments
from rlrefit.recipes.tiny.checkpoints import KINDS
from rlrefit.workers.engines.vllm.layouts import _PLAIN_MOE_BACKENDS
from rlrefit.workers.trainers.qat.config import DEFAULT_EXCLUDED


def test_an_fp8_cache_and_a_backend_are_asked_for_by_vllms_own_names() -> None:
    names = ("kv_cache_dtype", "attention_backend")
    assert vllm_arguments(load_config("grpo_qwen3_4b")).keys().isdisjoint(names)
    recipe = load_config("grpo_qwen3_4b_fp8_kv", ["generation.vllm.attention_backend=TRITON_ATTN"])
    arguments = vllm_arguments(recipe)
    assert [arguments[name] for name in names] == ["fp8", "TRITON_ATTN"]
    assert {*names} <= EngineArgs.__dataclass_fields__.keys()


def test_fp8_weights_come_from_the_trainer_or_from_vllm_itself() -> None:
    experts = {"num_experts": 8, "num_hidden_layers": 2}
    arguments = vllm_arguments(load_config("grpo_qwen3_30b_a3b_fp8"), experts)
    assert arguments["load_format"] == "dummy"
    quantization = arguments["hf_overrides"]["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    assert quantization["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    ]
    itself = load_config("grpo_qwen3_30b_a3b_fp8", ["policy.refit.trainer_quantize_fp8=false"])
    arguments = vllm_arguments(itself, experts)
    assert (arguments["quantization"], "hf_overrides" in arguments) == ("fp8_per_block", False)
    # A checkpoint of FP8 blocks says all that by itself.
    ready = vllm_arguments(itself, {**experts, "quantization_config": {"quant_method": "fp8"}})
    assert ready.keys().isdisjoint({"quantization", "hf_overrides"})


def test_an_engine_in_mxfp8_takes_all_from_the_trainer_and_its_experts_by_a_backend_of_vllms_choice() -> None:
    recipe = load_config("grpo_qwen3_30b_a3b_fp8", ["generation.weight_dtype=mxfp8"])
    arguments = vllm_arguments(recipe, {"num_experts": 8})
    assert (arguments["load_format"], "moe_backend" in arguments) == ("dummy", False)
    engine = CompressedTensorsConfig.from_config(arguments["hf_overrides"]["quantization_config"])
    assert engine._is_mxfp8(engine.target_scheme_map["Linear"]["weights"])
    for module in ("model.layers.0.mlp.gate", "lm_head", "model.layers.1.mlp.shared_expert_gate"):
        assert should_ignore_layer(module, engine.ignore)
    for module in ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.gate_proj"):
        assert not should_ignore_layer(module, engine.ignore)


@pytest.mark.parametrize("group", [32, 128])
def test_an_engine_in_int4_takes_all_from_the_trainer_in_groups_of_the_recipes(group: int) -> None:
    # Not by overrides, which a machine without AVX-512 refuses.
    recipe = load_config("grpo_tiny_vllm")
    recipe.generation.weight_dtype, recipe.generation.weight_group = "int4", group
    arguments = vllm_arguments(recipe)
    assert (arguments["load_format"], "moe_backend" in arguments) == ("dummy", False)
    engine = CompressedTensorsConfig.from_config(arguments["hf_overrides"]["quantization_config"])
    weights = engine.target_scheme_map["Linear"]["weights"]
    assert engine._is_wNa16_group_channel(weights, None)
    assert (weights.num_bits, weights.group_size, weights.symmetric) == (4, group, True)
    for module in ("model.layers.0.mlp.gate", "lm_head", "model.layers.1.mlp.shared_expert_gate"):
        assert should_ignore_layer(module, engine.ignore)
    assert not should_ignore_layer("model.layers.0.mlp.down_proj", engine.ignore)
    assert vllm_arguments(recipe, {"num_experts": 8})["moe_backend"] == "marlin"


def test_an_engine_of_packed_experts_starts_from_a_checkpoint_without_them() -> None:
    config = load_config("grpo_qwen3_4b")
    config.generation.weight_dtype, config.policy.refit.trainer_quantize_mxfp4 = "mxfp4", True
    arguments = vllm_arguments(config, {"model_type": "gpt_oss", "num_local_experts": 8})
    assert arguments["load_format"] == "dummy"
    assert "quantization" not in arguments
    assert map_mxfp4_backend(arguments["moe_backend"]).name == "MARLIN"
    quantization = arguments["hf_overrides"]["quantization_config"]
    oss = SimpleNamespace(model_type="gpt_oss")
    assert GptOssMxfp4Config.override_quantization_method(quantization, None, oss) == "gpt_oss_mxfp4"


def test_an_engine_of_packed_weights_leaves_out_the_layers_that_training_leaves_out():
    config = load_config("grpo_tiny_vllm", ["trainer=fsdp", "policy.qat=w4a16", "ray.address=gpus:6379"])
    arguments = vllm_arguments(config, {"num_hidden_layers": 2})
    engine = ModelOptNvFp4Config.from_config(arguments["hf_overrides"]["quantization_config"])
    assert arguments["load_format"] == "dummy"
    assert (engine.quant_method, engine.group_size) == ("W4A16_NVFP4", 16)
    for module in ("model.layers.0.mlp.gate", "lm_head", "model.layers.0.conv1d", "visual.embedder.proj"):
        assert any(fnmatchcase(module, pattern) for pattern in DEFAULT_EXCLUDED)
        assert engine.is_layer_excluded(module)
    for module in ("model.layers.0.mlp.gate_up_proj", "model.layers.1.self_attn.o_proj"):
        assert not engine.is_layer_excluded(module)


@pytest.mark.parametrize(("qat", "backend"), [("w4a16", "MARLIN"), ("w4a4", None)])
def test_packed_experts_are_computed_by_marlin_where_inputs_stay_as_they_are_and_else_by_vllms_choice(
    qat: str, backend: str | None
) -> None:
    config = load_config(
        "grpo_tiny_vllm",
        ["trainer=fsdp", f"policy.qat={qat}", "model.path=tiny:qwen3-moe", "ray.address=gpus:6379"],
    )
    asked = vllm_arguments(config, KINDS["qwen3-moe"]).get("moe_backend")
    assert (None if asked is None else map_nvfp4_backend(asked).name) == backend


@pytest.mark.parametrize(
    ("hf_config", "asked"),
    [
        (None, False),
        ({"hidden_size": 64}, False),
        ({"num_experts": 8}, True),
        ({"text_config": {"n_routed_experts": 8}}, True),
        ({"num_local_experts": 8, "quantization_config": {"quant_method": "mxfp4"}}, False),
    ],
)
def test_plain_experts_are_computed_by_a_backend_that_leaves_them_as_loaded(
    hf_config: dict[str, Any] | None, asked: bool
):
    arguments = vllm_arguments(load_config("grpo_qwen3_4b"), hf_config)
    assert ("moe_backend" in arguments) == asked
    if asked:
        config = KernelConfig(moe_backend=arguments["moe_backend"])
        assert map_unquantized_backend(config.moe_backend).name in _PLAIN_MOE_BACKENDS
