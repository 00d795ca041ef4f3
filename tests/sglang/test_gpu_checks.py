"""What the tests on GPUs go by, where there is none: their check of memory by stage, and what they tell of a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlrefit.integration.colocated.memory import ProcessMemory, StageRecord
from tests.gpu.test_sglang_on_gpu import _KV_BYTES, _require_memory

_MOVES = (
    "sleep",
    "load_trainer",
    "offload_trainer",
    "wake_weights",
    "refit",
    "free_trainer",
    "wake_kv_cache",
)


def _records(kv_bytes: int, kept_each_turn: int) -> list[StageRecord]:
    """Three turns of an engine that gives back and takes ``kv_bytes``, beside memory that grows with each turn."""
    used, found = 10 << 30, []
    for turn in range(3):
        for move in _MOVES:
            used += {"sleep": -kv_bytes, "wake_kv_cache": kv_bytes, "refit": kept_each_turn}.get(move, 0)
            memory = ProcessMemory("engine rank 0", "GPU-a", 0, 0, 0, 0, used, used, 80 << 30)
            found.append(StageRecord(turn, move, "", 0.0, (memory,)))
    return found


def test_memory_that_grows_over_the_turns_hides_no_sleep() -> None:
    _require_memory(_records(_KV_BYTES, kept_each_turn=_KV_BYTES))


def test_an_engine_that_frees_nothing_as_it_sleeps_is_seen() -> None:
    with pytest.raises(AssertionError):
        _require_memory(_records(0, kept_each_turn=0))


def test_a_killed_session_has_told_its_failures(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        "def test_passes(): pass\n"
        "def test_fails():\n    print('swallowed')\n    assert 'left' == 'right'\n"
        "def test_is_killed(): os._exit(9)\n"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.conftest", "-c", "/dev/null", str(tmp_path)],
        cwd=root,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 9
    assert "test_passes call: passed" in ended.stderr
    assert "test_fails call: failed" in ended.stderr
    assert "assert 'left' == 'right'" in ended.stderr
