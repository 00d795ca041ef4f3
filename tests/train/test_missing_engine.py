"""An engine whose package this Python lacks: told before anything starts, with what else is wrong."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlrefit.recipes import option_checks
from rlrefit.recipes.cli import main
from rlrefit.recipes.config import ConfigError, load_config
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


def test_train_names_the_package_and_where_to_get_it_beside_all_else_that_is_wrong(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ("train", f"recipe=grpo_tiny_{missing}", f"run_root={tmp_path / 'runs'}")
    told = _told(capsys, *recipe, "algorithm.steps=0")
    assert f"generation.backend: {missing}, and this Python (" in told
    assert f"pip install 'rlrefit[{missing}]'" in told
    assert "ray.generation_env.PYTHONPATH" in told
    assert "algorithm.steps: 0 trains nothing" in told
    assert not (tmp_path / "runs").exists()


def test_packages_are_not_looked_for_where_the_engine_has_others_or_nothing_is_started(missing: str) -> None:
    recipe = f"grpo_tiny_{missing}"
    load_config(recipe)  # as plans do
    load_config("grpo_tiny", to_run=True)
    with pytest.raises(ConfigError) as refused:
        load_config("grpo_tiny", ["generation.backend=torch.missing"], to_run=True)
    assert str(refused.value).count("generation.backend:") == 1
    for elsewhere in (f"+ray.generation_env.PYTHONPATH=/{missing}", "ray.address=auto"):
        load_config(recipe, [elsewhere], to_run=True)


def test_bench_live_names_the_package_unless_its_engine_has_an_interpreter_or_a_path_of_its_own(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = ("--model", write_moe(tmp_path), "--train", "ep=2", "--gen", "tp=1", "--device", "cpu")
    command = ("bench-live", "--backend", missing, *layouts, "--refits", "0")
    told = _told(capsys, *command)
    assert f"--backend: {missing}, and this Python (" in told
    assert f"pip install 'rlrefit[{missing}]'" in told
    assert "--engine-pythonpath" in told
    assert "--refits: 0 is too small" in told
    for own in (("--engine-pythonpath", "/elsewhere"), ("--engine-python", "python3")):
        assert "--backend" not in _told(capsys, *command, *own)
