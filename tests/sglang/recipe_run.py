"""Whole runs of ``grpo_tiny_sglang``, by the command line as a user gives it.

Where SGLang has its packages in folders of its own, ENGINE_PATH is the PYTHONPATH of the engine's processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlrefit.recipes.run.files import read_json_lines

STEPS = 2


def run(root: Path, name: str, *overrides: str, timeout_s: float) -> list[dict[str, Any]]:
    """The metrics of each step."""
    engine_path = os.environ.get("ENGINE_PATH")
    arguments = (
        "recipe=grpo_tiny_sglang",
        f"name={name}",
        f"run_root={root}",
        f"algorithm.steps={STEPS}",
        "trainer.ranks=1",
        "trainer.tensor_parallel=1",
        "checkpoint.every=0",
        "policy.refit.verify=full",
        f"ray.timeout_s={timeout_s}",
        *([f"ray.generation_env.PYTHONPATH={engine_path}"] if engine_path else []),
        *overrides,
    )
    done = subprocess.run(
        [sys.executable, "-m", "rlrefit.recipes.cli", "train", *arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout
    return read_json_lines(root / name / "metrics.jsonl")


def records(root: Path, name: str, file: str) -> list[dict[str, Any]]:
    """Lines of another file of the run: ``stages.jsonl``, ``refits.jsonl``."""
    return read_json_lines(root / name / file)
