"""Scales of the KV cache as recipes ask for them: what can't have any is refused, and each calibration is sent once."""

from __future__ import annotations

import pytest

from rlrefit.integration.config import RefitConfig
from rlrefit.recipes.config.checks import config_violations
from rlrefit.recipes.config.load import TrainConfig
from rlrefit.recipes.config.model import shape_violations


def recipe(backend: str = "vllm", cache: str = "fp8") -> TrainConfig:
    config = TrainConfig()
    config.policy.refit.kv_scales = True
    config.generation.backend = backend
    config.generation.vllm.kv_cache_dtype = cache
    return config


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            recipe("transformers"),
            "transformers caches keys and values in the dtype of the model; give false, or",
        ),
        (
            recipe(cache="auto"),
            "generation.vllm.kv_cache_dtype is auto; give generation.vllm.kv_cache_dtype=fp8",
        ),
    ],
)
def test_scales_without_an_fp8_cache_are_one_violation(config: TrainConfig, text: str) -> None:
    (found,) = config_violations(config)
    assert found.text.startswith("policy.refit.kv_scales: scales are for an FP8 KV cache")
    assert text in found.text


def test_scales_for_an_fp8_cache_of_vllm_are_accepted() -> None:
    assert config_violations(recipe()) == []
    assert shape_violations(recipe(), {"num_attention_heads": 4}) == []


def test_scales_beside_adapters_that_travel_alone_are_refused() -> None:
    found = RefitConfig.unchecked(kv_scales=True, lora="adapter").violations()
    assert [text.partition(":")[0] for text in found] == ["policy.refit.kv_scales"]


def test_an_unknown_cache_dtype_is_refused_with_the_choices() -> None:
    (found,) = (v for v in config_violations(recipe(cache="fp4")) if "kv_cache_dtype" in v.keys[0])
    assert "'fp4' is not one of auto, fp8" in found.text


def test_latent_attention_is_refused_before_anything_starts() -> None:
    (found,) = shape_violations(recipe(), {"kv_lora_rank": 512})
    assert "latent attention (kv_lora_rank 512)" in found.text
    assert found.text.endswith("give false")
