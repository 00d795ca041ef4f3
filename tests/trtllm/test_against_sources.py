"""The script that runs TensorRT-LLM's own files, over the doubles in their places: both have to pass the same checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .package_double import modules_of
from .published import PUBLISHED

_DOUBLE = """
import sys
from tests.trtllm.package_double import modules_of
vars(sys.modules[__name__]).update(
    {{name: held for name, held in vars(modules_of({generation!r})[__name__]).items() if name[:2] != "__"}}
)
"""


@pytest.mark.parametrize(
    "generation", ["both", *(pytest.param(of, marks=pytest.mark.full) for of in ("allow-list", "deny-list"))]
)
def test_the_doubles_pass_what_the_published_files_have_to_pass(generation: str, tmp_path: Path) -> None:
    held = modules_of(generation)
    for name in PUBLISHED:
        double = held.get(f"tensorrt_llm.{name}")
        if double is not None and any(not attribute.startswith("__") for attribute in vars(double)):
            file = tmp_path / "tensorrt_llm" / f"{name.replace('.', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_DOUBLE.format(generation=generation))
    command = [sys.executable, "-m", "tests.trtllm.against_sources", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "15 passed, 1 not run, 0 failed"


def test_a_folder_without_the_sources_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.trtllm.against_sources", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "rlhf_utils.py" in done.stderr
