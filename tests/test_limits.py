"""A session that stands still ends, and tells where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Sessions that never end by themselves, and what each waits in. No signal interrupts them.
HANGING = {
    "in a test": ("def test_a():\n    stand_still()\n", "in test_a"),
    "after an error": (
        "import pytest\n@pytest.fixture\ndef held():\n    yield\n    stand_still()\ndef test_a(held):\n    assert not held, 0\n    raise KeyError\n",
        "in held",
    ),
    "in a collection": ("stand_still()\n", "in <module>"),
    "at the end": ("import atexit\natexit.register(stand_still)\ndef test_a(): pass\n", "in stand_still"),
}
_CONFTEST = """
from tests.limits import Limits

def pytest_configure(config):
    config.pluginmanager.register(Limits(loading_s=%s, grace_s=1.0, ending_s=8.0))
"""
_STAND_STILL = """
import signal, time

def stand_still():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)

"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code of each session, and what it wrote to its standard error."""
    running = {}
    for where, (body, _) in HANGING.items():
        folder = tmp_path_factory.mktemp("hanging")
        (folder / "conftest.py").write_text(_CONFTEST % (8.0 if where == "in a collection" else 90.0))
        (folder / "test_hanging.py").write_text(_STAND_STILL + body)
        command = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "--timeout", "1"]
        running[where] = subprocess.Popen(
            [*command, "--rootdir", folder, folder],
            cwd=ROOT,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        told = {where: session.communicate(timeout=100)[1] for where, session in running.items()}
        return {where: (running[where].returncode, text) for where, text in told.items()}
    finally:
        for session in running.values():
            session.kill()
            session.wait(10)


@pytest.mark.parametrize("where", HANGING)
def test_a_session_that_stands_still_ends_and_tells_where(
    where: str, ended: dict[str, tuple[int, str]]
) -> None:
    code, told = ended[where]
    assert code == 1
    assert "Timeout (0:00:" in told
    assert HANGING[where][1] in told
