"""The examples run as their text says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.timeout(300)
def test_a_third_party_ppo_worker_that_inherits_the_mixin_learns_from_its_engine_while_it_is_offloaded() -> (
    None
):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "inherit_the_mixin.py")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("bytes shard to shard" in line for line in lines) == 6
    assert lines[-2:] == ["the engine follows the actor", "the actor learns"]


def test_the_third_party_worker_knows_nothing_of_rlrefit() -> None:
    assert "rlrefit." not in (EXAMPLES / "ppo_worker.py").read_text()
