"""Names and shapes of the catalogue beside the checkpoints that transformers writes."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from rlrefit.recipes.plan.catalog import Model, bundled_models, open_model

from .shrunken import CONFIGS

# kimi_k2 has no class of its own in transformers.
_KNOWN = [name for name, config in CONFIGS.items() if config["model_type"] != "kimi_k2"]


@pytest.mark.parametrize("name", _KNOWN)
def test_weights_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path)
    written: dict[str, tuple[int, ...]] = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            written |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    # NVIDIA's checkpoints, Bridge and vLLM say embeddings.
    written = {key.replace("backbone.embedding.", "backbone.embeddings."): n for key, n in written.items()}
    prediction = f"model.layers.{config['num_hidden_layers']}."
    ours = {
        spec.name: spec.shape
        for spec in Model(name, config).specs()
        if not spec.name.startswith(prediction)  # transformers has no multi-token-prediction layers
    }
    assert ours == written


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_models_have_the_published_number_of_parameters(name: str) -> None:
    model = open_model(name)
    count = sum(prod(spec.shape) for spec in model.specs())
    if name == "deepseek-v3":
        # 671B without the prediction layer, 684.49B with its copies of embedding and head, which Bridge leaves out.
        count += 2 * prod((model.config["vocab_size"], model.config["hidden_size"]))
        assert count == 684_489_845_504
    elif name == "kimi-k2":
        assert count == pytest.approx(1.04e12, rel=0.02)
    else:
        assert count == model.config["_parameters"]
