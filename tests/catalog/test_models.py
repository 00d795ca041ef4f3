"""Opening models: bundled, by path, and what is said of those that are not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlrefit.recipes.plan.catalog import CatalogError, open_model

from .shrunken import CONFIGS


def test_a_config_is_opened_by_its_path_and_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    by_folder, by_path = open_model(str(tmp_path)), open_model(str(tmp_path / "config.json"))
    assert by_folder.specs() == by_path.specs()
    assert by_folder.specs()[0].dtype == torch.bfloat16
    assert open_model(str(tmp_path), torch.float32).specs()[0].dtype == torch.float32


def test_an_unknown_family_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CatalogError, match="model_type 'gpt2'; known are deepseek_v3, gpt_oss"):
        open_model(str(tmp_path))


def test_a_config_without_a_key_is_refused_by_the_key(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIGS["qwen3"].items() if key != "intermediate_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CatalogError, match="lacks the key 'intermediate_size'"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CatalogError, match="JSON"):
        open_model(str(tmp_path))


def test_a_misspelled_name_gets_a_suggestion() -> None:
    with pytest.raises(CatalogError, match=r"did you mean qwen3-8b"):
        open_model("qwen3-8c")


def test_a_model_of_the_hub_that_cannot_be_had_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(CatalogError, match=r"'someone/something' can't be had from the hub .*no network"):
        open_model("someone/something")


def test_a_language_model_inside_of_a_larger_one_is_refused_as_its_weights_have_other_names(
    tmp_path: Path,
) -> None:
    config = {"model_type": "seeing", "text_config": CONFIGS["qwen3"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CatalogError, match="seeing"):
        open_model(str(tmp_path))
