"""Opening models: bundled, by path, and what is said of those that are not known."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from rlrefit.recipes.plan.catalog import CatalogError, Model, bundled_models, open_model

from .shrunken import CONFIGS


def test_a_config_is_opened_by_its_path_and_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    by_folder, by_path = open_model(str(tmp_path)), open_model(str(tmp_path / "config.json"))
    assert by_folder.specs() == by_path.specs()
    assert by_folder.specs()[0].dtype == torch.bfloat16
    assert open_model(str(tmp_path), torch.float32).specs()[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; known are bailing_moe, bailing_moe_v2, deepseek_v3"),
        (CONFIGS["qwen3"] | {"intermediate_size": None}, "'intermediate_size'"),
        (CONFIGS["qwen3"] | {"hidden_size": "128"}, "hidden_size .*'128'"),
        # The weights of a language model inside of a larger one have other names.
        ({"model_type": "seeing", "text_config": CONFIGS["qwen3"]}, "seeing"),
        ([], "JSON"),
        ("{", "JSON"),
    ],
)
def test_a_config_of_no_known_model_is_refused(tmp_path: Path, config: Any, told: str) -> None:
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if value is not None}
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CatalogError, match=told):
        open_model(str(tmp_path))


def test_names_that_are_misspelled_or_cannot_be_had_from_the_hub_are_clear_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*args: object) -> str:
        raise ConnectionError("no network")

    with pytest.raises(CatalogError, match=r"did you mean qwen3-8b"):
        open_model("qwen3-8c")
    with pytest.raises(CatalogError, match=r"no ./qwen3-8b"):
        open_model("./qwen3-8b")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(CatalogError, match=r"'someone/something' .*no network"):
        open_model("someone/something")


def test_a_folder_without_a_config_and_a_file_of_weights_are_told_from_unknown_names(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF\x9d")
    with pytest.raises(CatalogError, match=r"the folder .* has no config.json"):
        open_model(str(tmp_path))
    with pytest.raises(CatalogError, match=r"model.gguf is no config.json"):
        open_model(str(weights))


# Their checkpoints have a prediction layer that Bridge leaves out: a layer as the last one, norms and a projection.
_LEFT_OUT = ("glm-5", "qwen3-next-80b-a3b")


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_models_have_the_published_number_of_parameters(name: str) -> None:
    model = open_model(name)
    specs = model.specs()
    count = sum(prod(spec.shape) for spec in specs)
    if name in _LEFT_OUT:
        last = f"model.layers.{model.config['num_hidden_layers'] - 1}."
        hidden = model.config["hidden_size"]
        count += sum(prod(spec.shape) for spec in specs if spec.name.startswith(last))
        count += 3 * hidden + 2 * hidden * hidden
    elif model.config["model_type"] == "nemotron_h":
        # The published number leaves out biases of routers.
        count -= sum(prod(s.shape) for s in specs if s.name.endswith("e_score_correction_bias"))
    elif model.config.get("num_nextn_predict_layers") and model.config["model_type"] != "glm4_moe_lite":
        # Prediction layers have copies of embedding and head, which Bridge leaves out but for GLM-4.7-Flash.
        count += 2 * prod((model.config["vocab_size"], model.config["hidden_size"]))
    if name == "kimi-k2":
        assert count == pytest.approx(1.04e12, rel=0.02)
    else:
        assert count == model.config["_parameters"]


def test_layers_of_a_delta_net_are_told_by_their_interval_or_one_by_one() -> None:
    told = {key: value for key, value in CONFIGS["qwen3_next"].items() if key != "layer_types"}
    assert Model("told", told).specs() == Model("listed", CONFIGS["qwen3_next"]).specs()


def test_kimis_image_encoder_is_told_by_the_keys_of_vllms_class_or_by_the_published_ones() -> None:
    own = CONFIGS["kimi_k25"]
    prefixed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision = {(f"vt_{key}" if key in prefixed else key): size for key, size in own["vision_config"].items()}
    published = Model("published", own | {"vision_config": vision})
    assert published.specs() == Model("vllm's", own).specs()


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("qwen3_next", {"linear_num_value_heads": 6}, "linear_num_value_heads 6"),
        ("qwen3_next", {"num_nextn_predict_layers": 1}, "prediction layers"),
        ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "predicts 2 tokens"),
        ("gemma4", {"attention_k_eq_v": False}, "num_global_key_value_heads"),
        ("gemma4-shared", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ("gemma4-shared", {"attention_k_eq_v": True}, "attention_k_eq_v"),
        ("gemma4-moe", {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ("gemma4", {"tie_word_embeddings": False}, "head of its own"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "indexer_types"),
        ("bailing_moe_v2", {"use_qkv_bias": True}, "use_qkv_bias"),
        (
            "kimi_k25",
            {"text_config": CONFIGS["kimi_k25"]["text_config"] | {"num_nextn_predict_layers": 1}},
            "prediction layers",
        ),
        (
            "bailing_moe_v2",
            {"model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"]},
            "bailing_moe",
        ),
    ],
)
def test_what_the_catalogue_would_lay_out_wrongly_is_refused(
    name: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(CatalogError, match=told):
        Model(name, CONFIGS[name] | changes).specs()
