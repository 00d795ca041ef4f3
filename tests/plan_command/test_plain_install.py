"""The commands that plan and measure, with no more installed than the package's base dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.catalog.shrunken import CONFIGS

# As where the extras are not installed.
_WITHOUT_EXTRAS = """
import importlib.abc, sys
ABSENT = {"matplotlib", "huggingface_hub", "ray", "hydra", "datasets", "transformers", "tokenizers", "safetensors",
          "accelerate", "megatron", "vllm", "pandas", "scipy"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ABSENT else found(name, *rest)
from rlrefit.recipes.cli import main
sys.exit(main(sys.argv[1:]))
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_EXTRAS, *arguments], capture_output=True, text=True, timeout=120
    )


def test_reading_the_arguments_loads_nothing_heavy() -> None:
    script = (
        "import sys, rlrefit.recipes.cli; print(*{name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'numpy', 'omegaconf', 'hydra', 'ray', 'transformers', 'megatron', 'vllm', 'matplotlib'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3_moe"]))
    return str(path)


def test_plan_needs_the_base_dependencies_only_and_names_the_extra_for_pictures(
    model: str, tmp_path: Path
) -> None:
    layouts = ("--train", "tp=2", "--gen", "tp=2")
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("gpus_per_host: 2\n")
    page = tmp_path / "map.html"
    planned = _run(
        "plan", "--model", model, *layouts, "--topology", str(hosts), "--heat-map", str(page), "--json"
    )
    assert planned.returncode == 0, planned.stderr
    assert page.exists()
    refused = _run("plan", "--model", "some/model", *layouts, "--heat-map", str(tmp_path / "map.png"))
    assert refused.returncode == 2
    assert "needs matplotlib: pip install 'rlrefit[plots]'; or give .html" in refused.stderr
    assert "needs huggingface_hub: pip install 'rlrefit[hub]'" in refused.stderr


def test_bench_without_matplotlib_refuses_a_picture_before_it_starts(model: str, tmp_path: Path) -> None:
    refused = _run(
        *("bench", "--device", "cpu", "--model", model, "--train", "tp=1", "--gen", "tp=1"),
        *("--timeline", str(tmp_path / "stages.png")),
    )
    assert refused.returncode == 2
    assert "needs matplotlib: pip install 'rlrefit[plots]'" in refused.stderr
    assert ".html" not in refused.stderr
