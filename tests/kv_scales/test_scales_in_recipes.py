"""Scales of the KV cache as recipes ask for them: what can't have any is refused."""

from __future__ import annotations

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.recipes.config.checks import config_violations
from rlrefit.recipes.config.load import TrainConfig
from rlrefit.recipes.config.machine import gpu_violations
from rlrefit.recipes.config.model import shape_violations
from rlrefit.recipes.rollout.arguments import sglang_arguments


def recipe(backend: str = "vllm", cache: str = "fp8") -> TrainConfig:
    config = TrainConfig()
    config.policy.refit.kv_scales = True
    config.generation.backend = backend
    config.generation.vllm.kv_cache_dtype = config.generation.sglang.kv_cache_dtype = cache
    config.generation.sglang.disable_cuda_graph = backend == "sglang"
    return config


@pytest.mark.parametrize(
    ("backend", "cache"), [("transformers", "fp8"), ("vllm", "auto"), ("sglang", "auto")]
)
def test_scales_without_an_fp8_cache_are_one_violation(backend: str, cache: str) -> None:
    (found,) = config_violations(recipe(backend, cache))
    assert found.text.startswith("policy.refit.kv_scales:")


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_scales_for_an_fp8_cache_are_accepted_but_for_latent_attention(backend: str) -> None:
    config = recipe(backend)
    assert config_violations(config) == []
    assert shape_violations(config, {"num_attention_heads": 4}) == []
    (found,) = shape_violations(config, {"kv_lora_rank": 512})
    assert "latent attention" in found.text


def test_all_that_keeps_sglang_from_reading_scales_is_told_at_once() -> None:
    config = recipe("sglang")
    config.generation.sglang.disable_cuda_graph = False
    config.generation.sglang.attention_backend = "flashinfer"
    config.generation.sglang.server_args = {"kv_cache_dtype": "fp8_e5m2", "quantization_param_path": "a.json"}
    keys = {violation.keys[0].removeprefix("generation.sglang.") for violation in config_violations(config)}
    assert keys == {
        "disable_cuda_graph",
        "attention_backend",
        "server_args.kv_cache_dtype",
        "server_args.quantization_param_path",
    }
    config.policy.refit.kv_scales = False
    keys = {violation.keys[0].removeprefix("generation.sglang.") for violation in config_violations(config)}
    assert keys == {"server_args.kv_cache_dtype", "server_args.quantization_param_path"}


def test_graphs_are_left_where_sglang_has_tensors_of_scales_before_it_captures() -> None:
    config = recipe("sglang")
    config.generation.weight_dtype, config.policy.refit.trainer_quantize_fp8 = "fp8", True
    config.generation.sglang.disable_cuda_graph = False
    for backend, refused in (("fa3", 0), ("triton", 1), (None, 1)):
        config.generation.sglang.attention_backend = backend
        found = [v for v in config_violations(config) if v.keys[0] == "generation.sglang.disable_cuda_graph"]
        assert len(found) == refused


def test_sglangs_attention_on_cpus_reads_no_scales() -> None:
    config = recipe("sglang")
    (found,) = gpu_violations(config, 0)
    assert found.keys[0] == "policy.refit.kv_scales"
    assert [*gpu_violations(config, 2)] == []


def test_sglang_gets_its_own_name_of_the_cache() -> None:
    assert sglang_arguments(recipe("sglang"), None, 1, 0)["kv_cache_dtype"] == "fp8_e4m3"
    assert "kv_cache_dtype" not in sglang_arguments(recipe("sglang", "auto"), None, 1, 0)


def test_scales_beside_adapters_that_travel_alone_are_refused() -> None:
    found = RefitConfig.unchecked(kv_scales=True, lora="adapter").violations()
    assert [text.partition(":")[0] for text in found] == ["policy.refit.kv_scales"]


def test_an_unknown_cache_dtype_is_refused() -> None:
    found = [key for violation in config_violations(recipe(cache="fp4")) for key in violation.keys]
    assert any("kv_cache_dtype" in key for key in found)
