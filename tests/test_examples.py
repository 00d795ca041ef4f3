"""The examples run as their text says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.timeout(300)
def test_a_third_party_worker_that_inherits_the_mixin_keeps_its_engine_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "inherit_the_mixin.py")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("bytes shard to shard" in line for line in lines) == 3
    assert lines[-1] == "the engine follows the trainer"
