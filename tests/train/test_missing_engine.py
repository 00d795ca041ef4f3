"""An engine whose package this Python lacks: told before anything starts, with what else is wrong."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlrefit.recipes.cli import main
from rlrefit.recipes.config import options as option_checks
from rlrefit.recipes.config.load import ConfigError, load_config
from rlrefit.workers.trainers.megatron import cpu_standins
from tests.bench.test_live import write_moe


@pytest.fixture(params=["vllm", "sglang"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend whose package is not there, whatever this Python has."""
    backend = str(request.param)

    def found(name: str) -> Any:
        return None if name == backend else find_spec(name)

    monkeypatch.setattr(option_checks, "find_spec", found)
    return backend


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_train_names_the_package_unless_the_engine_has_others_or_nothing_is_started(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = f"grpo_tiny_{missing}"
    command = ("train", f"recipe={recipe}", f"run_root={tmp_path / 'runs'}", "algorithm.steps=0")
    told = _told(capsys, *command)
    for part in (f"pip install 'rlrefit[{missing}]'", "ray.generation_env.PYTHONPATH", "algorithm.steps: 0"):
        assert part in told
    assert not (tmp_path / "runs").exists()
    load_config(recipe)  # as plans do
    with pytest.raises(ConfigError) as refused:
        load_config("grpo_tiny", ["generation.backend=torch.missing"], to_run=True)
    assert str(refused.value).count("generation.backend:") == 1
    own = (f"+ray.generation_env.PYTHONPATH=/{missing}", f"ray.generation_python={sys.executable}")
    for elsewhere in (*own, "ray.address=auto"):
        load_config(recipe, [elsewhere], to_run=True)


def test_train_names_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("grpo_tiny", ["ray.generation_python=/nowhere/python"], to_run=True)
    (told,) = refused.value.violations
    assert told.startswith("ray.generation_python:")


@pytest.mark.parametrize("absent", ["megatron.core", "megatron.bridge", "einops"])
def test_train_names_what_a_megatron_trainer_lacks_and_nothing_else(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(option_checks, "find_spec", lambda name: None if name == absent else find_spec(name))
    recipe = ("train", "recipe=grpo_tiny", f"run_root={tmp_path / 'runs'}")
    told = _told(capsys, *recipe, "algorithm.steps=0")
    assert "trainer.backend: Megatron" in told
    packages = {"megatron.core": "megatron-core", "megatron.bridge": "megatron-bridge", "einops": "einops"}
    assert [p for module, p in packages.items() if f"pip install {p}" in told or f"'{p}>=" in told] == [
        packages[absent]
    ]
    assert "algorithm.steps: 0 trains nothing" in told
    if absent == "einops":
        for elsewhere in ("trainer=fsdp", "+ray.trainer_env.PYTHONPATH=/packages", "ray.address=auto"):
            load_config("grpo_tiny", [elsewhere], to_run=True)


@pytest.mark.parametrize(("name", "package"), [("einops", "einops"), ("megatron.core", "megatron-core")])
def test_an_import_of_megatron_that_fails_names_the_package_that_is_not_there(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(cpu_standins, "install", fail)
    monkeypatch.setattr(cpu_standins.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError) as told:
        cpu_standins.ensure_megatron()
    assert told.value.name == name
    assert [p for p in ("einops", "megatron-core") if p in str(told.value)] == [package]


def test_bench_live_names_the_package_unless_its_engine_has_an_interpreter_or_a_path_of_its_own(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = ("--model", write_moe(tmp_path), "--train", "ep=2", "--gen", "tp=1", "--device", "cpu")
    command = ("bench", "--live", "--backend", missing, *layouts, "--refits", "0")
    told = _told(capsys, *command)
    for part in (f"pip install 'rlrefit[{missing}]'", "--engine-pythonpath", "--refits: 0 is too small"):
        assert part in told
    for own in (("--engine-pythonpath", "/elsewhere"), ("--engine-python", "python3")):
        assert "--backend" not in _told(capsys, *command, *own)
