"""The script that runs TensorRT-LLM's own files, over the doubles in their places: both have to pass the same checks."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.spawn import run_alone

from . import against_sources
from .package_double import modules_of
from .published import PUBLISHED

_DOUBLE = """
import sys
from tests.trtllm.package_double import modules_of
vars(sys.modules[__name__]).update(
    {{name: held for name, held in vars(modules_of({generation!r})[__name__]).items() if name[:2] != "__"}}
)
"""


def run_script(folder: str) -> tuple[int, str]:
    """Its exit code and what it says, in a process of its own, in which it replaces modules."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["against_sources", folder]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            code = against_sources.main()
        except SystemExit as ended:
            code = int(str(ended))
    return code, said.getvalue()


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
    code, said = run_alone(run_script, str(tmp_path), environment={})
    assert code == 0, said
    assert said.splitlines()[-1] == "15 passed, 1 not run, 0 failed"


def test_a_folder_without_the_sources_is_refused(tmp_path: Path) -> None:
    code, said = run_alone(run_script, str(tmp_path), environment={})
    assert code == 2
    assert "rlhf_utils.py" in said
