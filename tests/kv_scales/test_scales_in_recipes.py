"""Scales of the KV cache as recipes ask for them: what can't have any is refused."""

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


@pytest.mark.parametrize(("backend", "cache"), [("transformers", "fp8"), ("vllm", "auto")])
def test_scales_without_an_fp8_cache_are_one_violation(backend: str, cache: str) -> None:
    (found,) = config_violations(recipe(backend, cache))
    assert found.text.startswith("policy.refit.kv_scales:")


def test_scales_for_an_fp8_cache_of_vllm_are_accepted_but_for_latent_attention() -> None:
    assert config_violations(recipe()) == []
    assert shape_violations(recipe(), {"num_attention_heads": 4}) == []
    (found,) = shape_violations(recipe(), {"kv_lora_rank": 512})
    assert "latent attention" in found.text


def test_scales_beside_adapters_that_travel_alone_are_refused() -> None:
    found = RefitConfig.unchecked(kv_scales=True, lora="adapter").violations()
    assert [text.partition(":")[0] for text in found] == ["policy.refit.kv_scales"]


def test_an_unknown_cache_dtype_is_refused() -> None:
    found = [key for violation in config_violations(recipe(cache="fp4")) for key in violation.keys]
    assert any("kv_cache_dtype" in key for key in found)
