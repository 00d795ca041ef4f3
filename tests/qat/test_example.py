"""The example runs as its text says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from rlrefit.recipes.tiny.checkpoints import make_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "qat_nvfp4.py"


def test_the_example_trains_and_its_checkpoint_computes_what_it_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runpy.run_path(str(EXAMPLE), run_name="example")["run"]
    assert run(make_checkpoint("qwen3", tmp_path / "qwen3"), tmp_path / "out") == 0
    assert "the checkpoint's logits are the trained model's, bit for bit" in capsys.readouterr().out
