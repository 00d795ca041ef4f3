"""Checkpoints that bring code, in recipes: refused while it is not trusted, and trained where it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from rlrefit.recipes.config.load import ConfigError, load_config
from rlrefit.recipes.rollout.arguments import sglang_arguments, vllm_arguments
from rlrefit.recipes.run.inputs import RunInputs
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.workers import checkpoint_folder
from rlrefit.workers.checkpoint_folder import CheckpointUnreachable, copy_own_code
from rlrefit.workers.trainers.megatron.hf_checkpoint import CheckpointMismatch, check_checkpoint
from tests.ahead import FoundAhead, Work, keeping_time, of_all_tests
from tests.families.checkpoints import write_checkpoint
from tests.spawn import run_ranks

from .own_code import load_at_once, write_with_code
from .shared_cluster import on_shared_cluster
from .test_fsdp_runs import Ran, run

KEY = "model.trust_remote_code"


def _train(folder: Path, ray_address: str, recipe: str, trainer: str, of_model: bool) -> Ran:
    path = write_with_code(folder / "own_qwen3", of_model=of_model)
    overrides = (f"model.path={path}", f"{KEY}=true", "algorithm.steps=2", "checkpoint.every=0")
    return run(recipe, folder, ray_address, *overrides, trainer=trainer)


@keeping_time
def train_by_its_model(folder: Path) -> Ran:
    """By the code of its model, in trainer and engine."""
    return on_shared_cluster(_train, folder, "grpo_tiny", "fsdp", True)


@of_all_tests
@keeping_time
def train_by_its_configuration(folder: Path) -> Ran:
    """By Bridge's and vLLM's own models of its architecture, which need the class of its configuration alone."""
    return on_shared_cluster(_train, folder, "grpo_tiny_vllm", "megatron", False)


AHEAD = (train_by_its_model, train_by_its_configuration)


@pytest.mark.parametrize(
    "train",
    [
        train_by_its_model,
        pytest.param(train_by_its_configuration, marks=pytest.mark.full),
    ],
)
def test_a_recipe_trains_a_model_by_the_code_of_its_checkpoint(found_ahead: FoundAhead, train: Work) -> None:
    rows = found_ahead.by(train).rows
    assert [row["weights/version"] for row in rows] == [0, 1]
    assert rows[-1]["refit/bytes_misc"] == 0
    assert max(row["generation_kl"] for row in rows) < 1e-3


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder of copies of code for the process, which imports them from the first one that it was given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def _violations(*overrides: str) -> list[str]:
    try:
        load_config("grpo_tiny", overrides)
    except ConfigError as error:
        return error.violations
    return []


def test_a_checkpoint_whose_code_is_not_trusted_is_refused_beside_all_else_that_is_wrong(
    tmp_path: Path,
) -> None:
    path = f"model.path={write_with_code(tmp_path / 'own')}"
    found = _violations(path, "trainer.ranks=3")
    assert [text for text in found if text.startswith(KEY) and "configuration_own.OwnConfig" in text]
    assert len(found) == len(_violations(path, f"{KEY}=true", "trainer.ranks=3")) + 1 > 1
    assert _violations(path, f"{KEY}=true") == []


def test_code_beside_a_class_of_transformers_own_is_not_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "known")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoConfig": "gone.Config"}}))
    assert _violations(f"model.path={folder}") == []


def test_engines_are_told_to_run_the_code_only_where_it_is_trusted(tmp_path: Path) -> None:
    path = f"model.path={write_with_code(tmp_path / 'own')}"
    trusting = load_config("grpo_tiny_vllm", [path, f"{KEY}=true", "model.dtype=bfloat16"])
    plain = load_config("grpo_tiny_vllm", ["model.dtype=bfloat16"])
    for config in (trusting, plain):
        told = {"trust_remote_code": True} if config is trusting else {}
        for arguments in (vllm_arguments(config), sglang_arguments(config, None, 0, 0)):
            assert {key: value for key, value in arguments.items() if key in ("trust_remote_code",)} == told


def test_a_checkpoint_is_checked_against_the_model_that_it_brings(tmp_path: Path) -> None:
    folder = write_with_code(tmp_path / "own_checked")
    assert check_checkpoint(folder, trust_remote_code=True).model_type == "own_qwen3"
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointMismatch, match=r"layers\.0\.mlp\.up_proj"):
        check_checkpoint(folder, trust_remote_code=True)


def test_code_of_a_model_that_cannot_be_run_here_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    raises = "raise RuntimeError('it is not there')\n"
    for name, change in {
        "at_once": lambda code: raises + code,
        "later": lambda code: code + f"\n    def state_dict(self, *_, **__):\n        {raises}",
    }.items():
        folder = write_with_code(tmp_path / f"own_fails_{name}")
        file = folder / "modeling_own.py"
        file.write_text(change(file.read_text()))
        with pytest.raises(CheckpointMismatch, match="it is not there"):
            check_checkpoint(folder, trust_remote_code=True, needs_model=True)
        assert check_checkpoint(folder, trust_remote_code=True).model_type == "own_qwen3"


def test_what_is_wrong_with_a_checkpoint_that_brings_no_code_is_not_laid_on_code(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "plain")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "no_such_act"}))
    for trusted in (False, True):
        with pytest.raises(KeyError):
            check_checkpoint(folder, trust_remote_code=trusted)


@pytest.mark.parametrize("trusted", ["false", "true"])
def test_a_configuration_that_cannot_be_read_is_told_with_the_key_as_without(
    trusted: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "broken")
    config = load_config("grpo_tiny", [f"model.path={folder}", f"{KEY}={trusted}"])
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        RunInputs(config, str(folder))


def test_code_that_cannot_be_run_here_is_told_of_its_configuration_and_left_out_of_its_model(
    tmp_path: Path,
) -> None:
    folder = write_with_code(tmp_path / "own_model_fails")
    file = folder / "modeling_own.py"
    file.write_text(
        "raise RuntimeError('this release of transformers has not what it takes')\n" + file.read_text()
    )
    assert check_checkpoint(folder, trust_remote_code=True).model_type == "own_qwen3"
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors"):
        check_checkpoint(folder, trust_remote_code=True)
    folder = write_with_code(tmp_path / "own_configuration_fails")
    file = folder / "configuration_own.py"
    file.write_text("raise RuntimeError('something is missing')\n" + file.read_text())
    with pytest.raises(CheckpointMismatch, match="something is missing"):
        check_checkpoint(folder, trust_remote_code=True)
    config = load_config("grpo_tiny", [f"model.path={folder}", f"{KEY}=true"])
    with pytest.raises(ConfigError, match="something is missing"):
        RunInputs(config, str(folder))


def test_kimi_k25_which_brings_its_configuration_is_read_and_its_files_are_checked(tmp_path: Path) -> None:
    folder = Path(write_checkpoint("kimi_k25", tmp_path / "kimi_k25_checked", short=True))
    assert any(text.startswith(KEY) for text in _violations(f"model.path={folder}"))
    assert check_checkpoint(folder, trust_remote_code=True).model_type == "kimi_k25"
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors"):
        check_checkpoint(folder, trust_remote_code=True)


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.experts.3.up_proj.weight", None])
def test_weights_are_compared_by_name_where_only_the_configuration_can_be_run_and_the_catalogue_has_the_family(
    lost: str | None, tmp_path: Path
) -> None:
    folder = Path(write_checkpoint("kimi_k2", tmp_path / f"kimi_{lost}", changes={"vocab_size": 64}))
    other = make_checkpoint("qwen3", tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(other / name, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if lost is not None:
        del tensors[lost]
    save_file(tensors, file, {"format": "pt"})
    config = load_config("grpo_tiny", [f"model.path={folder}", f"{KEY}=true"])
    try:
        RunInputs(config, str(folder))
        found = []
    except ConfigError as error:
        found = [text for text in error.violations if "whole" in text]
    assert [lost in text for text in found] == ([] if lost is None else [True])


def test_ranks_that_share_a_folder_of_code_find_it_whole_and_one_of_them_has_written_it(
    tmp_path: Path,
) -> None:
    checkpoint = write_with_code(tmp_path / "own_shared")
    copied = run_ranks(load_at_once, 4, checkpoint, tmp_path / "copies")
    assert sorted(copied)[:3] == [0, 0, 0]
    assert sum(copied) > 1


def test_code_of_tokenizers_and_of_the_hub_is_copied_where_it_is_and_none_is_run(tmp_path: Path) -> None:
    checkpoint = write_with_code(tmp_path / "own_of_tokenizer")
    (checkpoint / "tokenization_own.py").write_text("raise RuntimeError('it was run')\n")
    names = {
        "AutoTokenizer": [None, "tokenization_own.Tokenizer"],
        "AutoProcessor": "else/where--other.Processor",
    }
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"auto_map": names}))
    (checkpoint / "generation_config.json").write_text("{")
    copy_own_code(checkpoint)
    found = Path(dynamic_module_utils.HF_MODULES_CACHE).rglob("own_of_tokenizer/*/*.py")
    assert {path.name for path in found} - {"__init__.py"} == {
        "configuration_own.py",
        "modeling_own.py",
        "tokenization_own.py",
    }


def test_code_that_does_not_parse_is_told_by_who_runs_it_alone(tmp_path: Path) -> None:
    folder = write_with_code(tmp_path / "own_unparsed")
    (folder / "modeling_own.py").write_text("def broken(:\n")
    copy_own_code(folder)
    assert check_checkpoint(folder, trust_remote_code=True).model_type == "own_qwen3"


def test_copies_that_cannot_be_written_are_refused_where_there_is_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_with_code(tmp_path / "own_unwritten")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "file" / "modules"))
    with pytest.raises(CheckpointUnreachable, match="HF_MODULES_CACHE"):
        copy_own_code(folder)
    copy_own_code(make_checkpoint("qwen3", tmp_path / "plain"))


def test_a_lock_that_stays_held_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_with_code(tmp_path / "own_locked")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(checkpoint_folder, "_COPYING_S", 0.1)
    lock = tmp_path / "modules" / ".rlrefit.lock"
    lock.parent.mkdir()
    with FileLock(lock), pytest.raises(CheckpointUnreachable, match=re.escape(str(lock))):
        copy_own_code(folder)
