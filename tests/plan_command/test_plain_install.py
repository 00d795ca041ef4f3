"""The commands that plan and measure, with no more installed than the package's base dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlrefit.recipes.cli import main
from tests.catalog.shrunken import CONFIGS

# As where the extras are not installed; command lines in, what became of each out.
_WITHOUT_EXTRAS = """
import contextlib, importlib.abc, io, json, sys
ABSENT = {"matplotlib", "huggingface_hub", "ray", "hydra", "datasets", "transformers", "tokenizers", "safetensors",
          "accelerate", "megatron", "vllm", "pandas", "scipy", "einops"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ABSENT else found(name, *rest)
from rlrefit.recipes.cli import main
ended = []
for arguments in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(errors):
        code = main(arguments)
    ended.append((code, errors.getvalue()))
print(json.dumps(ended))
"""


def _run(*commands: list[str]) -> list[tuple[int, str]]:
    """Exit code and errors of each; one process runs them, since it is torch that takes the time to load."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_EXTRAS, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [(code, errors) for code, errors in json.loads(done.stdout)]


def test_reading_the_arguments_loads_nothing_heavy() -> None:
    script = (
        "import sys, rlrefit.recipes.cli; print(*{name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'numpy', 'omegaconf', 'hydra', 'ray', 'transformers', 'megatron', 'vllm', 'matplotlib'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""


def test_a_run_that_names_no_recipe_is_refused_before_torch_is_loaded() -> None:
    script = (
        "import sys; from rlrefit.recipes.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code + 10 * ('torch' in sys.modules))"
    )

    def told(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, "train", *arguments], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr.strip()

    wanted = "rlrefit train needs one recipe=NAME, e.g. recipe=grpo_tiny"
    assert told("algorithm.steps=2", "~validation") == f"{wanted}; rlrefit train --list shows all"
    assert told("grpo_tiny") == f"{wanted}; did you mean recipe=grpo_tiny?"
    for both in (("recipe=grpo_tiny", "recipe=dapo_tiny"), ("recipe=grpo_tiny", "--recipe", "dapo_tiny")):
        assert "grpo_tiny and dapo_tiny" in told(*both)


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("recipe", [["recipe=grpo_tiny"], ["--recipe", "grpo_tiny"]])
def test_train_and_plan_take_a_recipe_in_both_ways(
    command: str, recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *recipe, "algorithm.steps=0"]) == 2
    assert "algorithm.steps: 0 trains nothing" in capsys.readouterr().err


def test_plan_and_bench_need_the_base_dependencies_only_and_name_the_extra_for_pictures_before_they_start(
    tmp_path: Path,
) -> None:
    model, hosts, page = tmp_path / "config.json", tmp_path / "hosts.yaml", tmp_path / "map.html"
    model.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    hosts.write_text("gpus_per_host: 2\n")
    plan = ["plan", "--train", "tp=2", "--gen", "tp=2"]
    bench = ["bench", "--device", "cpu", "--model", str(model), "--train", "tp=1", "--gen", "tp=1"]
    planned, refused, unbenched = _run(
        [*plan, "--model", str(model), "--topology", str(hosts), "--heat-map", str(page), "--json"],
        [*plan, "--model", "some/model", "--heat-map", str(tmp_path / "map.png")],
        [*bench, "--timeline", str(tmp_path / "stages.png")],
    )
    code, errors = planned
    assert code == 0, errors
    assert page.exists()
    code, errors = refused
    assert code == 2
    assert "needs matplotlib: pip install 'rlrefit[plots]'; or give .html" in errors
    assert "needs huggingface_hub: pip install 'rlrefit[hub]'" in errors
    code, errors = unbenched
    assert code == 2
    assert "needs matplotlib: pip install 'rlrefit[plots]'" in errors
    assert ".html" not in errors


def test_commands_that_need_more_name_the_extras_beside_what_else_is_wrong(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    layouts = ["--model", str(model), "--train", "ep=2", "--gen", "tp=1"]
    told = _run(
        ["train", "recipe=grpo_tiny"],
        ["plan", *layouts, "--enumerate-with-bridge", "--compile-ranks", "0"],
        ["plan", "--recipe", "grpo_tiny"],
        ["bench", "--live", *layouts, "--device", "cpu", "--refits", "0"],
    )
    wanted = (
        ["ray", "hydra", "rlrefit[ray]", "megatron", "vllm"],
        ["enumerate-with-bridge", "megatron-core", "megatron-bridge", "einops", "compile-ranks"],
        ["hydra", "rlrefit[ray]"],
        ["bench", "--live", "megatron-core", "megatron-bridge", "einops", "rlrefit[vllm]", "--refits"],
    )
    for (code, errors), named in zip(told, wanted, strict=True):
        assert code == 2
        assert "Traceback" not in errors
        assert [name for name in named if name not in errors] == []
